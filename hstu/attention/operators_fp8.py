"""FP8 attention in Triton as operators of torch.library; the counterpart of :mod:`genrec.hstu.attention.operators`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from genrec.hstu.attention import launch, launch_fp8
from genrec.hstu.attention.dispatch import is_watched, masking_of, split_gradients
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.quantization import SCALES, FP8Tensor, ProductTensors, ScoreTensors
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
) -> tuple[Tensor, ...]:
    """The output, and what backward uses again: :data:`_KEPT`.

    All but the output are empty where no gradient is wanted, the last four unless scales are "user". FP8 goes as uint8,
    with which autograd has nothing to do.
    """
    rules = MaskRules(causal, contextual_mask, max_attn_len, target_group_size)
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, None)
    output, made = _attend(q, k, v, request, mode, needs_grad)
    return output, *(q.new_empty(0) if x is None else x for x in made)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, request: Request, mode: str, needs_grad: bool
) -> tuple[Tensor, list[Tensor | None]]:
    schedule = launch.make_schedule(q, request)
    batch = launch_fp8.quantize_batch(q, k, v, schedule, request, mode=mode, needs_grad=needs_grad)
    tiles = tiles_for(q.shape[2], v.shape[2], q.dtype, has_bias=False, is_fp8=True)
    output = launch.forward_fp8(batch, v, schedule, request, tiles, scales=SCALES[mode])
    if batch.v is None:
        return output, [None] * len(_KEPT)
    kept = (batch.q, batch.k, batch.v)
    values = [x.values.view(torch.uint8) for x in kept]
    if batch.q_tiles is None or batch.k_tiles is None:
        return output, [schedule, *values, *(x.descale for x in kept), *(None,) * 4]
    columns = [x.view(torch.uint8) for x in (batch.q_tiles, batch.k_tiles)]
    return output, [schedule, *values, *(x.descale for x in kept), *columns, batch.weight_scale, batch.v_norm]


# What forward returns beside the output. The last four are made, and kept, with "user" scales alone; q, k and v as they
# came with the others alone.
_KEPT = (
    "schedule", "q", "k", "v", "q_descale", "k_descale", "v_descale", "q_tiles", "k_tiles", "weight_scale", "v_norm",
)  # fmt: skip
_forward = torch.library.custom_op(
    "genrec::hstu_attention_fp8_forward",
    _run_forward,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? num_contexts, Tensor? num_targets, int scaling_seqlen, "
        "float alpha, bool causal, str contextual_mask, int max_attn_len, int target_group_size, str mode, "
        f"bool needs_grad) -> ({', '.join('Tensor' for _ in range(1 + len(_KEPT)))})"
    ),
)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mode, needs_grad = rest[-2:]
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not needs_grad:
        return output, *(q.new_empty(0) for _ in _KEPT)
    num_users = offsets.shape[0] - 1
    rows = launch_fp8.num_descales(q, num_users, mode)
    values = [x.new_empty((*x.shape[:2], block_of(x.shape[2])), dtype=torch.uint8) for x in (q, k, v)]
    descales = [x.new_empty((rows, x.shape[1]), dtype=torch.float32) for x in (q, k, v)]
    products = [q.new_empty(0) for _ in range(4)]
    if SCALES[mode] == "user":
        products = [x.new_empty(launch_fp8.tiles_shape(x, num_users), dtype=torch.uint8) for x in (q, k)]
        products += [torch.empty_like(descales[0]) for _ in range(2)]
    return output, offsets.new_empty((SCHEDULE_ROWS, num_users + 1), dtype=torch.int32), *values, *descales, *products


def _run_backward(
    grad_output: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    made: Sequence[Tensor],
    qk_dim: int,
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
    """Gradients of v, q, k, each (T, H * d), side by side in one buffer: operators return no views of each other.

    made: what :func:`_run_forward` returns beside the output.
    """
    rules = MaskRules(causal, contextual_mask, max_attn_len, target_group_size)
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, None)
    return _differentiate(grad_output, (q, k, v), made, qk_dim, request, mode)


def _differentiate(
    grad_output: Tensor,
    inputs: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    qk_dim: int,
    request: Request,
    mode: str,
) -> Tensor:
    """inputs: q, k and v, None with "user" scales; made: what :func:`_attend` returns beside the output."""
    schedule, q_fp8, k_fp8, v_fp8, q_descale, k_descale, v_descale, q_tiles, k_tiles, weight_scale, v_norm = made
    assert schedule is not None
    scales = SCALES[mode]
    has_products = scales == "user"
    grad = launch_fp8.quantize_grad(grad_output, schedule, request, mode=mode, v_norm=v_norm if has_products else None)
    scored = ScoreTensors(
        q=_fp8(q_fp8, q_descale), k=_fp8(k_fp8, k_descale), v=_fp8(v_fp8, v_descale), grad=grad.rows, scales=scales
    )
    tiles = tiles_for(qk_dim, grad_output.shape[2], grad_output.dtype, has_bias=False, is_fp8=True)
    if not has_products:
        q, k, v = inputs
        assert q is not None and k is not None and v is not None
        return launch.backward(grad_output, q, k, v, schedule, request, tiles, scored)[0]
    assert q_tiles is not None and k_tiles is not None and grad.tiles is not None
    assert weight_scale is not None and grad.score_scale is not None
    products = ProductTensors(
        q=q_tiles.view(E4M3.dtype),
        k=k_tiles.view(E4M3.dtype),
        grad=grad.tiles,
        weight_scale=weight_scale,
        score_scale=grad.score_scale,
    )
    scored = replace(scored, products=products)
    return launch.backward_fp8(grad_output, schedule, request, tiles, scored, qk_dim=qk_dim)


def _fp8(values: Tensor | None, descale: Tensor | None) -> FP8Tensor:
    assert values is not None and descale is not None
    return FP8Tensor(values.view(E4M3.dtype), descale)


_backward = torch.library.custom_op("genrec::hstu_attention_fp8_backward", _run_backward, mutates_args=())


@_backward.register_fake
def _(
    grad_output: Tensor, q: Tensor | None, k: Tensor | None, v: Tensor | None, made: Sequence[Tensor], qk_dim: int,
    *_: Any,
) -> Tensor:  # fmt: skip
    num_rows, num_heads, v_dim = grad_output.shape
    return grad_output.new_empty((num_rows, num_heads * (2 * qk_dim + v_dim)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *batch = inputs[:6]
    ctx.settings, ctx.qk_dim = inputs[6:-1], q.shape[2]
    ctx.save_for_backward(*_inputs_to_keep(q, k, v, inputs[-2]), *output[1:], *batch)
    ctx.mark_non_differentiable(*output[1:])


def _inputs_to_keep(q: Tensor, k: Tensor, v: Tensor, mode: str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if SCALES[mode] == "user" else (q, k, v)


def _autograd(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *kept = ctx.saved_tensors
    made, batch = kept[: len(_KEPT)], kept[len(_KEPT) :]
    grads = _backward(grad_output, q, k, v, made, ctx.qk_dim, *batch, *ctx.settings)
    return *split_gradients(grads, grad_output.shape[1], ctx.qk_dim, grad_output.shape[2]), *(None,) * 11


_forward.register_autograd(_autograd, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operators, without torch.library."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request, mode: str, needs_grad: bool) -> Tensor:
        output, made = _attend(q, k, v, request, mode, needs_grad)
        ctx.save_for_backward(*_inputs_to_keep(q, k, v, mode), *made)
        ctx.request, ctx.mode, ctx.qk_dim = request, mode, q.shape[2]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = _differentiate(grad_output, saved[:3], saved[3:], ctx.qk_dim, ctx.request, ctx.mode)
        return *split_gradients(grads, grad_output.shape[1], ctx.qk_dim, grad_output.shape[2]), None, None, None
