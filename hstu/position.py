"""Position and time encoding: x * sqrt(D) + P[place] + Tm[time bucket] (DLRM-v3's input encoding).

A token's place counts contexts, and all targets of a user share the place right after its history, so that a target's
encoding doesn't depend on how many there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genrec.configs.schema import NetworkArgs
from genrec.hstu.jagged import JaggedSequence, owners

NUM_TIME_ROWS = 2049
_BUCKET_S = 60.0


class PositionEncoding(nn.Module):
    """Adds position and, with ``use_time_encoding``, time embeddings to the tokens; no positions without buckets."""

    def __init__(self, network: NetworkArgs) -> None:
        super().__init__()
        self.position: nn.Parameter | None = None
        if network.num_position_buckets:
            self.position = nn.Parameter(torch.empty(network.num_position_buckets, network.hidden_size))
        self.time: nn.Parameter | None = None
        if network.use_time_encoding:
            self.time = nn.Parameter(torch.empty(NUM_TIME_ROWS, network.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(rows), from torch's global generator."""
        for table in (self.position, self.time):
            if table is not None:
                bound = 1.0 / math.sqrt(table.shape[0])
                nn.init.uniform_(table, -bound, bound)

    def forward(self, sequence: JaggedSequence, *, time_buckets: Tensor | None) -> Tensor:
        """Encoded values (T, D) of a sequence without padding. time_buckets: (T,), read with ``use_time_encoding``."""
        scale = math.sqrt(sequence.values.shape[1])
        if self.position is None:
            encoded = sequence.values * scale
        else:
            places = token_places(sequence).clamp_(max=self.position.shape[0] - 1)
            encoded = torch.add(self.position.index_select(0, places), sequence.values, alpha=scale)
        if self.time is not None:
            assert time_buckets is not None
            encoded = encoded + self.time.index_select(0, time_buckets)
        return encoded


def token_places(sequence: JaggedSequence) -> Tensor:
    """(T,) place of each token in its user's sequence; all targets stand right after the history."""
    users = owners(sequence.offsets, num_rows=sequence.num_tokens)
    places = torch.arange(sequence.num_tokens, device=users.device) - sequence.offsets[users]
    if sequence.num_targets is None:
        return places
    return torch.minimum(places, (sequence.lengths - sequence.num_targets)[users])


def event_time_buckets(timestamps: Tensor, event_offsets: Tensor, num_candidates: Tensor, *, reference: str) -> Tensor:
    """(E,) time row of each event. timestamps: (E,) int64 seconds; event_offsets: (B + 1,); num_candidates: (B,).

    reference "last": time to the user's last event. "previous": time since the event before, for a candidate since the
    last event of the history; bucket 0 for a user's first event.
    """
    if timestamps.shape[0] == 0:
        return timestamps
    users = owners(event_offsets, num_rows=timestamps.shape[0])
    if reference == "last":
        last = timestamps[(event_offsets[1:] - 1).clamp(min=0)]
        return time_bucket(last[users] - timestamps)
    assert reference == "previous"
    first_candidate = (event_offsets[1:] - num_candidates)[users]
    events = torch.arange(timestamps.shape[0], device=timestamps.device)
    before = torch.minimum(events, first_candidate) - 1
    has_before = before >= event_offsets[users]
    gaps = timestamps - timestamps[before.clamp(min=0)]
    return time_bucket(gaps).masked_fill_(~has_before, 0)


def time_bucket(gaps: Tensor) -> Tensor:
    """int(sqrt(max(gap, 1e-6) / 60 s)), at most the last row. gaps: int64 seconds."""
    # In float64, so that every device puts a gap of exactly 60 k^2 seconds into bucket k.
    return gaps.double().clamp_(min=1e-6).div_(_BUCKET_S).sqrt_().long().clamp_(max=NUM_TIME_ROWS - 1)
