"""What FP8 changes in blocked attention: the operands of products, and how P and dS are rounded.

Forward: S from FP8 q and k, P rounded to FP8 by the user's and head's weight scale, O from FP8 P and v. Backward: S and
dP = dO v^T from FP8 operands. Where scales are a user's or coarser, so are dV = P^T dO, dQ = alpha dS k and dK = alpha
dS^T q, with P rounded as in forward and dS by a scale of its own. With finer ones P and dS are rounded to the dtype of
q, and these three products are those of that dtype, with q, k and dO as they came.

FP8 values are taken back before they are multiplied, so that products are float32's (float64's, if q is). Quantized
operands are made anew for backward, not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from genrec.hstu.attention.groups import UserGroup
from genrec.hstu.attention.quantization import (
    SCALES,
    Places,
    dequantize_columns,
    dequantize_rows,
    grad_mode,
    longest_row,
    quantize_columns,
    quantize_rows,
    score_scale,
    spread_users,
    weight_scale,
)
from genrec.hstu.precision.formats import E4M3, saturating_cast


@dataclass(frozen=True)
class ForwardOperands:
    """q, k (T, H, d_qk), v (T, H, d_v) as products take them; weight_scale: (T, H, 1), None where P isn't rounded."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight_scale: Tensor | None


@dataclass(frozen=True)
class ScoreOperands:
    """q, k (T, H, d_qk) of S = alpha q k^T and grad, v (T, H, d_v) of dP = grad v^T, as backward takes them.

    weight_scale, score_scale: (T, H, 1), of P and dS where the other products take q, k and grad from here too, else
    None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    weight_scale: Tensor | None = None
    score_scale: Tensor | None = None


def forward_operands(q: Tensor, k: Tensor, v: Tensor, *, mode: str, offsets: Tensor, alpha: float) -> ForwardOperands:
    """mode: ``hstu_attn_quantization_mode``; "bf16" leaves all as it is."""
    if mode == "bf16":
        return ForwardOperands(q, k, v, weight_scale=None)
    places = Places.of(offsets.to(q.device), q.shape[0])
    query, key = (quantize_rows(x, mode=mode, places=places) for x in (q, k))
    scale = weight_scale(query, key, mode=mode, places=places, alpha=alpha)
    value = quantize_columns(v, mode=mode, places=places)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return ForwardOperands(
        dequantize_rows(query, mode=mode, places=places, dtype=dtype),
        dequantize_rows(key, mode=mode, places=places, dtype=dtype),
        dequantize_columns(value, mode=mode, places=places, dtype=dtype),
        weight_scale=spread_users(scale, places),
    )


def score_operands(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, mode: str, offsets: Tensor, alpha: float
) -> ScoreOperands:
    """mode: ``hstu_attn_quantization_mode``; "bf16" leaves all as it is."""
    if mode == "bf16":
        return ScoreOperands(q, k, v, grad)
    places = Places.of(offsets.to(q.device), q.shape[0])
    dtype, of_grad = torch.promote_types(q.dtype, torch.float32), grad_mode(mode)
    query, key, value = (quantize_rows(x, mode=mode, places=places) for x in (q, k, v))
    output_grad = quantize_rows(grad, mode=of_grad, places=places)
    operands = ScoreOperands(
        q=dequantize_rows(query, mode=mode, places=places, dtype=dtype),
        k=dequantize_rows(key, mode=mode, places=places, dtype=dtype),
        v=dequantize_rows(value, mode=mode, places=places, dtype=dtype),
        grad=dequantize_rows(output_grad, mode=of_grad, places=places, dtype=dtype),
    )
    if SCALES[mode] != "user":
        return operands
    norms = (longest_row(x, mode=mode, places=places) for x in (output_grad, value))
    of_weights = weight_scale(query, key, mode=mode, places=places, alpha=alpha)
    return replace(
        operands,
        weight_scale=spread_users(of_weights, places),
        score_scale=spread_users(score_scale(*norms), places),
    )


def round_weights(weights: Tensor, scale: Tensor) -> Tensor:
    """P or dS (G * H, rows, keys) as FP8 holds it; scale: (G * H, 1, 1)."""
    return saturating_cast(weights.float() * scale, E4M3).to(weights.dtype) / scale


def scale_of_group(group: UserGroup, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """(G * H, 1, 1), of scale (T, H, 1) by row."""
    return group.gather(scale, dtype=dtype)[:, :1]
