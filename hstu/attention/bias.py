"""The relative bias on the scores: a number on the score for how far apart two tokens are, in place and time.

``score[i, j] += position_weight[N - 1 + place(j) - place(i)] + time_weight[bucket(query_time[i] - key_time[j])]``, with
bucket(t) = int(ln(max(|t|, 1)) / 0.301) capped at the last row (Meta's ``RelativeBucketedTimeAndPositionBasedBias``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_BUCKET_WIDTH = 0.301


@dataclass(frozen=True)
class RelativeBias:
    """Weights shared by all heads, and the time of every token of the batch.

    position_weight: (2N - 1,), N the longest sequence it serves; time_weight: (buckets + 1,); query_times, key_times:
    (T,) int64 seconds.
    """

    position_weight: Tensor
    time_weight: Tensor
    query_times: Tensor
    key_times: Tensor


def tensors_of(bias: RelativeBias | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Its four tensors one by one, as autograd takes them; four times None for no bias."""
    if bias is None:
        return (None, None, None, None)
    return (bias.position_weight, bias.time_weight, bias.query_times, bias.key_times)


def bias_of(
    position_weight: Tensor | None, time_weight: Tensor | None, query_times: Tensor | None, key_times: Tensor | None
) -> RelativeBias | None:
    """What :func:`tensors_of` took apart."""
    if position_weight is None or time_weight is None or query_times is None or key_times is None:
        return None
    return RelativeBias(position_weight, time_weight, query_times, key_times)


def position_index(rows: Tensor, columns: Tensor, *, history_end: Tensor, num_weights: int) -> Tensor:
    """Which position weight a pair uses. Targets all stand at ``history_end``; the arguments broadcast.

    Padding can lie further out than any weight reaches; it gets the last one, and its scores are dropped.
    """
    gap = torch.minimum(columns, history_end) - torch.minimum(rows, history_end)
    return (gap + num_weights // 2).clamp_(0, num_weights - 1)


def time_index(query_times: Tensor, key_times: Tensor, *, num_weights: int) -> Tensor:
    """Which time weight a pair uses; the arguments broadcast."""
    # float64 holds any difference of int64 seconds that matters, so CPU and GPU agree on the bucket.
    gap = (query_times - key_times).abs().clamp_(min=1).double()
    return gap.log_().div_(LOG_BUCKET_WIDTH).long().clamp_(max=num_weights - 1)
