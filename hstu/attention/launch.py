"""Launches of the attention kernels. The host reads no tensor, so it never waits for the device.

Heads of other widths than 32, 64, 128 and 256 are copied into the next of these, completed with zeros.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from genrec.hstu.attention import hopper_backward, hopper_forward
from genrec.hstu.attention import triton as kernels
from genrec.hstu.attention.bias import RelativeBias
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.quantization import BLOCK, FP8Tensor, QuantizedBatch
from genrec.hstu.attention.tuning import KernelTile, Tiles

MIN_DIM, MAX_DIM = 32, 256
# Programs add to this many copies of a bias's gradient, so that not all queue for the same few numbers.
_BIAS_SUMS = 64
_SCHEDULE_BLOCK = 64


@dataclass(frozen=True)
class Request:
    """What :func:`genrec.hstu.attention.hstu_attention` was asked for, but for q, k and v."""

    offsets: Tensor
    num_contexts: Tensor | None
    num_targets: Tensor | None
    scaling_seqlen: int
    alpha: float
    rules: MaskRules
    bias: RelativeBias | None

    @property
    def num_users(self) -> int:
        """B."""
        return self.offsets.shape[0] - 1

    def pointers(self) -> tuple[Tensor, ...]:
        """The tensors that kernels take. What isn't there is never read, but something must stand for it."""
        given: tuple[Tensor | None, ...] = (self.offsets, self.num_contexts, self.num_targets)
        if self.bias is None:
            given += (None,) * 4
        else:
            bias = self.bias
            given += (bias.position_weight, bias.time_weight, bias.query_times, bias.key_times)
        return tuple(self.offsets if x is None else x.contiguous() for x in given)

    def scalars(self, q: Tensor) -> tuple[float, ...]:
        """The numbers that kernels take."""
        sizes = (self.num_users, q.shape[0], q.shape[1])
        weights = (0, 0) if self.bias is None else (self.bias.position_weight.shape[0], self.bias.time_weight.shape[0])
        masking = (self.rules.max_attn_len, self.rules.target_group_size)
        return (*sizes, *masking, *weights, self.alpha / 2, 1.0 / self.scaling_seqlen)

    def constants(self, qk_dim: int, v_dim: int, tile: KernelTile, tanh: str, scales: str = "none") -> dict[str, Any]:
        """What kernels are compiled for. Widths are blocks'."""
        return {
            "QK_DIM": qk_dim,
            "V_DIM": v_dim,
            "QK_BLOCK": qk_dim,
            "V_BLOCK": v_dim,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "CAUSAL": self.rules.causal,
            "CONTEXTS": "none" if self.num_contexts is None else self.rules.contextual_mask,
            "TARGETS": self.num_targets is not None,
            "WINDOW": self.rules.max_attn_len > 0,
            "BIAS": self.bias is not None,
            "SCALES": scales,
            "TANH": "exact" if kernels.INTERPRETED else tanh,
            "PRECISION": "ieee",  # matters for float32 alone, which would be rounded to TF32
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def make_schedule(q: Tensor, request: Request) -> Tensor:
    """(3, B + 1) int32, of ``schedule_kernel``: in which order tiles are taken."""
    schedule = torch.empty(3, request.num_users + 1, dtype=torch.int32, device=q.device)
    with device_of(q):
        kernels.schedule_kernel[(request.num_users // _SCHEDULE_BLOCK + 1,)](
            request.offsets, schedule, request.num_users, q.shape[0], BLOCK=_SCHEDULE_BLOCK
        )
    return schedule


def forward(q: Tensor, k: Tensor, v: Tensor, request: Request, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The output (T, H, d_v), and the schedule that :func:`backward` takes."""
    schedule = make_schedule(q, request)
    output = torch.empty(*v.shape[:2], block_of(v.shape[2]), dtype=v.dtype, device=v.device)
    if v.numel() > 0 and hopper_forward.why_not(q, k, v, request) is None:
        hopper_forward.forward(q, k, v, output, schedule, request)
    elif v.numel() > 0:
        q, k, padded = (as_blocks(x) for x in (q, k, v))
        with device_of(q):
            kernels.forward_kernel[grid(q, request, tiles.forward.rows)](
                *(q, k, padded, output),
                *_descriptors(k, padded, tiles.forward.keys, tiles),
                *(None,) * 4,
                schedule,
                *request.pointers(),
                *strides(q, k, padded, output),
                *request.scalars(q),
                **request.constants(q.shape[2], padded.shape[2], tiles.forward, tiles.tanh),
            )
    return narrowed(output, v.shape[2]), schedule


def forward_fp8(
    batch: QuantizedBatch, v: Tensor, schedule: Tensor, request: Request, tiles: Tiles, *, scales: str
) -> Tensor:
    """The output (T, H, d_v) of quantized q, k and v, in the dtype of ``v``; scales: of the mode."""
    if BLOCK % tiles.forward.keys:
        raise ValueError(f"FP8 takes tiles of keys that divide {BLOCK}, not {tiles.forward.keys}")
    width = batch.v_tiles.values.shape[2]
    output = torch.empty(*v.shape[:2], width, dtype=v.dtype, device=v.device)
    if v.numel() > 0 and hopper_forward.why_not_fp8(v, batch, request, scales) is None:
        hopper_forward.forward_fp8(batch, output, schedule, request, scales)
    elif v.numel() > 0:
        query, key, value = batch.q, batch.k, batch.v_tiles
        with device_of(v):
            kernels.forward_kernel[grid(v, request, tiles.forward.rows)](
                *(query.values, key.values, value.values, output),
                *_descriptors(key.values, None, tiles.forward.keys, tiles),
                *(query.descale, key.descale, value.descale, batch.weight_scale),
                schedule,
                *request.pointers(),
                *strides(query.values, key.values, value.values, output),
                *request.scalars(v),
                **request.constants(query.values.shape[2], width, tiles.forward, tiles.tanh, scales),
            )
    return narrowed(output, v.shape[2])


@dataclass(frozen=True)
class ScoreTensors:
    """What backward makes S = alpha q k^T and dP = grad v^T of in FP8; scales: of the mode."""

    q: FP8Tensor
    k: FP8Tensor
    v: FP8Tensor
    grad: FP8Tensor
    scales: str


def backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    request: Request,
    tiles: Tiles,
    fp8: ScoreTensors | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, q and k side by side, as the layer's projection has them: (T, H * (d_v + 2 * d_qk)).

    Then those of the bias's weights, of no elements where there is no bias. Each gradient of q, k and v is summed in
    one program, in the same order every time; with ``tiles.fused`` that of q, and those of a bias always, are summed
    with atomics, in any order.
    """
    num_rows, num_heads = q.shape[:2]
    dims = (v.shape[2], q.shape[2], q.shape[2])
    bias_grads = [torch.empty(0, device=q.device) for _ in range(2)]
    if request.bias is not None:
        weights = (request.bias.position_weight, request.bias.time_weight)
        bias_grads = [torch.zeros(_BIAS_SUMS, weight.shape[0], device=q.device) for weight in weights]
    grads = torch.empty(num_rows, num_heads * sum(block_of(dim) for dim in dims), dtype=q.dtype, device=q.device)
    if grads.numel() > 0:
        dv, dq, dk = grads.split([num_heads * block_of(dim) for dim in dims], dim=1)
        parts = (dv, dq, dk)
        inputs = [as_blocks(x) for x in (q, k, v, grad_output)]
        with device_of(q):
            _launch_backward(inputs, parts, bias_grads, schedule, request, tiles, fp8)
        if any(dim != block_of(dim) for dim in dims):
            kept = [part.unflatten(1, (num_heads, -1))[..., :dim] for part, dim in zip(parts, dims, strict=True)]
            grads = torch.cat([part.flatten(1) for part in kept], dim=1)
    else:
        grads = grads.new_empty(num_rows, num_heads * sum(dims))
    if request.bias is not None:
        bias_grads = [grad.sum(dim=0) for grad in bias_grads]
    return grads, bias_grads[0], bias_grads[1]


def _launch_backward(
    inputs: list[Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    bias_grads: list[Tensor],
    schedule: Tensor,
    request: Request,
    tiles: Tiles,
    fp8: ScoreTensors | None,
) -> None:
    """inputs: q, k, v and the output's gradient; parts: where those of v, q and k go; of blocks' widths all."""
    q, k, v, grad_output = inputs
    dv, dq, dk = parts
    num_rows, num_heads, qk_dim = q.shape
    scored = () if fp8 is None else (fp8.q, fp8.k, fp8.v, fp8.grad)
    of_scores = [x.values for x in scored] + [x.descale for x in scored] if scored else [None] * 8
    scales = "none" if fp8 is None else fp8.scales
    if hopper_backward.why_not(q, k, v, grad_output, request, scales) is None:
        hopper_backward.backward(q, k, v, grad_output, parts, schedule, request, fp8)
        return
    batch = (*request.pointers(), *strides(q, k, v, grad_output), dq.stride(0), *request.scalars(q))
    is_fused = tiles.fused and request.bias is None
    dq_sum = torch.zeros(num_rows, num_heads, qk_dim, device=q.device) if is_fused else None
    kernels.key_grad_kernel[grid(q, request, tiles.key_grad.keys)](
        *(q, k, v, grad_output, *of_scores, dk, dv),
        *_descriptors(q, grad_output, tiles.key_grad.rows, tiles),
        *(dq_sum, None if dq_sum is None else _descriptor(dq_sum, tiles.key_grad.rows), num_heads * qk_dim),
        schedule,
        *batch,
        **request.constants(qk_dim, v.shape[2], tiles.key_grad, tiles.tanh, scales),
    )
    if dq_sum is not None:
        torch.mul(dq_sum.flatten(1), request.alpha / (2 * request.scaling_seqlen), out=dq)
        return
    kernels.query_grad_kernel[grid(q, request, tiles.query_grad.rows)](
        *(q, k, v, grad_output, *of_scores, dq, *bias_grads),
        *_descriptors(k, v, tiles.query_grad.keys, tiles),
        schedule,
        *batch,
        **request.constants(qk_dim, v.shape[2], tiles.query_grad, tiles.tanh, scales),
        SUMS=_BIAS_SUMS,
    )


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def as_blocks(x: Tensor) -> Tensor:
    """``x`` (T, H, d) as kernels take it, of a block's width and with a head's numbers in a row: a copy if it isn't."""
    missing = block_of(x.shape[2]) - x.shape[2]
    if missing > 0:
        return F.pad(x, (0, missing))
    return x if x.stride(2) == 1 else x.contiguous()


def narrowed(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` numbers of each head, without gaps."""
    return x if x.shape[2] == dim else x[:, :, :dim].contiguous()


def block_of(dim: int) -> int:
    """The width that kernels are compiled for: the next power of two, 32 at least."""
    return max(MIN_DIM, 1 << (dim - 1).bit_length())


def grid(q: Tensor, request: Request, block: int) -> tuple[int]:
    """A program for each tile of ``block`` tokens and head."""
    return ((q.shape[0] // block + request.num_users + 1) * q.shape[1],)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Between rows and between heads of each."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _descriptors(first: Tensor, second: Tensor | None, rows: int, tiles: Tiles) -> list[Any]:
    """TMA descriptors for tiles of that many rows of one head; None, for plain loads, where TMA can't take them."""
    return [_descriptor(x, rows) if tiles.tma and x is not None else None for x in (first, second)]


def _descriptor(x: Tensor, rows: int) -> Any:
    num_rows, num_heads, dim = x.shape
    is_aligned = (x.stride(0) * x.element_size()) % 16 == 0 and x.data_ptr() % 16 == 0
    # A block takes a whole head and nothing else, so heads must be neighbours.
    has_whole_heads = num_heads == 1 or x.stride(1) == dim
    if not (is_aligned and has_whole_heads and x.stride(0) >= num_heads * dim):
        return None
    return kernels.TensorDescriptor(x, [num_rows, num_heads * dim], [x.stride(0), 1], [rows, dim])
