"""The plan of a batch for blocked attention: which users go together, and which tiles of their scores are visited.

Users of similar length form a group that is padded to its longest; a group's rows are cut into blocks, and a block
meets only the keys that it can see, in tiles of at most ``TILE_ELEMENTS`` scores over all users and heads of the group.
Three users of 5, 5 and 2 tokens, blocks of 2 rows, causal ("/" is half visible, "." is never visited)::

    group of the 5s, two users at once    / / . . .      group of the 2    / /
                                          / / . . .                        / /
                                          # # / / .
                                          # # / / .
                                          # # # # /

So memory is linear in tokens, padding is bounded, and no Python loop runs over short users. The plan is built on the
host from the lengths and shared by all layers that see the same batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from genrec.hstu.attention.groups import User, UserGroup, make_group
from genrec.hstu.attention.mask import MaskRules

TILE_ELEMENTS = 1 << 19  # 2 MiB of float32; measured on 2 cores, halving or doubling it is no faster
BLOCK_ROWS = 64
# A user joins a group while it is at most this much shorter than the group's longest, which bounds the padding.
_SHORTEST_SHARE, _SHORTER_BY = 0.8, 4


@dataclass(frozen=True)
class Tile:
    """Rows [row_start, row_stop) against keys [key_start, key_stop), for every user and head of a group.

    mask: "none" (all visible), "triangle" (only j <= i hides, in the last row_stop - row_start keys) or "general".
    """

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    mask: str

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.row_start, self.row_stop)

    @property
    def keys(self) -> slice:
        """Its keys."""
        return slice(self.key_start, self.key_stop)


@dataclass(frozen=True)
class AttentionPlan:
    """All groups of a batch and their tiles; tokens beyond ``num_tokens`` belong to no user."""

    num_tokens: int
    rules: MaskRules
    groups: tuple[tuple[UserGroup, tuple[Tile, ...]], ...]

    def max_tile_elements(self, num_heads: int) -> int:
        """Scores of the largest tile."""
        sizes = [
            group.num_users * num_heads * (tile.row_stop - tile.row_start) * (tile.key_stop - tile.key_start)
            for group, tiles in self.groups
            for tile in tiles
        ]
        return max(sizes, default=0)


def plan_for(
    offsets: Tensor, num_contexts: Tensor | None, num_targets: Tensor | None, *, num_heads: int, rules: MaskRules
) -> AttentionPlan:
    """The batch's plan, from a small cache keyed by value. Reads the tensors on the host (free on a CPU)."""
    starts = tuple(offsets.tolist())
    contexts = None if num_contexts is None else tuple(num_contexts.tolist())
    targets = None if num_targets is None else tuple(num_targets.tolist())
    return _build(starts, contexts, targets, num_heads, rules, offsets.device, TILE_ELEMENTS, BLOCK_ROWS)


