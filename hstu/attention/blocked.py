"""HSTU attention in plain PyTorch, tile by tile: the CPU path, with memory linear in tokens.

Forward, per tile: S = alpha q k^T + bias, A = M * SiLU(S), O += A v / N. Backward keeps q, k and v only and computes S
anew: dP = do v^T, dS = M * dP * sigma(S)(1 + S(1 - sigma(S))) / N, dq += alpha dS k, dk += alpha dS^T q,
dv += A^T do / N. Scores are overwritten in place, and the scales are applied to the small results.

FP8 attention runs here too, emulated: :mod:`genrec.hstu.attention.emulation` says what it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from genrec.hstu.attention.bias import RelativeBias, bias_of, tensors_of
from genrec.hstu.attention.emulation import forward_operands, round_weights, scale_of_group, score_operands
from genrec.hstu.attention.groups import UserGroup
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
    quantization: str = "bf16",
) -> Tensor:
    """q, k: (T, H, d_qk), v: (T, H, d_v) -> (T, H, d_v). Rows beyond ``offsets[-1]`` and their gradients are zero.

    quantization: ``hstu_attn_quantization_mode``; all but "bf16" emulate FP8.
    """
    plan = plan_for(offsets, num_contexts, num_targets, num_heads=q.shape[1], rules=rules)
    if plan.num_tokens > q.shape[0]:
        raise ValueError(f"offsets end at {plan.num_tokens}, but there are only {q.shape[0]} rows")
    settings = _Settings(alpha, 1.0 / scaling_seqlen, quantization)
    output: Tensor = _BlockedAttention.apply(plan, settings, offsets, q, k, v, *tensors_of(bias))
    return output


@dataclass(frozen=True)
class _Settings:
    alpha: float
    inverse_seqlen: float
    quantization: str


class _BlockedAttention(torch.autograd.Function):
    """Inputs: plan, settings, offsets, q, k, v, and the four tensors of a RelativeBias or four times None."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: AttentionPlan,
        settings: _Settings,
        offsets: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *bias_tensors: Any,
    ) -> Tensor:
        ctx.plan, ctx.settings = plan, settings
        ctx.save_for_backward(offsets, q, k, v, *bias_tensors)
        mode, alpha = settings.quantization, settings.alpha
        operands = forward_operands(q, k, v, mode=mode, offsets=offsets, alpha=alpha)
        output = v.new_empty(v.shape, dtype=q.dtype)
        output[plan.num_tokens :] = 0
        scratch = Scratch(plan, q, buffers=1)
        for group, tiles in plan.groups:
            scores = GroupScores(group, plan.rules, bias_of(*bias_tensors), alpha)
            query, key, value = (group.gather(x, dtype=scratch.dtype) for x in (operands.q, operands.k, operands.v))
            scale = operands.weight_scale
            scale = None if scale is None else scale_of_group(group, scale, dtype=scratch.dtype)
            padded = _group_forward(scores, tiles, query, key, value, scale, scratch).mul_(settings.inverse_seqlen)
            group.scatter(padded, into=output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        offsets, q, k, v, *bias_tensors = ctx.saved_tensors
        plan, settings, bias = ctx.plan, ctx.settings, bias_of(*bias_tensors)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        for grad in grads:
            grad[plan.num_tokens :] = 0
        scratch = Scratch(plan, q, buffers=2)
        bias_grads = None if bias is None else BiasGrads.zeros(bias, dtype=scratch.dtype)
        mode = settings.quantization
        of_scores = score_operands(q, k, v, grad_output, mode=mode, offsets=offsets, alpha=settings.alpha)
        for group, tiles in plan.groups:
            scores = GroupScores(group, plan.rules, bias, settings.alpha)
            operands = _gather(group, of_scores.q, of_scores.k, of_scores.v, of_scores.grad, scratch.dtype)
            others, rounding = operands, None
            if of_scores.weight_scale is not None and of_scores.score_scale is not None:
                scales = (of_scores.weight_scale, of_scores.score_scale)
                rounding = _Rounding(q.dtype, *(scale_of_group(group, x, dtype=scratch.dtype) for x in scales))
            elif mode != "bf16":
                others, rounding = _gather(group, q, k, v, grad_output, scratch.dtype), _Rounding(q.dtype)
            padded_grads = _group_backward(scores, tiles, operands, others, rounding, bias_grads, scratch, settings)
            for padded, grad in zip(padded_grads, grads, strict=True):
                group.scatter(padded, into=grad)
        if bias is None or bias_grads is None:
            return (None, None, None, *grads, None, None, None, None)
        weight_grads = (bias_grads.position.to(bias.position_weight.dtype), bias_grads.time.to(bias.time_weight.dtype))
        return (None, None, None, *grads, *weight_grads, None, None)


@dataclass(frozen=True)
class _GroupOperands:
    """A group's rows, (G * H, width, d) each."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


@dataclass(frozen=True)
class _Rounding:
    """How P and dS are rounded: to FP8 with scales (G * H, 1, 1), or without those to ``dtype``."""

    dtype: torch.dtype
    weight_scale: Tensor | None = None
    score_scale: Tensor | None = None

    def apply(self, weights: Tensor, grad_score: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight_scale is None or self.score_scale is None:
            return weights.to(self.dtype).to(weights.dtype), grad_score.to(self.dtype).to(grad_score.dtype)
        return round_weights(weights, self.weight_scale), round_weights(grad_score, self.score_scale)


def _gather(group: UserGroup, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dtype: torch.dtype) -> _GroupOperands:
    query, key, value = (group.gather(x, dtype=dtype) for x in (q, k, v))
    return _GroupOperands(query, key, value, group.gather(grad, dtype=dtype, zero=True))


def _group_forward(
    scores: GroupScores,
    tiles: tuple[Tile, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight_scale: Tensor | None,
    scratch: Scratch,
) -> Tensor:
    """(G * H, width, d_v), not yet divided by N."""
    output = _zeros_like(value)
    for tile in tiles:
        weights = F.silu(scores.compute(query, key, tile, scratch), inplace=True)
        scores.hide(weights, tile)
        if weight_scale is not None:
            weights = round_weights(weights, weight_scale)
        output[:, tile.rows] += torch.bmm(weights, value[:, tile.keys])
    return output


def _group_backward(
    scores: GroupScores,
    tiles: tuple[Tile, ...],
    operands: _GroupOperands,
    others: _GroupOperands,
    rounding: _Rounding | None,
    bias_grads: BiasGrads | None,
    scratch: Scratch,
    settings: _Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the group's q, k and v, (G * H, width, d) each; adds to ``bias_grads``.

    operands: of S and dP; others: of the products that follow, for which P and dS are rounded.
    """
    grad_query, grad_key, grad_value = (_zeros_like(x) for x in (others.query, others.key, others.value))
    for tile in tiles:
        score = scores.compute(operands.query, operands.key, tile, scratch)
        batch, rows, keys = score.shape
        grad_score = scratch.view(1, batch=batch, rows=rows, keys=keys)
        torch.bmm(operands.grad[:, tile.rows], operands.value[:, tile.keys].transpose(1, 2), out=grad_score)
        torch.ops.aten.silu_backward.grad_input(grad_score, score, grad_input=grad_score)
        weights = F.silu(score, inplace=True)
        scores.hide(weights, tile)
        scores.hide(grad_score, tile)
        if rounding is not None:
            weights, grad_score = rounding.apply(weights, grad_score)
        grad_value[:, tile.keys] += torch.bmm(weights.transpose(1, 2), others.grad[:, tile.rows])
        grad_query[:, tile.rows] += torch.bmm(grad_score, others.key[:, tile.keys])
        grad_key[:, tile.keys] += torch.bmm(grad_score.transpose(1, 2), others.query[:, tile.rows])
        if bias_grads is not None:
            scores.add_bias_grads(grad_score, tile, bias_grads, scale=settings.inverse_seqlen)
    scale = settings.alpha * settings.inverse_seqlen
    return grad_query.mul_(scale), grad_key.mul_(scale), grad_value.mul_(settings.inverse_seqlen)


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)
