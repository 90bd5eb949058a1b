"""The Triton kernels as operators of torch.library, which torch.compile, torch.export and dispatch modes see whole.

Where nobody looks on, the same functions run in a torch.autograd.Function: an operator of torch.library costs the host
some tenths of a millisecond a layer, which is more than short users need on the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from genrec.hstu.attention import launch, triton_jit
from genrec.hstu.attention.bias import RelativeBias, bias_of, tensors_of
from genrec.hstu.attention.dispatch import is_watched, masking_of, split_gradients
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.operators_fp8 import fp8_attention
from genrec.hstu.attention.request import MAX_DIM, Request
from genrec.hstu.attention.triton_schedule import SCHEDULE_ROWS
from genrec.hstu.attention.tuning import Tiles, tiles_for
from genrec.hstu.precision.capability import ATTENTION_CAPABILITY

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    scaling_seqlen: int,
    alpha: float,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    rules: MaskRules,
    bias: RelativeBias | None,
    quantization: str = "bf16",
) -> Tensor:
    """q, k: (T, H, d_qk), v: (T, H, d_v) -> (T, H, d_v). Rows beyond ``offsets[-1]`` and their gradients are zero.

    What the tensors hold is not checked, which would wait for the device: lengths that don't fit give garbage.
    """
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, bias)
    if quantization != "bf16":
        assert bias is None, "refused before"
        return fp8_attention(q, k, v, request, mode=quantization)
    if is_watched(q):
        batch = (offsets, num_contexts, num_targets, scaling_seqlen, alpha)
        output: Tensor = _forward(q, k, v, *tensors_of(bias), *batch, *masking_of(rules))[0]
    else:
        weights = (None, None) if bias is None else (bias.position_weight, bias.time_weight)
        output = _Attention.apply(q, k, v, *weights, request)
    return output


def why_not(q: Tensor, k: Tensor, v: Tensor, *, quantization: str = "bf16") -> str | None:
    """Why these kernels can't serve the request here; None if they can."""
    if triton_jit.triton is None:
        return "Triton is not installed"
    if not q.is_cuda and not triton_jit.INTERPRETED:
        return f"it needs a CUDA device, and q is on {q.device.type!r}"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must share bfloat16, float16 or float32, not {q.dtype}, {k.dtype}, {v.dtype}"
    if triton_jit.INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter has no products of bfloat16"
    if max(q.shape[2], v.shape[2]) > MAX_DIM:
        return f"heads are at most {MAX_DIM} wide, not {max(q.shape[2], v.shape[2])}"
    if q.shape[0] >= 2**31:
        return f"a batch has fewer than 2**31 rows, not {q.shape[0]}"
    if quantization != "bf16" and q.is_cuda and torch.cuda.get_device_capability(q.device) < ATTENTION_CAPABILITY:
        return "FP8 needs a GPU of compute capability 8.9 or higher"
    return None


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_weight: Tensor | None,
    time_weight: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    offsets: Tensor,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    scaling_seqlen: int,
    alpha: float,
    causal: bool,
    contextual_mask: str,
    max_attn_len: int,
    target_group_size: int,
) -> tuple[Tensor, Tensor]:
    """The output, and the schedule of the batch, which backward uses again."""
    bias = bias_of(position_weight, time_weight, query_times, key_times)
    rules = MaskRules(causal, contextual_mask, max_attn_len, target_group_size)
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, bias)
    return launch.forward(q, k, v, request, _tiles(q, v, request))


def _tiles(q: Tensor, v: Tensor, request: Request) -> Tiles:
    is_short = request.has_short_users(q)
    return tiles_for(q.shape[2], v.shape[2], q.dtype, has_bias=request.bias is not None, is_short=is_short)


_forward = torch.library.custom_op("genrec::hstu_attention_forward", _run_forward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    offsets: Tensor = rest[4]
    schedule = offsets.new_empty((SCHEDULE_ROWS, offsets.shape[0]), dtype=torch.int32)
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), schedule


def _run_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    position_weight: Tensor | None,
    time_weight: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    offsets: Tensor,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    scaling_seqlen: int,
    alpha: float,
    causal: bool,
    contextual_mask: str,
    max_attn_len: int,
    target_group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, q, k, each (T, H * d), side by side in one buffer: operators return no views of each other.

    Then those of the weights of the bias in float32, without elements where there is none.
    """
    bias = bias_of(position_weight, time_weight, query_times, key_times)
    rules = MaskRules(causal, contextual_mask, max_attn_len, target_group_size)
    request = Request(offsets, num_contexts, num_targets, scaling_seqlen, alpha, rules, bias)
    return launch.backward(grad_output, q, k, v, schedule, request, _tiles(q, v, request))


_backward = torch.library.custom_op("genrec::hstu_attention_backward", _run_backward, mutates_args=())


@_backward.register_fake
def _(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    position_weight: Tensor | None,
    time_weight: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    sizes = [0 if x is None else x.shape[0] for x in (position_weight, time_weight)]
    grads = q.new_empty((q.shape[0], q.shape[1] * (2 * q.shape[2] + v.shape[2])))
    return grads, *(q.new_empty(size, dtype=torch.float32) for size in sizes)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *batch = inputs[:10]
    ctx.settings = inputs[10:]
    ctx.save_for_backward(q, k, v, output[1], *batch)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, grad_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *batch = ctx.saved_tensors
    grads = _backward(grad_output, q, k, v, *batch, *ctx.settings)
    return *_split(grads, q, k, v, *batch[1:3]), *(None,) * 11


def _split(
    grads: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_weight: Tensor | None,
    time_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the weights of the bias, of those in buffers."""
    of_bias = zip((position_weight, time_weight), grads[1:], strict=True)
    of_qkv = split_gradients(grads[0], q.shape[1], q.shape[2], v.shape[2])
    return *of_qkv, *(None if x is None else grad.to(x.dtype) for x, grad in of_bias)


_forward.register_autograd(_autograd, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operators, without torch.library. The weights of the bias are those of the request."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_weight: Tensor | None,
        time_weight: Tensor | None,
        request: Request,
    ) -> Tensor:
        output, schedule = launch.forward(q, k, v, request, _tiles(q, v, request))
        ctx.save_for_backward(q, k, v, schedule, position_weight, time_weight)
        ctx.request = request
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, schedule, *weights = ctx.saved_tensors
        grads = launch.backward(grad_output, q, k, v, schedule, ctx.request, _tiles(q, v, ctx.request))
        return *_split(grads, q, k, v, *weights), None
