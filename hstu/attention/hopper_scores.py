# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
"""What scores go through in the Gluon kernels: descales, SiLU and its derivative, the mask, and rounding."""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import FOUR_TO_FP8, gl, gluon_jit
from genrec.hstu.attention.triton_schedule import FP8_BLOCK, find_first_slot
from genrec.hstu.attention.triton_spans import visible


@gluon_jit
def silu(half):
    """SiLU(2 h) and twice its derivative there, of h: h (1 + t) and 1 + t + h (1 + t) (1 - t), with t = tanh h.

    Where h is huge and t is 1, the last term is 0: nothing that large is added up, and no 1 is lost.
    """
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1)
    value = gl.fma(half, t, half)
    return value, gl.fma(value, 1.0 - t, 1.0 + t)


@gluon_jit
def load_descales(
    descales, user, head, num_heads, begin, schedule, num_users, first, end,
    SIZE: gl.constexpr, SCALES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of rows from ``first`` on: (SIZE,), or one number for all of them; 1 where :func:`load_user_descale` has it."""
    factor = 1.0
    if SCALES == "block":
        slot = find_first_slot(user, schedule, num_users) + first // FP8_BLOCK
        factor = gl.load(descales + slot * num_heads + head)
    if SCALES == "row":
        rows = gl.minimum(first + gl.arange(0, SIZE, layout), end - 1)
        factor = gl.load(descales + (begin * num_heads + head) + rows * num_heads)
    return factor


@gluon_jit
def load_user_descale(first, second, user, head, num_heads, SCALES: gl.constexpr):
    """The product of two descales of a user and head; 1 where :func:`load_descales` has them."""
    factor = 1.0
    if SCALES == "user":
        place = user * num_heads + head
        factor = gl.load(first + place) * gl.load(second + place)
    return factor


@gluon_jit
def load_product_scale(scales, descales, user, head, num_heads, FACTOR: gl.constexpr, SCALES: gl.constexpr):
    """FACTOR times a user's and head's scale of P or dS, and what undoes it and the other operand's in a product.

    For "user" scales, where P and dS are rounded to FP8; else 1 and 1. FACTOR: half for dS, as SiLU's slopes are twice
    what they should be.
    """
    scale = 1.0
    descale = 1.0
    if SCALES == "user":
        place = user * num_heads + head
        scale = FACTOR * gl.load(scales + place)
        descale = gl.load(descales + place) / scale
    return scale, descale


@gluon_jit
def scaled(scores, down, across, SCALES: gl.constexpr):
    """Scores times the descales of their two sides."""
    if SCALES == "row":
        scores = scores * down[:, None] * across[None, :]
    else:
        scores = scores * (down * across)
    return scores


@gluon_jit
def grad_of_scores(dp, slope, down, across, SCALES: gl.constexpr, MASKED: gl.constexpr):
    """dS of dP, which in FP8 lacks the descales of its two sides, and SiLU's slopes."""
    ds = dp * slope
    if SCALES != "none":
        ds = scaled(ds, down, across, SCALES)
    if MASKED:  # Beyond the user's end, where the slope is zero, dP may be anything.
        ds = gl.where(slope == 0.0, 0.0, ds)
    return ds


@gluon_jit
def as_operand(scores, layout: gl.constexpr, dtype: gl.constexpr):
    """P or dS in registers as the first operand of the next product, without a move between threads.

    In FP8 the other operand is a tile of columns, ``KEY_ORDER`` of :mod:`genrec.hstu.attention.quantization`.
    """
    if dtype != gl.float8e4nv:
        operand = gl.convert_layout(scores.to(dtype), layout)
    else:
        ROWS: gl.constexpr = scores.shape[0]
        KEYS: gl.constexpr = scores.shape[1]
        scores = scores.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, KEYS])
        operand = gl.inline_asm_elementwise(
            FOUR_TO_FP8,
            "=r,f,f,f,f",
            [gl.convert_layout(scores, layout)],
            dtype=gl.float8e4nv,
            is_pure=True,
            pack=4,
        )
    return operand


@gluon_jit
def visible_rows(
    first, start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(KEYS, ROWS): which keys from ``first`` on are seen by which rows from ``start`` on, of those before ``end``."""
    keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    seen = visible(
        rows[None, :], keys[:, None], history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    return seen & (rows < end)[None, :]
