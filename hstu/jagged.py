"""JaggedSequence: the tokens of many users, back to back, and where each user's begin.

Two users of 3 and 2 tokens, width D, with 3 padding rows at the very end::

    values   [a0, a1, a2, b0, b1, 0, 0, 0]   (T + P, D), T = 5, P = 3
    offsets  [0, 3, 5]                       (B + 1,), B = 2

Padding rows belong to no user: offsets, lengths, targets and attention speak of the T real tokens alone. They are there
for FP8, whose products take rows in multiples. Whatever looks across rows (norms' gradients, dropout's random numbers,
amaxes) is computed from the real rows, and padding rows enter every product as zeros, so how many there are changes
nothing, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class JaggedSequence:
    """Tokens of B users: contexts first, then history, then targets.

    values: (T + P, D); offsets: (B + 1,) int64; num_contexts, num_targets: (B,) int64 tokens a user, None where no user
    has any; timestamps: (T,) int64 seconds, 0 for contexts, None where nothing reads them; max_seqlen: the longest
    user's tokens, an upper bound known on the host (no device sync); num_padding: P.
    """

    values: Tensor
    offsets: Tensor
    max_seqlen: int
    num_contexts: Tensor | None = None
    num_targets: Tensor | None = None
    timestamps: Tensor | None = None
    num_padding: int = 0

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return self.values.shape[0] - self.num_padding

    def real_rows(self, x: Tensor) -> Tensor:
        """The rows of (T + P, ...) that belong to users, (T, ...): a view."""
        return x[: self.num_tokens] if self.num_padding else x

    def padded(self, x: Tensor) -> Tensor:
        """(T, ...) with this sequence's P padding rows, zeros, at the end."""
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.num_padding)) if self.num_padding else x

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens a user."""
        return self.offsets[1:] - self.offsets[:-1]


def owners(offsets: Tensor, *, num_rows: int) -> Tensor:
    """(num_rows,) each row's user: [0, 3, 5] -> [0, 0, 0, 1, 1]. num_rows is offsets[-1], known on the host."""
    users = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(users, offsets[1:] - offsets[:-1], output_size=num_rows)
