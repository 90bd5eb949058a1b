# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
"""How Gluon kernels find their tiles, bring them into shared memory, and take and store them there."""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import fence_async_shared, gl, gluon_jit, mbarrier, tma
from genrec.hstu.attention.triton_schedule import RANKS, load_ranked
from genrec.hstu.attention.triton_spans import masked_tile


@gluon_jit
def find_rank(slot, schedule, num_users, BLOCK: gl.constexpr):
    """The rank of the user whose tile has this slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    num_started = 0
    for first in range(0, num_users + 1, RANKS):
        rank = first + gl.arange(0, RANKS, layout)
        tokens_before = gl.load(schedule + num_users + 1 + rank, mask=rank <= num_users, other=0)
        has_started = (tokens_before // BLOCK + rank <= slot) & (rank <= num_users)
        num_started += gl.sum(has_started.to(gl.int32), axis=0)
    return num_started - 1


@gluon_jit
def find_tile(slot, schedule, num_users, BLOCK: gl.constexpr):
    """As in the Triton kernels: (user, first row, length, tile) of a slot."""
    rank = find_rank(slot, schedule, num_users, BLOCK)
    user, tokens_before, begin, length = load_ranked(rank, schedule, num_users)
    return user, begin, length, slot - tokens_before // BLOCK - rank


@gluon_jit
def tile_span(i, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: gl.constexpr):
    """Where the i-th tile starts and its span ends: first those with a mask, then the others."""
    start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK)
    whole = full + (i - num_masked) * BLOCK
    return gl.where(i < num_masked, start, whole), gl.where(i < num_masked, end, whole + BLOCK)


@gluon_jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """(COUNT, 1) barriers, each of which waits for so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon_jit
def fetch(tiles, ready, memory, row, column, pred):
    """Start loading a tile by TMA where ``pred``; the barrier ``ready`` says when it is there."""
    mbarrier.expect(ready, tiles.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(tiles, [row, column], ready, memory, pred=pred)


@gluon_jit
def fetch_columns(
    tiles, ready, memory, first_slot, start, head, num_heads, pred, DIM: gl.constexpr, BLOCK: gl.constexpr
):
    """Start loading (DIM, rows) from row ``start`` of a user on, of blocks (num_slots, H, DIM, BLOCK) as a matrix.

    The barrier ``ready`` is to expect it.
    """
    place = [((first_slot + start // BLOCK) * num_heads + head) * DIM, start % BLOCK]
    tma.async_copy_global_to_shared(tiles, place, ready, memory, pred=pred)


@gluon_jit
def zero_from(tile, count, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Set the rows of a tile in shared memory from ``count`` on to zero."""
    WIDTH: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for i in gl.static_range(DIM // WIDTH):
        part = tile.slice(i * WIDTH, WIDTH, dim=1)
        values = part.load(layout)
        part.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon_jit
def changing_zero(i, first):
    """Zero, and for all that the compiler knows another number in each step.

    It would compute addresses that don't change in a loop before it, and fill the registers with them.
    """
    return i & (first >> 31)


@gluon_jit
def hold_operand(smem, HELD: gl.constexpr, s_layout: gl.constexpr):
    """What S or dP are made of in all steps of a loop, for :func:`step_operand`; HELD: in registers."""
    operand = smem
    if HELD:
        width: gl.constexpr = 32 // smem.dtype.primitive_bitwidth
        operand = smem.index(0).load(gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=width))
    return operand


@gluon_jit
def step_operand(operand, i, first, HELD: gl.constexpr):
    """The operand of the i-th step of a loop, of what :func:`hold_operand` returned."""
    if not HELD:
        operand = operand.index(changing_zero(i, first))
    return operand


@gluon_jit
def store(values, base, first, end, stride, ROWS: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """Write (ROWS, DIM) from row ``first`` on, but for rows from ``end`` on."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    pointers = base + first.to(gl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    gl.store(pointers, values.to(base.dtype.element_ty), mask=(first + rows < end)[:, None])
