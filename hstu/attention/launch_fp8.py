"""Launches of the kernels that quantize attention's operands to FP8. The host reads no tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention import quantize as kernels
from genrec.hstu.attention.quantization import BLOCK, CELLS, SCALES, FP8Tensor, QuantizedBatch, grad_mode, num_slots
from genrec.hstu.attention.request import Request, block_of, device_of, strides, with_dense_heads
from genrec.hstu.precision.formats import E4M3

_CELL_BLOCK = 256


def quantize_batch(
    q: Tensor, k: Tensor, v: Tensor, schedule: Tensor, request: Request, *, mode: str, needs_grad: bool
) -> QuantizedBatch:
    """:func:`genrec.hstu.attention.quantization.quantize_batch`, but for widths, which are blocks' here.

    Descales of users without tokens and all of slots without a block are not written.
    """
    num_users, (num_rows, num_heads, _) = request.num_users, q.shape
    query, key = (_empty_rows(x, num_users, mode) for x in (q, k))
    value = _empty_rows(v, num_users, mode) if needs_grad else None
    tiles = _empty_tiles(v, num_users, mode)
    norms_size = 2 * num_users * num_heads
    weight_scale = q.new_empty(num_users, num_heads, dtype=torch.float32)
    num_cells = _num_cells(mode, num_users, num_heads)
    cells = torch.zeros(3 * num_cells + norms_size, dtype=torch.int32, device=q.device)
    amax, norms = cells.split([3 * num_cells, norms_size])
    if v.numel() > 0:
        q, k, v = (with_dense_heads(x) for x in (q, k, v))
        parts = 3 if value is None else 4
        batch = (schedule, request.users()[0], *strides(q, k, v), num_users, num_rows, num_heads)
        with device_of(q):
            if num_cells > 0:
                kernels.amax_kernel[_grid(q, request, 3)](
                    q, k, v, amax, num_cells, *batch, **_constants(q, v, mode, parts=3)
                )
            kernels.quantize_kernel[_grid(q, request, parts)](
                *(q, k, v, query.values, key.values, None if value is None else value.values, tiles.values),
                *(query.descale, key.descale, None if value is None else value.descale, tiles.descale),
                *(amax if num_cells > 0 else None, num_cells, norms),
                *batch,
                **_constants(q, v, mode, parts=parts),
            )
            if norms_size > 0:
                kernels.weight_scale_kernel[(norms_size // 2 // _CELL_BLOCK + 1,)](
                    norms, weight_scale, norms_size // 2, request.alpha, BLOCK=_CELL_BLOCK
                )
    return QuantizedBatch(q=query, k=key, v=value, v_tiles=tiles, weight_scale=weight_scale)


def quantize_grad(grad: Tensor, schedule: Tensor, request: Request, *, mode: str) -> FP8Tensor:
    """The output's gradient (T, H, d_v), where attention has this mode."""
    num_users, (num_rows, num_heads, _) = request.num_users, grad.shape
    mode = grad_mode(mode)
    result = _empty_rows(grad, num_users, mode)
    if grad.numel() > 0:
        grad = with_dense_heads(grad)
        num_cells = _num_cells(mode, num_users, num_heads)
        amax = torch.zeros(3 * num_cells, dtype=torch.int32, device=grad.device) if num_cells > 0 else None
        batch = (schedule, request.users()[0], *strides(grad, grad, grad), num_users, num_rows, num_heads)
        with device_of(grad):
            if amax is not None:
                kernels.amax_kernel[_grid(grad, request, 1)](
                    grad, None, None, amax, num_cells, *batch, **_constants(grad, grad, mode, parts=1)
                )
            kernels.quantize_kernel[_grid(grad, request, 1)](
                *(grad, None, None, result.values, None, None, None, result.descale, None, None, None),
                *(amax, num_cells, None),
                *batch,
                **_constants(grad, grad, mode, parts=1),
            )
    return result


def _empty_rows(x: Tensor, num_users: int, mode: str) -> FP8Tensor:
    """Room for ``x`` by rows, in a block's width."""
    values = x.new_empty(*x.shape[:2], block_of(x.shape[2]), dtype=E4M3.dtype)
    return FP8Tensor(values, x.new_empty(num_descales(x, num_users, mode), x.shape[1], dtype=torch.float32))


def _empty_tiles(v: Tensor, num_users: int, mode: str) -> FP8Tensor:
    """Room for ``v`` as tiles, in a block's width."""
    slots, width = num_slots(v.shape[0], num_users), block_of(v.shape[2])
    shape = (slots, v.shape[1], width) if SCALES[mode] == "row" else (num_descales(v, num_users, mode), v.shape[1])
    values = v.new_empty(slots, v.shape[1], width, BLOCK, dtype=E4M3.dtype)
    return FP8Tensor(values, v.new_empty(shape, dtype=torch.float32))


def num_descales(x: Tensor, num_users: int, mode: str) -> int:
    """How many descales a head of ``x`` (T, H, d) has by rows."""
    return {"user": num_users, "block": num_slots(x.shape[0], num_users), "row": x.shape[0]}[SCALES[mode]]


def _num_cells(mode: str, num_users: int, num_heads: int) -> int:
    """How many largest magnitudes must be known before a tensor can be cast."""
    return {"tensor": 1, "user": max(num_users, 1), "head": max(num_users, 1) * num_heads}.get(CELLS[mode], 0)


def _grid(x: Tensor, request: Request, parts: int) -> tuple[int]:
    return (request.grid(x, BLOCK)[0] * parts,)


def _constants(q: Tensor, v: Tensor, mode: str, *, parts: int) -> dict[str, Any]:
    widest = max(block_of(q.shape[2]), block_of(v.shape[2]))
    return {
        "QK_DIM": q.shape[2],
        "V_DIM": v.shape[2],
        "QK_BLOCK": block_of(q.shape[2]),
        "V_BLOCK": block_of(v.shape[2]),
        "CELLS": CELLS[mode],
        "PARTS": parts,
        "num_warps": max(4, widest // 16),  # a thread has 64 numbers or fewer: with more they don't fit in registers
    }
