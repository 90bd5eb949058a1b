"""Launches of the attention kernels. The host reads no tensor, so it never waits for the device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention import triton as kernels
from genrec.hstu.attention.bias import RelativeBias
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.tuning import KernelTile, Tiles

MAX_DIM = 256
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

    def constants(self, q: Tensor, v: Tensor, tile: KernelTile, tanh: str) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "QK_DIM": q.shape[2],
            "V_DIM": v.shape[2],
            "QK_BLOCK": _block_of(q.shape[2]),
            "V_BLOCK": _block_of(v.shape[2]),
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "CAUSAL": self.rules.causal,
            "CONTEXTS": "none" if self.num_contexts is None else self.rules.contextual_mask,
            "TARGETS": self.num_targets is not None,
            "WINDOW": self.rules.max_attn_len > 0,
            "BIAS": self.bias is not None,
            "TANH": "exact" if kernels.INTERPRETED else tanh,
            "PRECISION": "ieee",  # matters for float32 alone, which would be rounded to TF32
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def forward(q: Tensor, k: Tensor, v: Tensor, request: Request, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The output (T, H, d_v), and the schedule (2, B + 1) that :func:`backward` takes."""
    schedule = torch.empty(2, request.num_users + 1, dtype=torch.int32, device=q.device)
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if output.numel() == 0:
        return output, schedule.zero_()
    with _device_of(q):
        kernels.schedule_kernel[(request.num_users // _SCHEDULE_BLOCK + 1,)](
            request.offsets, schedule, request.num_users, q.shape[0], BLOCK=_SCHEDULE_BLOCK
        )
        q, k, v = (_with_dense_rows(x) for x in (q, k, v))
        kernels.forward_kernel[_grid(q, request, tiles.forward.rows)](
            *(q, k, v, output),
            *_descriptors(k, v, tiles.forward.keys, tiles),
            schedule,
            *request.pointers(),
            *_strides(q, k, v, output),
            *request.scalars(q),
            **request.constants(q, v, tiles.forward, tiles.tanh),
        )
    return output, schedule


def backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, schedule: Tensor, request: Request, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, q and k side by side, as the layer's projection has them: (T, H * (d_v + 2 * d_qk)).

    Then those of the bias's weights, of no elements where there is no bias. Each gradient of q, k and v is summed in
    one program, in the same order every time; with ``tiles.fused`` that of q, and those of a bias always, are summed
    with atomics, in any order.
    """
    num_rows, num_heads, qk_dim = q.shape
    widths = (num_heads * v.shape[2], num_heads * qk_dim, num_heads * qk_dim)
    grads = torch.empty(num_rows, sum(widths), dtype=q.dtype, device=q.device)
    bias_grads = [torch.empty(0, device=q.device) for _ in range(2)]
    if request.bias is not None:
        weights = (request.bias.position_weight, request.bias.time_weight)
        bias_grads = [torch.zeros(_BIAS_SUMS, weight.shape[0], device=q.device) for weight in weights]
    if grads.numel() > 0:
        dv, dq, dk = grads.split(widths, dim=1)
        grad_output, q, k, v = (_with_dense_rows(x) for x in (grad_output, q, k, v))
        inputs = (*request.pointers(), *_strides(q, k, v, grad_output), grads.stride(0), *request.scalars(q))
        is_fused = tiles.fused and request.bias is None
        dq_sum = torch.zeros(num_rows, num_heads, qk_dim, device=q.device) if is_fused else None
        with _device_of(q):
            kernels.key_grad_kernel[_grid(q, request, tiles.key_grad.keys)](
                *(q, k, v, grad_output, dk, dv),
                *_descriptors(q, grad_output, tiles.key_grad.rows, tiles),
                *(dq_sum, None if dq_sum is None else _descriptor(dq_sum, tiles.key_grad.rows), num_heads * qk_dim),
                schedule,
                *inputs,
                **request.constants(q, v, tiles.key_grad, tiles.tanh),
            )
            if dq_sum is not None:
                torch.mul(dq_sum.flatten(1), request.alpha / (2 * request.scaling_seqlen), out=dq)
                return grads, bias_grads[0], bias_grads[1]
            kernels.query_grad_kernel[_grid(q, request, tiles.query_grad.rows)](
                *(q, k, v, grad_output, dq, *bias_grads),
                *_descriptors(k, v, tiles.query_grad.keys, tiles),
                schedule,
                *inputs,
                **request.constants(q, v, tiles.query_grad, tiles.tanh),
                SUMS=_BIAS_SUMS,
            )
    if request.bias is not None:
        bias_grads = [grad.sum(dim=0) for grad in bias_grads]
    return grads, bias_grads[0], bias_grads[1]


def _device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _with_dense_rows(x: Tensor) -> Tensor:
    """Kernels take any distance between rows and between heads, but a head's numbers must be neighbours."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _descriptors(first: Tensor, second: Tensor, rows: int, tiles: Tiles) -> list[Any]:
    """TMA descriptors for tiles of that many rows of one head; None, for plain loads, where TMA can't take them."""
    return [_descriptor(x, rows) if tiles.tma else None for x in (first, second)]


def _descriptor(x: Tensor, rows: int) -> Any:
    num_rows, num_heads, dim = x.shape
    is_aligned = (x.stride(0) * x.element_size()) % 16 == 0 and x.data_ptr() % 16 == 0
    # A block takes a whole head and nothing else, so heads must be neighbours, of a width that is a block's.
    has_whole_heads = dim == _block_of(dim) and (num_heads == 1 or x.stride(1) == dim)
    if not (is_aligned and has_whole_heads and x.stride(0) >= num_heads * dim):
        return None
    return kernels.TensorDescriptor(x, [num_rows, num_heads * dim], [x.stride(0), 1], [rows, dim])


def _grid(q: Tensor, request: Request, block: int) -> tuple[int]:
    return ((q.shape[0] // block + request.num_users + 1) * q.shape[1],)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _block_of(dim: int) -> int:
    """Blocks are powers of two, and tensor cores take no fewer than 16."""
    return max(16, 1 << (dim - 1).bit_length())
