"""HSTU attention as the formula says, one user after the other: A = M * SiLU(alpha q k^T + bias) / N, O = A v.

Slow and obvious: every other path is tested against it. Computes in float32, or in float64 when given float64.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from genrec.hstu.attention.bias import RelativeBias, position_index, time_index
from genrec.hstu.attention.mask import MaskRules, visible


def reference_attention(
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
    """q, k: (T, H, d_qk), v: (T, H, d_v) -> (T, H, d_v). Rows beyond ``offsets[-1]`` come out zero."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    starts = offsets.tolist()
    outputs = []
    for user, (start, stop) in enumerate(itertools.pairwise(starts)):
        query, key, value = (x[start:stop].to(compute_dtype).transpose(0, 1) for x in (q, k, v))
        places = torch.arange(stop - start, device=q.device)
        rows, columns = places[:, None], places[None, :]
        lengths = torch.full_like(rows, stop - start)
        contexts = torch.zeros_like(rows) if num_contexts is None else num_contexts[user].expand_as(rows)
        targets = torch.zeros_like(rows) if num_targets is None else num_targets[user].expand_as(rows)
        mask = visible(rows, columns, lengths=lengths, num_contexts=contexts, num_targets=targets, rules=rules)
        scores = alpha * query @ key.transpose(1, 2)
        if bias is not None:
            scores = scores + _bias(bias, rows, columns, history_end=lengths - targets, start=start, stop=stop)
        outputs.append(((F.silu(scores) * mask / scaling_seqlen) @ value).transpose(0, 1))
    padding = v.new_zeros((v.shape[0] - starts[-1], *v.shape[1:]), dtype=compute_dtype)
    return torch.cat([*outputs, padding]).to(q.dtype)


def _bias(bias: RelativeBias, rows: Tensor, columns: Tensor, *, history_end: Tensor, start: int, stop: int) -> Tensor:
    places = position_index(rows, columns, history_end=history_end, num_weights=bias.position_weight.shape[0])
    times = time_index(
        bias.query_times[start:stop, None], bias.key_times[None, start:stop], num_weights=bias.time_weight.shape[0]
    )
    return bias.position_weight[places] + bias.time_weight[times]
