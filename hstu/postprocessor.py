"""From tokens to the states that are scored: drop padding, keep what carries a label, items only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrec.hstu.jagged import JaggedSequence, owners

L2_NORM_EPSILON = 1e-6


class HSTUPostprocessor(nn.Module):
    """JaggedSequence -> (N, D) item states. ``l2_norm`` scales each to length 1."""

    def __init__(self, *, l2_norm: bool = False) -> None:
        super().__init__()
        self.l2_norm = l2_norm

    def forward(
        self, sequence: JaggedSequence, *, num_labelled: Tensor, has_actions: bool, num_states: int | None = None
    ) -> Tensor:
        """States of the item tokens of each user's last ``num_labelled`` (B,) events, users and events in order.

        num_states: num_labelled.sum() where the caller knows it on the host (it is the number of labels); None reads it
        from the tensor, which makes a GPU wait.
        """
        count = int(num_labelled.sum()) if num_states is None else num_states
        size = 2 if has_actions else 1
        ends = torch.cumsum(num_labelled, dim=0)
        users = owners(F.pad(ends, (1, 0)), num_rows=count)
        events_from_end = ends[users] - torch.arange(count, device=users.device)
        rows = sequence.offsets[1:][users] - events_from_end * size
        states = sequence.values.index_select(0, rows)
        return F.normalize(states, dim=-1, eps=L2_NORM_EPSILON) if self.l2_norm else states