@functools.lru_cache(maxsize=4)
def _build(
    starts: tuple[int, ...],
    num_contexts: tuple[int, ...] | None,
    num_targets: tuple[int, ...] | None,
    num_heads: int,
    rules: MaskRules,
    device: torch.device,
    tile_elements: int,
    block_rows: int,
) -> AttentionPlan:
    num_users = len(starts) - 1
    contexts, targets = num_contexts or (0,) * num_users, num_targets or (0,) * num_users
    if not len(contexts) == len(targets) == num_users:
        raise ValueError(f"num_contexts and num_targets must have one entry for each of {num_users} users")
    users = [User(starts[i], starts[i + 1] - starts[i], contexts[i], targets[i]) for i in range(num_users)]
    _check_users(users)
    groups = []
    for members in _similar_lengths(users, max_area=tile_elements // num_heads, block_rows=block_rows):
        max_keys = max(block_rows, tile_elements // (num_heads * len(members) * block_rows))
        tiles = _cut(members, rules=rules, block_rows=block_rows, max_keys=max_keys)
        groups.append((make_group(members, device=device), tiles))
    return AttentionPlan(num_tokens=starts[-1], rules=rules, groups=tuple(groups))


def _check_users(users: list[User]) -> None:
    """Raise ValueError where a user's parts don't fit in its tokens, which a kernel would answer with garbage."""
    if users and users[0].start != 0:
        raise ValueError(f"offsets must start at 0, not {users[0].start}")
    for index, user in enumerate(users):
        if min(user.num_contexts, user.num_targets, user.length - user.num_contexts - user.num_targets) < 0:
            raise ValueError(
                f"user {index} of the batch has {user.length} tokens, which {user.num_contexts} contexts and "
                f"{user.num_targets} targets don't fit"
            )


def _similar_lengths(users: list[User], *, max_area: int, block_rows: int) -> list[list[User]]:
    """Non-empty users, longest first, cut into groups whose largest tile stays within ``max_area`` scores a head."""
    groups: list[list[User]] = []
    longest = 0
    for user in sorted((user for user in users if user.length > 0), key=lambda user: -user.length):
        area = min(longest, block_rows) * longest
        is_similar = user.length + _SHORTER_BY >= _SHORTEST_SHARE * longest
        if groups and is_similar and (len(groups[-1]) + 1) * area <= max_area:
            groups[-1].append(user)
        else:
            groups.append([user])
            longest = user.length
    # In batch order, so that users of one length that are neighbours need no copy.
    return [sorted(group, key=lambda user: user.start) for group in groups]


def _cut(users: list[User], *, rules: MaskRules, block_rows: int, max_keys: int) -> tuple[Tile, ...]:
    """All tiles of a group, block by block."""
    width = max(user.length for user in users)
    tiles = []
    for row_start in range(0, width, block_rows):
        row_stop = min(row_start + block_rows, width)
        for first, last in _key_ranges(users, row_start, row_stop, width=width, rules=rules):
            # Cut from the end, so that a block's diagonal lies in one tile.
            for key_stop in range(last, first, -max_keys):
                key_start = max(first, key_stop - max_keys)
                mask = _mask_kind(users, row_start, row_stop, key_start, key_stop, rules=rules)
                tiles.append(Tile(row_start, row_stop, key_start, key_stop, mask))
    return tuple(tiles)


def _key_ranges(
    users: list[User], row_start: int, row_stop: int, *, width: int, rules: MaskRules
) -> list[tuple[int, int]]:
    """The keys that rows [row_start, row_stop) may see: one range, or contexts and a window."""
    max_contexts = max(user.num_contexts for user in users)
    last = row_stop if rules.causal else width
    if row_start < max_contexts:
        ends = [user.num_contexts if rules.contextual_mask == "prefix" else user.history_end for user in users]
        return [(0, max(last, *ends))]
    if rules.max_attn_len == 0:
        return [(0, last)]
    first = max(0, min(min(row_start, user.history_end) for user in users) - rules.max_attn_len)
    if not rules.causal and not any(user.num_targets for user in users):
        last = min(width, row_stop + rules.max_attn_len)
    if max_contexts == 0:
        return [(first, last)]
    return [(0, max_contexts), (first, last)] if max_contexts < first else [(0, last)]


def _mask_kind(
    users: list[User], row_start: int, row_stop: int, key_start: int, key_stop: int, *, rules: MaskRules
) -> str:
    """The cheapest mask that is right for the real rows of the tile. Padded rows may be anything: they are dropped."""
    if not rules.causal:
        return "general"
    # One context, or one group of targets at the end, is what causality alone gives ("history" contexts apart).
    harmless_contexts = 1 if rules.contextual_mask == "prefix" else 0
    if any(row_start < user.num_contexts and user.num_contexts > harmless_contexts for user in users):
        return "general"
    size = rules.target_group_size
    if any(user.num_targets > size and user.history_end + size < row_stop for user in users):
        return "general"
    if rules.max_attn_len > 0 and key_start < row_stop - 1 - rules.max_attn_len:
        return "general"
    return "triangle" if key_stop > row_start else "none"
