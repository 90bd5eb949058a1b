"""FP8 attention in Triton as operators of torch.library; the counterpart of :mod:`genrec.hstu.attention.operators`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from genrec.hstu.attention import launch, launch_fp8
from genrec.hstu.attention.dispatch import is_watched, masking_of, split_gradients
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.quantization import SCALES, FP8Tensor, ScoreTensors
from genrec.hstu.attention.request import Request, block_of
from genrec.hstu.attention.triton_schedule import SCHEDULE_ROWS
from genrec.hstu.attention.tuning import tiles_for
from genrec.hstu.precision.formats import E4M3


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, request: Request, *, mode: str) -> Tensor:
    """q, k: (T, H, d_qk), v: (T, H, d_v) -> (T, H, d_v), in mode ``hstu_attn_quantization_mode``."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if not is_watched(q):
        result: Tensor = _Attention.apply(q, k, v, request, mode, needs_grad)
        return result
    batch = (request.offsets, request.num_contexts, request.num_targets, request.scaling_seqlen, request.alpha)
    output: Tensor = _forward(q, k, v, *batch, *masking_of(request.rules), mode, needs_grad)[0]
    return output


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    scaling_seqlen: int,
    alpha: float,
    causal: bool,
    contextual_mask: str,
    max_attn_len: int,
    target_group_size: int,
    mode: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what backward uses again: the schedule, FP8 q, k, v, and their descales.

    All but the output are empty where no gradient is wanted. FP8 goes as uint8, with which autograd has nothing to do.
    """
    rules = MaskRules(causal, contextual_mask, max_attn_len, target_group_size)
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, None)
    return _attend(q, k, v, request, mode, needs_grad)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, request: Request, mode: str, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    schedule = launch.make_schedule(q, request)
    batch = launch_fp8.quantize_batch(q, k, v, schedule, request, mode=mode, needs_grad=needs_grad)
    tiles = tiles_for(q.shape[2], v.shape[2], q.dtype, has_bias=False, is_fp8=True)
    output = launch.forward_fp8(batch, v, schedule, request, tiles, scales=SCALES[mode])
    if batch.v is None:
        return output, *(q.new_empty(0) for _ in range(7))  # type: ignore[return-value]
    kept = (batch.q, batch.k, batch.v)
    values = (x.values.view(torch.uint8) for x in kept)
    return output, schedule, *values, *(x.descale for x in kept)  # type: ignore[return-value]


_forward = torch.library.custom_op("genrec::hstu_attention_fp8_forward", _run_forward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mode, needs_grad = rest[-2:]
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not needs_grad:
        return output, *(q.new_empty(0) for _ in range(7))
    rows = launch_fp8.num_descales(q, offsets.shape[0] - 1, mode)
    values = [x.new_empty((*x.shape[:2], block_of(x.shape[2])), dtype=torch.uint8) for x in (q, k, v)]
    descales = [x.new_empty((rows, x.shape[1]), dtype=torch.float32) for x in (q, k, v)]
    return output, offsets.new_empty((SCHEDULE_ROWS, offsets.shape[0]), dtype=torch.int32), *values, *descales


def _run_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    q_fp8: Tensor,
    k_fp8: Tensor,
    v_fp8: Tensor,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    offsets: Tensor,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    scaling_seqlen: int,
    alpha: float,
    causal: bool,
    contextual_mask: str,
    max_attn_len: int,
    target_group_size: int,
    mode: str,
) -> Tensor:
    """Gradients of v, q, k, each (T, H * d), side by side in one buffer: operators return no views of each other."""
    rules = MaskRules(causal, contextual_mask, max_attn_len, target_group_size)
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, None)
    made = (schedule, q_fp8, k_fp8, v_fp8, q_descale, k_descale, v_descale)
    return _differentiate(grad_output, q, k, v, made, request, mode)


def _differentiate(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, made: Sequence[Tensor], request: Request, mode: str
) -> Tensor:
    """made: what :func:`_attend` returns beside the output."""
    schedule, q_fp8, k_fp8, v_fp8, q_descale, k_descale, v_descale = made
    scored = ScoreTensors(
        q=FP8Tensor(q_fp8.view(E4M3.dtype), q_descale),
        k=FP8Tensor(k_fp8.view(E4M3.dtype), k_descale),
        v=FP8Tensor(v_fp8.view(E4M3.dtype), v_descale),
        grad=launch_fp8.quantize_grad(grad_output, schedule, request, mode=mode),
        scales=SCALES[mode],
    )
    tiles = tiles_for(q.shape[2], v.shape[2], q.dtype, has_bias=False, is_fp8=True)
    return launch.backward(grad_output, q, k, v, schedule, request, tiles, scored)[0]


_backward = torch.library.custom_op("genrec::hstu_attention_fp8_backward", _run_backward, mutates_args=())


@_backward.register_fake
def _(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * (2 * q.shape[2] + v.shape[2])))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *batch = inputs[:6]
    ctx.settings = inputs[6:-1]
    ctx.save_for_backward(q, k, v, *output[1:], *batch)
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *kept = ctx.saved_tensors
    grads = _backward(grad_output, q, k, v, *kept, *ctx.settings)
    return *split_gradients(grads, q, k, v), *(None,) * 11


_forward.register_autograd(_autograd, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operators, without torch.library."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request, mode: str, needs_grad: bool) -> Tensor:
        output, *made = _attend(q, k, v, request, mode, needs_grad)
        ctx.save_for_backward(q, k, v, *made)
        ctx.request, ctx.mode = request, mode
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *made = ctx.saved_tensors
        grads = _differentiate(grad_output, q, k, v, made, ctx.request, ctx.mode)
        return *split_gradients(grads, q, k, v), None, None, None
