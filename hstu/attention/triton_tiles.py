# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, RET505
"""Loads and stores of tiles, plain and by TMA, of FP8 tiles with their descales, and FP8 scores as operands."""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import jit, tl
from genrec.hstu.attention.triton_schedule import FP8_BLOCK


@jit
def load(base, first, end, stride, ROWS: tl.constexpr, DIM: tl.constexpr, BOUNDED: tl.constexpr):
    """(ROWS, DIM) from row ``first`` on; zeros from row ``end`` on (if BOUNDED)."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if BOUNDED:
        return tl.load(pointers, mask=(first + rows < end)[:, None], other=0.0)
    return tl.load(pointers)


@jit
def load_full(descriptor, base, begin, first, head, stride, ROWS: tl.constexpr, DIM: tl.constexpr):
    """(ROWS, DIM) from row ``first`` of the user on, all of them its own; by TMA if there is a descriptor."""
    if descriptor is not None:
        return descriptor.load([(begin + first).to(tl.int32), head * DIM])
    return load(base, first, first, stride, ROWS, DIM, False)


@jit
def store(values, base, first, end, stride, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Write (ROWS, DIM) from row ``first`` on, but for rows from ``end`` on."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(pointers, values.to(base.dtype.element_ty), mask=(first + rows < end)[:, None])


@jit
def load_descales(
    descales, user, head, num_heads, begin, first_slot, first, end, SIZE: tl.constexpr, SCALES: tl.constexpr
):
    """Of rows from ``first`` on: (SIZE,), or one number for all."""
    if SCALES == "user":
        return tl.load(descales + user * num_heads + head)
    else:
        rows = first + tl.arange(0, SIZE)
        index = first_slot + rows // FP8_BLOCK if SCALES == "block" else begin + rows
        return tl.load(descales + index * num_heads + head, mask=rows < end, other=1.0)


@jit
def outer(a, b, SCALES: tl.constexpr):
    """What each score of a tile is multiplied with, from descales of its two sides."""
    if SCALES == "user":
        return a * b
    else:
        return a[:, None] * b[None, :]


@jit
def load_fp8(
    values, descales, user, head, num_heads, begin, first_slot, first, end,
    SIZE: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Rows from ``first`` on of (T, H, DIM), and their descales."""
    values += (begin * num_heads + head) * DIM
    tile = load(values, first, end, num_heads * DIM, SIZE, DIM, True)
    return tile, load_descales(descales, user, head, num_heads, begin, first_slot, first, end, SIZE, SCALES)


@jit
def load_columns(tiles, first_slot, head, num_heads, start, SIZE: tl.constexpr, DIM: tl.constexpr):
    """(SIZE, DIM) from row ``start`` on, a multiple of SIZE, of blocks (num_slots, H, DIM, 128), in their order."""
    block = (first_slot + start // FP8_BLOCK) * num_heads + head
    within = tl.multiple_of(start % FP8_BLOCK, SIZE)  # The compiler can't know, and would load byte by byte.
    places = tl.arange(0, DIM)[:, None] * FP8_BLOCK + within + tl.arange(0, SIZE)[None, :]
    return tl.trans(tl.load(tiles + tl.cast(block, tl.int64) * (DIM * FP8_BLOCK) + places))


@jit
def as_fp8_operand(scores, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Scores (DOWN, ACROSS) rounded to FP8, in the order of :func:`load_columns`.

    Nothing moves between threads where this is tensor cores' register layout.
    """
    scores = tl.reshape(scores.to(tl.float8e4nv), (DOWN, ACROSS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(scores, (0, 1, 3, 2, 4)), (DOWN, ACROSS))


@jit
def add_fp8_product(scores, columns, total, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """total + scores columns, of scores (DOWN, ACROSS), which are rounded, and columns of :func:`load_columns`."""
    # Added in float32 on Hopper, whose FP8 tensor cores keep 14 bits or so of a sum. With max_num_imprecise_acc instead
    # the PTX of Triton 3.6 reads products in loops before it has waited for them.
    return total + tl.dot(as_fp8_operand(scores, DOWN, ACROSS), columns)


@jit
def load_fp8_operands(
    x, y, x_descale, y_descale, score_descale, grad_descale, user, head, num_heads, begin, first_slot, first, end,
    SIZE: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Rows from ``first`` on for S, of x, and for dP, of y, and what S and dP are then multiplied with.

    score_descale, grad_descale: of the other operands of S and dP, which stay the same in a loop.
    """
    score, score_scale = load_fp8(
        x, x_descale, user, head, num_heads, begin, first_slot, first, end, SIZE, QK_DIM, SCALES
    )
    grad, grad_scale = load_fp8(y, y_descale, user, head, num_heads, begin, first_slot, first, end, SIZE, V_DIM, SCALES)
    return score, grad, outer(score_descale, score_scale, SCALES), outer(grad_descale, grad_scale, SCALES)
