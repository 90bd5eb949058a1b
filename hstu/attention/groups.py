"""Users of similar length, padded to the longest of them, so that one batched matrix product serves them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class User:
    """One user of a batch: its first row, and its tokens."""

    start: int
    length: int
    num_contexts: int
    num_targets: int

    @property
    def history_end(self) -> int:
        """The place of its first target."""
        return self.length - self.num_targets


@dataclass(frozen=True)
class UserGroup:
    """G users padded to ``width`` tokens each: G * width slots.

    first_row: where the group's tokens start in the batch when they lie back to back without padding, else None.
    source: (G * width,) the batch row of each slot, padding repeating its user's last. real_slots, real_rows: the slots
    that are no padding, and their batch rows; padded_slots: the others, None where there are none. lengths,
    num_contexts, num_targets: (G, 1, 1), or (1, 1, 1) when all users are alike.
    """

    num_users: int
    width: int
    first_row: int | None
    source: Tensor
    padded_slots: Tensor | None
    real_slots: Tensor
    real_rows: Tensor
    lengths: Tensor
    num_contexts: Tensor
    num_targets: Tensor

    def gather(self, x: Tensor, *, dtype: torch.dtype, zero: bool = False) -> Tensor:
        """The group's rows of ``x`` (T, H, d) as (G * H, width, d), maybe a view.

        Padding repeats the user's last row, unless ``zero``: no real row sees it, and a zero gradient gives none.
        """
        if self.first_row is not None:
            rows = x[self.first_row : self.first_row + self.num_users * self.width]
        else:
            rows = x.index_select(0, self.source)
            if zero and self.padded_slots is not None:
                rows.index_fill_(0, self.padded_slots, 0)
        rows = rows.to(dtype).view(self.num_users, self.width, *x.shape[1:])
        return rows.transpose(1, 2).reshape(-1, self.width, x.shape[2])

    def scatter(self, padded: Tensor, *, into: Tensor) -> None:
        """Write the real rows of ``padded`` (G * H, width, d) to their places in ``into`` (T, H, d)."""
        rows = padded.view(self.num_users, into.shape[1], self.width, into.shape[2]).transpose(1, 2)
        if self.first_row is not None:
            stop = self.first_row + self.num_users * self.width
            into[self.first_row : stop].view(rows.shape).copy_(rows)
            return
        rows = rows.reshape(-1, *into.shape[1:])
        if self.padded_slots is not None:
            rows = rows.index_select(0, self.real_slots)
        into.index_copy_(0, self.real_rows, rows.to(into.dtype))

    def by_user(self, scores: Tensor) -> Tensor:
        """(G * H, rows, keys) as (G, H, rows, keys)."""
        return scores.view(self.num_users, -1, *scores.shape[1:])


def make_group(users: list[User], *, device: torch.device) -> UserGroup:
    """The index tensors of a group of non-empty users."""
    width = max(user.length for user in users)
    starts = torch.tensor([user.start for user in users])
    lengths = torch.tensor([user.length for user in users])
    places = torch.arange(width)
    padded = (places >= lengths[:, None]).flatten()
    source = (starts[:, None] + torch.minimum(places, lengths[:, None] - 1)).flatten()
    is_packed = bool((source == source[0] + torch.arange(source.shape[0])).all())
    real_slots = (~padded).nonzero()[:, 0]
    alike = len({(user.length, user.num_contexts, user.num_targets) for user in users}) == 1
    described = users[:1] if alike else users

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device).view(-1, 1, 1)

    return UserGroup(
        num_users=len(users),
        width=width,
        first_row=int(source[0]) if is_packed else None,
        source=source.to(device),
        padded_slots=padded.nonzero()[:, 0].to(device) if bool(padded.any()) else None,
        real_slots=real_slots.to(device),
        real_rows=source[real_slots].to(device),
        lengths=column([user.length for user in described]),
        num_contexts=column([user.num_contexts for user in described]),
        num_targets=column([user.num_targets for user in described]),
    )
