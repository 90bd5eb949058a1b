# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
"""In which order tiles are taken: the kernel that ranks users, and how a program finds its tile.

Work is cut into tiles of one user's rows (or keys), longest user first, without the host knowing any length. With s_r
the tokens of all users longer than the r-th longest, its tiles of ``BLOCK`` tokens have the slots from
floor(s_r / BLOCK) + r on. These never collide, and there are at most floor(T / BLOCK) + B + 1, which is the grid. The
tokens beyond ``offsets[-1]`` are one more "user", whose results are zeros.
"""

from __future__ import annotations

from genrec.hstu.attention.quantization import BLOCK
from genrec.hstu.attention.triton_jit import constexpr, jit, kernel, tl

FP8_BLOCK = constexpr(BLOCK)
SCHEDULE_ROWS = 5
RANKS = constexpr(1024)  # that a program looks at together


@jit
def count_blocks(size, BLOCK: tl.constexpr):
    """Blocks that hold ``size`` tokens; none where it is negative."""
    return (tl.maximum(size, 0) + BLOCK - 1) // BLOCK


@jit
def user_span(user, offsets, num_users, num_rows):
    """First row and length of users; user ``num_users`` is the padding."""
    begin = tl.load(offsets + user, mask=user <= num_users, other=num_rows).to(tl.int64)
    end = tl.load(offsets + user + 1, mask=user < num_users, other=num_rows).to(tl.int64)
    return begin, (tl.minimum(end, num_rows) - begin).to(tl.int32)


@kernel()
def schedule_kernel(offsets, schedule, num_users, num_rows, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """schedule[0]: users from the longest to the shortest; schedule[1]: tokens of all users before them.

    schedule[2]: by user, the slot of its first tile of 128 tokens. schedule[3], [4]: first row and length of the users
    of schedule[0], so that a program reads all that it needs of its user at once.

    Ranks are counted, not sorted: B is in the hundreds, and one small launch is all it may cost. A program counts for
    BLOCK users, among OTHERS at a time.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own_begin, own_length = user_span(own, offsets, num_users, num_rows)
    rank = tl.full((BLOCK,), 0, tl.int32)
    tokens_before = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, num_users + 1, OTHERS):
        other = first + tl.arange(0, OTHERS)
        _, length = user_span(other, offsets, num_users, num_rows)
        is_tie = (length[None, :] == own_length[:, None]) & (other[None, :] < own[:, None])
        is_before = ((length[None, :] > own_length[:, None]) | is_tie) & (other <= num_users)[None, :]
        rank += tl.sum(is_before.to(tl.int32), axis=1)
        tokens_before += tl.sum(tl.where(is_before, length[None, :], 0), axis=1)
    tl.store(schedule + rank, own, mask=own <= num_users)
    tl.store(schedule + num_users + 1 + rank, tokens_before, mask=own <= num_users)
    tl.store(schedule + 2 * (num_users + 1) + own, tokens_before // FP8_BLOCK + rank, mask=own <= num_users)
    tl.store(schedule + 3 * (num_users + 1) + rank, own_begin.to(tl.int32), mask=own <= num_users)
    tl.store(schedule + 4 * (num_users + 1) + rank, own_length, mask=own <= num_users)


@jit
def load_ranked(rank, schedule, num_users):
    """(user, tokens of all users before it, its first row, its length), of the user of a rank."""
    entry = schedule + rank
    size = num_users + 1
    begin = tl.load(entry + 3 * size)
    return tl.load(entry), tl.load(entry + size), begin.to(tl.int64), tl.load(entry + 4 * size)


@jit
def find_tile(slot, schedule, num_users, BLOCK: tl.constexpr):
    """(user, first row, length, tile) of a slot; the tile is beyond the user's last where the slot is left over."""
    num_started = 0
    for first in range(0, num_users + 1, RANKS):
        rank = first + tl.arange(0, RANKS)
        tokens_before = tl.load(schedule + num_users + 1 + rank, mask=rank <= num_users, other=0)
        has_started = (tokens_before // BLOCK + rank <= slot) & (rank <= num_users)
        num_started += tl.sum(has_started.to(tl.int32), axis=0)
    rank = num_started - 1
    user, tokens_before, begin, length = load_ranked(rank, schedule, num_users)
    return user, begin, length, slot - tokens_before // BLOCK - rank


@jit
def find_first_slot(user, schedule, num_users):
    """The slot of a user's first 128 tokens."""
    return tl.load(schedule + 2 * (num_users + 1) + user)
