"""Launches of the kernels that quantize attention's operands to FP8. The host reads no tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention import quantize as kernels
from genrec.hstu.attention.quantization import (
    BLOCK,
    CELLS,
    MAX_SLOPE,
    SCALES,
    FP8Tensor,
    QuantizedBatch,
    QuantizedGrad,
    grad_mode,
    num_slots,
)
from genrec.hstu.attention.request import Request, block_of, device_of, strides, with_dense_heads
from genrec.hstu.precision.formats import E4M3

_CELL_BLOCK = 256
# A thread's, where a pass before has found the scales: more programs fit then, for a few numbers in local memory.
_REGISTERS = 80


def quantize_batch(
    q: Tensor, k: Tensor, v: Tensor, schedule: Tensor, request: Request, *, mode: str, needs_grad: bool
) -> QuantizedBatch:
    """:func:`genrec.hstu.attention.quantization.quantize_batch`, but for widths, which are blocks' here.

    Descales of users without tokens and all of slots without a block are not written.
    """
    num_users, num_heads = request.num_users, q.shape[1]
    has_products = needs_grad and SCALES[mode] == "user"
    query, key = (_empty_rows(x, num_users, mode) for x in (q, k))
    value = _empty_rows(v, num_users, mode) if needs_grad else None
    v_descale = _empty_descale(v, num_users, mode) if value is None else value.descale
    has_columns = SCALES[mode] == "row"
    tiles = FP8Tensor(_empty_tiles(v, num_users), v_descale)
    if has_columns:
        tiles = replace(tiles, descale=v_descale.new_empty(tiles.values.shape[:3]))
    other_tiles = [_empty_tiles(x, num_users) for x in (q, k)] if has_products else [None, None]
    weight_scale = q.new_empty(num_users, num_heads, dtype=torch.float32)
    num_cells, num_scales = _num_cells(mode, num_users, num_heads), num_users * num_heads
    v_norm, norms, amax = _zeros(q.device, num_scales, 2 * num_scales, 6 * num_cells)
    if v.numel() > 0:
        q, k, v = (with_dense_heads(x) for x in (q, k, v))
        batch = (schedule, *strides(q, k, v), num_users, num_heads)
        constants = _constants(q, v, mode, parts=3)
        with device_of(q):
            if num_cells > 0:
                kernels.amax_kernel[_grid(q, request, 3)](q, k, v, amax, num_cells, *batch, **constants)
            kernels.quantize_kernel[_grid(q, request, 3)](
                *(q, k, v, query.values, key.values, None if value is None else value.values),
                *(_as_words(x) for x in (*other_tiles, tiles.values)),
                *(query.descale, key.descale, v_descale, tiles.descale if has_columns else None),
                *(amax if num_cells > 0 else None, num_cells, norms, v_norm if has_products else None),
                *batch,
                **constants,
                **_registers(q, num_cells),
            )
            _bound_scale(norms[:num_scales], norms[num_scales:], weight_scale, abs(request.alpha))
    return QuantizedBatch(
        q=query,
        k=key,
        v=value,
        v_tiles=tiles,
        weight_scale=weight_scale,
        q_tiles=other_tiles[0],
        k_tiles=other_tiles[1],
        v_norm=v_norm.view(torch.float32).view(num_users, num_heads) if has_products else None,
    )


def quantize_grad(
    grad: Tensor, schedule: Tensor, request: Request, *, mode: str, v_norm: Tensor | None = None
) -> QuantizedGrad:
    """:func:`genrec.hstu.attention.quantization.quantize_grad`, but for the width, which is a block's here.

    mode: of the attention. v_norm: of :func:`quantize_batch`.
    """
    num_users, num_heads = request.num_users, grad.shape[1]
    mode = grad_mode(mode)
    rows = _empty_rows(grad, num_users, mode)
    tiles = None if v_norm is None else _empty_tiles(grad, num_users)
    score_scale = None if v_norm is None else torch.empty_like(v_norm)
    num_cells, num_norms = _num_cells(mode, num_users, num_heads), 0 if v_norm is None else v_norm.numel()
    amax, norm = _zeros(grad.device, 2 * num_cells, num_norms)
    if grad.numel() > 0:
        grad = with_dense_heads(grad)
        batch = (schedule, *strides(grad, grad, grad), num_users, num_heads)
        constants = _constants(grad, grad, mode, parts=1)
        with device_of(grad):
            if num_cells > 0:
                kernels.amax_kernel[_grid(grad, request, 1)](None, None, grad, amax, num_cells, *batch, **constants)
            kernels.quantize_kernel[_grid(grad, request, 1)](
                *(None, None, grad, None, None, rows.values, None, None, _as_words(tiles)),
                *(None, None, rows.descale, None),
                *(amax if num_cells > 0 else None, num_cells, None, None if v_norm is None else norm),
                *batch,
                **constants,
                **_registers(grad, num_cells),
            )
            if v_norm is not None and score_scale is not None:
                _bound_scale(norm, v_norm.view(torch.int32), score_scale, MAX_SLOPE)
    return QuantizedGrad(rows=rows, tiles=tiles, score_scale=score_scale)


def _zeros(device: torch.device, *sizes: int) -> list[Tensor]:
    """int32 of these sizes, in one memory, from addresses that divide by 16: others take another compilation."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 4) * 4)
    memory = torch.zeros(starts[-1], dtype=torch.int32, device=device)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _bound_scale(norms: Tensor, other_norms: Tensor, scale: Tensor, factor: float) -> None:
    """Fill ``scale``, (B, H), from the bits of norms (B * H)."""
    size = scale.numel()
    if size > 0:
        kernels.bound_scale_kernel[(size // _CELL_BLOCK + 1,)](
            norms, other_norms, scale, size, factor, BLOCK=_CELL_BLOCK
        )


def _empty_rows(x: Tensor, num_users: int, mode: str) -> FP8Tensor:
    """Room for ``x`` by rows, in a block's width."""
    values = x.new_empty(*x.shape[:2], block_of(x.shape[2]), dtype=E4M3.dtype)
    return FP8Tensor(values, _empty_descale(x, num_users, mode))


def _empty_descale(x: Tensor, num_users: int, mode: str) -> Tensor:
    return x.new_empty(num_descales(x, num_users, mode), x.shape[1], dtype=torch.float32)


def _empty_tiles(x: Tensor, num_users: int) -> Tensor:
    """Room for ``x`` (T, H, d) as tiles, in a block's width."""
    return x.new_empty(*tiles_shape(x, num_users), dtype=E4M3.dtype)


def tiles_shape(x: Tensor, num_users: int) -> tuple[int, int, int, int]:
    """What the values of ``x`` (T, H, d) have as tiles."""
    return (num_slots(x.shape[0], num_users), x.shape[1], block_of(x.shape[2]), BLOCK)


def _as_words(tiles: Tensor | None) -> Tensor | None:
    return None if tiles is None else tiles.view(torch.int32)


def num_descales(x: Tensor, num_users: int, mode: str) -> int:
    """How many descales a head of ``x`` (T, H, d) has by rows."""
    return {"user": num_users, "block": num_slots(x.shape[0], num_users), "row": x.shape[0]}[SCALES[mode]]


def _num_cells(mode: str, num_users: int, num_heads: int) -> int:
    """How many largest magnitudes must be known before a tensor can be cast."""
    return {"tensor": 1, "user": max(num_users, 1), "head": max(num_users, 1) * num_heads}.get(CELLS[mode], 0)


def _grid(x: Tensor, request: Request, parts: int) -> tuple[int]:
    return (request.grid(x, BLOCK)[0] * parts,)


def _registers(x: Tensor, num_cells: int) -> dict[str, int]:
    """An option of the kernel; none where it needs more than that: of wide numbers, and with scales of its own."""
    return {"maxnreg": _REGISTERS} if num_cells > 0 and x.element_size() == 2 else {}


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
