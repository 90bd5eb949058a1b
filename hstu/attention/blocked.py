"""HSTU attention in plain PyTorch, tile by tile: the CPU path, with memory linear in tokens.

Forward, per tile: S = alpha q k^T + bias, A = M * SiLU(S), O += A v / N. Backward keeps q, k and v only and computes S
anew: dP = do v^T, dS = M * dP * sigma(S)(1 + S(1 - sigma(S))) / N, dq += alpha dS k, dk += alpha dS^T q,
dv += A^T do / N. Scores are overwritten in place, and the scales are applied to the small results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from genrec.hstu.attention.bias import RelativeBias
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.plan import AttentionPlan, Tile, plan_for
from genrec.hstu.attention.tiles import BiasGrads, GroupScores, Scratch


def blocked_attention(
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
) -> Tensor:
    """q, k: (T, H, d_qk), v: (T, H, d_v) -> (T, H, d_v). Rows beyond ``offsets[-1]`` and their gradients are zero."""
    plan = plan_for(offsets, num_contexts, num_targets, num_heads=q.shape[1], rules=rules)
    if plan.num_tokens > q.shape[0]:
        raise ValueError(f"offsets end at {plan.num_tokens}, but there are only {q.shape[0]} rows")
    scales = _Scales(alpha=alpha, inverse_seqlen=1.0 / scaling_seqlen)
    bias_tensors: tuple[Tensor | None, ...] = (None,) * 4
    if bias is not None:
        bias_tensors = (bias.position_weight, bias.time_weight, bias.query_times, bias.key_times)
    output: Tensor = _BlockedAttention.apply(plan, scales, q, k, v, *bias_tensors)
    return output


@dataclass(frozen=True)
class _Scales:
    alpha: float
    inverse_seqlen: float


class _BlockedAttention(torch.autograd.Function):
    """Inputs: plan, scales, q, k, v, and the four tensors of a RelativeBias or four times None."""

    @staticmethod
    def forward(
        ctx: Any, plan: AttentionPlan, scales: _Scales, q: Tensor, k: Tensor, v: Tensor, *bias_tensors: Any
    ) -> Tensor:
        ctx.plan, ctx.scales = plan, scales
        ctx.save_for_backward(q, k, v, *bias_tensors)
        output = v.new_empty(v.shape, dtype=q.dtype)
        output[plan.num_tokens :] = 0
        scratch = Scratch(plan, q, buffers=1)
        for group, tiles in plan.groups:
            scores = GroupScores(group, plan.rules, _bias_of(bias_tensors), scales.alpha)
            query, key, value = (group.gather(x, dtype=scratch.dtype) for x in (q, k, v))
            padded = _group_forward(scores, tiles, query, key, value, scratch).mul_(scales.inverse_seqlen)
            group.scatter(padded, into=output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *bias_tensors = ctx.saved_tensors
        plan, scales, bias = ctx.plan, ctx.scales, _bias_of(tuple(bias_tensors))
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        for grad in grads:
            grad[plan.num_tokens :] = 0
        scratch = Scratch(plan, q, buffers=2)
        bias_grads = None if bias is None else BiasGrads.zeros(bias, dtype=scratch.dtype)
        for group, tiles in plan.groups:
            scores = GroupScores(group, plan.rules, bias, scales.alpha)
            query, key, value = (group.gather(x, dtype=scratch.dtype) for x in (q, k, v))
            grad_padded = group.gather(grad_output, dtype=scratch.dtype, zero=True)
            padded_grads = _group_backward(scores, tiles, query, key, value, grad_padded, bias_grads, scratch, scales)
            for padded, grad in zip(padded_grads, grads, strict=True):
                group.scatter(padded, into=grad)
        if bias is None or bias_grads is None:
            return (None, None, *grads, None, None, None, None)
        weight_grads = (bias_grads.position.to(bias.position_weight.dtype), bias_grads.time.to(bias.time_weight.dtype))
        return (None, None, *grads, *weight_grads, None, None)


def _group_forward(
    scores: GroupScores, tiles: tuple[Tile, ...], query: Tensor, key: Tensor, value: Tensor, scratch: Scratch
) -> Tensor:
    """(G * H, width, d_v), not yet divided by N."""
    output = _zeros_like(value)
    for tile in tiles:
        weights = F.silu(scores.compute(query, key, tile, scratch), inplace=True)
        scores.hide(weights, tile)
        output[:, tile.rows] += torch.bmm(weights, value[:, tile.keys])
    return output


def _group_backward(
    scores: GroupScores,
    tiles: tuple[Tile, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    bias_grads: BiasGrads | None,
    scratch: Scratch,
    scales: _Scales,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the group's q, k and v, (G * H, width, d) each; adds to ``bias_grads``."""
    grad_query, grad_key, grad_value = (_zeros_like(x) for x in (query, key, value))
    for tile in tiles:
        score = scores.compute(query, key, tile, scratch)
        batch, rows, keys = score.shape
        grad_score = scratch.view(1, batch=batch, rows=rows, keys=keys)
        torch.bmm(grad[:, tile.rows], value[:, tile.keys].transpose(1, 2), out=grad_score)
        torch.ops.aten.silu_backward.grad_input(grad_score, score, grad_input=grad_score)
        weights = F.silu(score, inplace=True)
        scores.hide(weights, tile)
        scores.hide(grad_score, tile)
        grad_value[:, tile.keys] += torch.bmm(weights.transpose(1, 2), grad[:, tile.rows])
        grad_query[:, tile.rows] += torch.bmm(grad_score, key[:, tile.keys])
        grad_key[:, tile.keys] += torch.bmm(grad_score.transpose(1, 2), query[:, tile.rows])
        if bias_grads is not None:
            scores.add_bias_grads(grad_score, tile, bias_grads, scale=scales.inverse_seqlen)
    scale = scales.alpha * scales.inverse_seqlen
    return grad_query.mul_(scale), grad_key.mul_(scale), grad_value.mul_(scales.inverse_seqlen)


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _bias_of(tensors: tuple[Tensor | None, ...]) -> RelativeBias | None:
    position_weight, time_weight, query_times, key_times = tensors
    if position_weight is None or time_weight is None or query_times is None or key_times is None:
        return None
    return RelativeBias(position_weight, time_weight, query_times, key_times)
