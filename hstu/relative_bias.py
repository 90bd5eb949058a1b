"""Relative bias on the scores: a learned function of how far apart two tokens are, in position and in time.

Both kinds yield the weight vectors that ``attention.RelativeBias`` reads, one number for each distance in positions and
one for each bucket of the gap in time:

- "table", the paper's research code: every number is a parameter of its own.
- "smooth" (ours): the numbers are sums of a few decays, ``sum_k w_k exp(-distance / scale_k)``. A dozen parameters,
  each trained by every pair, where a table row is trained by the pairs at its distance alone: for small data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genrec.hstu.attention.bias import LOG_BUCKET_WIDTH

NUM_TIME_BUCKETS = 128

_TABLE_STD = 0.02
_POSITION_SCALES = (4.0, 16.0, 64.0, 256.0)  # tokens
_TIME_SCALES_S = (3600.0, 86400.0, 30 * 86400.0)
# Adam moves every parameter at one pace, but a score needs a bias of several units to matter.
_SMOOTH_GAIN = 4.0


class TableBias(nn.Module):
    """A parameter for each distance and each time bucket."""

    def __init__(self, *, max_seqlen_tokens: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(2 * max_seqlen_tokens - 1))
        self.time = nn.Parameter(torch.empty(NUM_TIME_BUCKETS + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.02, from torch's global generator."""
        for weight in (self.position, self.time):
            nn.init.normal_(weight, std=_TABLE_STD)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Position weights (2 * max_seqlen_tokens - 1,) and time weights (129,)."""
        return self.position, self.time


class SmoothBias(nn.Module):
    """Decays over distance and over time.

    Odd and even distances have weights of their own: where items and actions alternate, they tell a token of the other
    kind from one of its own.
    """

    position_basis: Tensor
    time_basis: Tensor

    def __init__(self, *, max_seqlen_tokens: int) -> None:
        super().__init__()
        self.register_buffer("position_basis", _position_basis(max_seqlen_tokens), persistent=False)
        self.register_buffer("time_basis", _time_basis(), persistent=False)
        self.position = nn.Parameter(torch.empty(self.position_basis.shape[1]))
        self.time = nn.Parameter(torch.empty(self.time_basis.shape[1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero: no bias."""
        for weight in (self.position, self.time):
            nn.init.zeros_(weight)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Position weights (2 * max_seqlen_tokens - 1,) and time weights (129,)."""
        return self.position_basis @ self.position * _SMOOTH_GAIN, self.time_basis @ self.time * _SMOOTH_GAIN


RELATIVE_BIASES: dict[str, type[TableBias | SmoothBias]] = {"table": TableBias, "smooth": SmoothBias}


def _position_basis(max_seqlen_tokens: int) -> Tensor:
    """(2N - 1, 2 * scales): decays for even distances, then for odd ones; the middle row is distance 0."""
    distance = (torch.arange(2 * max_seqlen_tokens - 1) - (max_seqlen_tokens - 1)).abs()
    decays = torch.exp(-distance[:, None] / torch.tensor(_POSITION_SCALES))
    odd = (distance % 2).unsqueeze(1)
    return torch.cat([decays * (1 - odd), decays * odd], dim=1)


def _time_basis() -> Tensor:
    """(129, 1 + scales): whether the gap is below the first bucket's end, about one second, then decays."""
    starts = torch.exp(torch.arange(NUM_TIME_BUCKETS + 1, dtype=torch.float64) * LOG_BUCKET_WIDTH)
    decays = [torch.exp(-starts / scale) for scale in _TIME_SCALES_S]
    first = torch.zeros_like(starts)
    first[0] = 1.0
    return torch.stack([first, *decays], dim=1).float()
