# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RET505, SIM102
"""Kernels that quantize attention's operands to FP8, as :mod:`genrec.hstu.attention.quantization` defines it.

A program takes 128 tokens of a user and head, of q, k or v, in the slots of
:mod:`genrec.hstu.attention.triton_schedule`, loads them once and writes them in all forms that products take. Scales of
a tensor, user or head take a pass of ``amax_kernel`` before, which also says where a look at each number is needed.

Tokens come as four parts of 32: four numbers of a column, one of each part, are a word of a tile in ``KEY_ORDER``, and
words are what is transposed.

Sums and maxima stand in no branch on what was loaded, but for the return of programs without a block: of norms summed
in one, ptxas 12.8 made code that was wrong on an H200, and right without optimization.
"""

from __future__ import annotations

from genrec.hstu.attention import quantization
from genrec.hstu.attention.triton_jit import FOUR_TO_FP8, INTERPRETED, PER_BATCH, constexpr, jit, kernel, tl
from genrec.hstu.attention.triton_schedule import find_tile
from genrec.hstu.precision.formats import E4M3

_BLOCK = constexpr(quantization.BLOCK)
_COMPILED = constexpr(not INTERPRETED)
_MAX = constexpr(E4M3.max)
_INFINITY = constexpr(0x7F800000)
_MAX_SCALE = constexpr(quantization.MAX_SCALE)
_MAX_EXPONENT = constexpr(quantization.MAX_WEIGHT_EXPONENT)


@jit
def _load_block(x, rows, end, x_row, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """(len(rows), DIM_BLOCK) in float32; zeros of rows from ``end`` on and beyond DIM."""
    dims = tl.arange(0, DIM_BLOCK)
    pointers = x + (rows.to(tl.int64)[:, None] * x_row + dims[None, :])
    mask = (rows < end)[:, None]
    if DIM < DIM_BLOCK:
        mask = mask & (dims < DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@jit
def _magnitudes(x):
    magnitudes = tl.abs(x)
    return tl.where(magnitudes < float("inf"), magnitudes, 0.0)  # NaN is less than nothing


@jit
def _finite_or_nan(x):
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@jit
def _scale_of(amax):
    return tl.where(amax > 0, tl.minimum(tl.div_rn(tl.full(amax.shape, _MAX, tl.float32), amax), _MAX_SCALE), 1.0)


@jit
def _descale_of(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@jit
def _cell(user, head, num_heads, CELLS: tl.constexpr):
    """Which of the amaxes of a tensor is that of a user's head."""
    if CELLS == "head":
        return user * num_heads + head
    elif CELLS == "user":
        return user
    else:
        return user * 0


@jit
def _find_work(num_heads, PARTS: tl.constexpr):
    """(part, slot, head)."""
    part = tl.program_id(0) % PARTS
    return part, tl.program_id(0) // PARTS // num_heads, tl.program_id(0) // PARTS % num_heads


@jit
def _add_amax(x, amax, spoiled, first, end, x_row, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    rows = first + tl.arange(0, _BLOCK)
    # Of numbers that are not negative the order is that of their bits; infinity and NaN are above all.
    bits = _magnitude_bits(_load_block(x, rows, end, x_row, DIM, DIM_BLOCK))
    tl.atomic_max(amax, tl.max(tl.where(bits < _INFINITY, bits, 0)), sem="relaxed")
    tl.atomic_max(spoiled, 1, mask=tl.max(bits) >= _INFINITY, sem="relaxed")


@jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel(per_batch=[*PER_BATCH, "num_cells"])
def amax_kernel(
    q, k, v, amax, num_cells, schedule, q_row, q_head, k_row, k_head, v_row, v_head,
    num_users, num_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CELLS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """amax: (2, PARTS, num_cells) int32, from 0 on, of q, k and v, or with one of PARTS of v alone.

    The bits of the largest finite magnitudes, then 1 where there are others.
    """
    part, slot, head = _find_work(num_heads, PARTS)
    user, begin, length, tile = find_tile(slot, schedule, num_users, _BLOCK)
    first = tile * _BLOCK
    if (first >= length) | (user == num_users):
        return
    largest = amax + part * num_cells + _cell(user, head, num_heads, CELLS)
    spoiled = largest + PARTS * num_cells
    if part == PARTS - 1:
        _add_amax(v + begin * v_row + head * v_head, largest, spoiled, first, length, v_row, V_DIM, V_BLOCK)
    if PARTS > 1:
        if part == 0:
            _add_amax(q + begin * q_row + head * q_head, largest, spoiled, first, length, q_row, QK_DIM, QK_BLOCK)
        if part == 1:
            _add_amax(k + begin * k_row + head * k_head, largest, spoiled, first, length, k_row, QK_DIM, QK_BLOCK)


@jit
def _part_rows(PART: tl.constexpr):
    """(32,): which tokens of a block are byte PART of the words of a column."""
    words = tl.arange(0, _BLOCK // 4)
    return words // 4 * 16 + words % 4 * 2 + (PART // 2 * 8 + PART % 2)


@jit
def _store_descale(descale, scale, slot, user, first, head, num_users, num_heads, CELLS: tl.constexpr):
    """Of a block or a whole user."""
    if CELLS == "block":
        tl.store(descale + slot * num_heads + head, _descale_of(scale))
    else:
        tl.store(descale + user * num_heads + head, _descale_of(scale), mask=(first == 0) & (user < num_users))


@jit
def _store_rows(values, out, rows, length, num_heads, DIM_BLOCK: tl.constexpr):
    """To a head of (T, H, DIM_BLOCK), from the user's first row on."""
    places = rows.to(tl.int64)[:, None] * (num_heads * DIM_BLOCK) + tl.arange(0, DIM_BLOCK)[None, :]
    tl.store(out + places, values, mask=(rows < length)[:, None])


@jit
def _square_sums(values):
    exact = values.to(tl.float32)
    exact = tl.where(exact == exact, exact, 0.0)
    return tl.sum(exact * exact, axis=1)


@jit
def _longest_row(a, b, c, d):
    """The largest sum of a row's squares, of four parts of a block in FP8."""
    first = tl.maximum(_square_sums(a), _square_sums(b))
    second = tl.maximum(_square_sums(c), _square_sums(d))
    return tl.max(tl.maximum(first, second), axis=0)


@jit
def _add_norm(norm, sums, descale, is_own):
    """sums: of squares of one row or of many, each with its descale; norm: the bits of the longest row's."""
    norms = tl.sqrt_rn(sums) * descale
    if len(norms.shape) > 0:
        norms = tl.max(norms, axis=0)
    tl.atomic_max(norm, norms.to(tl.int32, bitcast=True), mask=is_own, sem="relaxed")


@jit
def _byte(x):
    """FP8 of float32, as the lowest byte of an int32."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@jit
def _words(a, b, c, d, ASM: tl.constexpr):
    """FP8 of four float32 in each int32, that of ``a`` the lowest. Bytes put together cost three times as much."""
    if ASM:
        words = tl.inline_asm_elementwise(
            FOUR_TO_FP8,
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)
    return words


@jit
def _store_tile(a, b, c, d, tiles, slot, head, num_heads, DIM_BLOCK: tl.constexpr):
    """A scaled block transposed, in ``quantization.KEY_ORDER``, as words: tiles (num_slots, H, DIM_BLOCK, 32) int32."""
    WORDS: tl.constexpr = _BLOCK // 4
    tiles += (slot * num_heads + head).to(tl.int64) * (DIM_BLOCK * WORDS)
    places = tl.arange(0, DIM_BLOCK)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(tiles + places, tl.trans(_words(a, b, c, d, _COMPILED)))


@jit
def _quantize_rows_alone(x, out, descale, norm, rows, length, is_own, head, num_heads, DIM_BLOCK: tl.constexpr):
    """A part of a block with a scale for each row."""
    scale = _scale_of(tl.max(_magnitudes(x), axis=1))
    values = (_finite_or_nan(x) * scale[:, None]).to(tl.float8e4nv)  # which saturates
    _store_rows(values, out, rows, length, num_heads, DIM_BLOCK)
    tl.store(descale + rows * num_heads, _descale_of(scale), mask=rows < length)
    if norm is not None:
        _add_norm(norm, _square_sums(values), _descale_of(scale), is_own)


@jit
def _quantize(
    x, out, tiles, descale, tile_descale, amax, num_cells, norm, part, user, slot, begin, first, length, head,
    x_row, x_head, num_users, num_heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, CELLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A block by rows, to ``out``, and as tile, unless these are None. norm: (B, H), of the longest rows, or None.

    tile_descale: with "row" scales, where tiles have their own, of columns.
    """
    is_own = user < num_users
    x += begin * x_row + head * x_head
    end = tl.where(is_own, length, 0)  # the padding is zeros, whatever it holds
    rows_a, rows_b = first + _part_rows(0), first + _part_rows(1)
    rows_c, rows_d = first + _part_rows(2), first + _part_rows(3)
    a = _load_block(x, rows_a, end, x_row, DIM, DIM_BLOCK)
    b = _load_block(x, rows_b, end, x_row, DIM, DIM_BLOCK)
    c = _load_block(x, rows_c, end, x_row, DIM, DIM_BLOCK)
    d = _load_block(x, rows_d, end, x_row, DIM, DIM_BLOCK)
    if out is not None:
        out += (begin * num_heads + head) * DIM_BLOCK
    if norm is not None:
        norm += user * num_heads + head
    if CELLS == "row":
        if out is not None:
            descale += begin * num_heads + head
            _quantize_rows_alone(a, out, descale, norm, rows_a, length, is_own, head, num_heads, DIM_BLOCK)
            _quantize_rows_alone(b, out, descale, norm, rows_b, length, is_own, head, num_heads, DIM_BLOCK)
            _quantize_rows_alone(c, out, descale, norm, rows_c, length, is_own, head, num_heads, DIM_BLOCK)
            _quantize_rows_alone(d, out, descale, norm, rows_d, length, is_own, head, num_heads, DIM_BLOCK)
        if tiles is not None:
            low = tl.maximum(tl.max(_magnitudes(a), axis=0), tl.max(_magnitudes(b), axis=0))
            high = tl.maximum(tl.max(_magnitudes(c), axis=0), tl.max(_magnitudes(d), axis=0))
            scale = _scale_of(tl.maximum(low, high))
            across = scale[None, :]
            a, b = _finite_or_nan(a) * across, _finite_or_nan(b) * across
            c, d = _finite_or_nan(c) * across, _finite_or_nan(d) * across
            if is_own:
                columns = tl.arange(0, DIM_BLOCK)
                tl.store(tile_descale + (slot * num_heads + head) * DIM_BLOCK + columns, _descale_of(scale))
                _store_tile(a, b, c, d, tiles, slot, head, num_heads, DIM_BLOCK)
    else:
        # Most tensors hold nothing that isn't finite, and where a pass before has seen that none is looked at again.
        may_spoil = True
        if CELLS == "none":
            scale = tl.full((), 1.0, tl.float32)
        elif CELLS == "block":
            low = tl.maximum(tl.max(_magnitudes(a)), tl.max(_magnitudes(b)))
            scale = _scale_of(tl.maximum(low, tl.maximum(tl.max(_magnitudes(c)), tl.max(_magnitudes(d)))))
        else:
            amax += part * num_cells + _cell(tl.where(is_own, user, 0), head, num_heads, CELLS)
            scale = _scale_of(tl.load(amax).to(tl.float32, bitcast=True))
            may_spoil = tl.load(amax + PARTS * num_cells) > 0
        _store_descale(descale, scale, slot, user, first, head, num_users, num_heads, CELLS)
        if may_spoil:
            a, b, c, d = _finite_or_nan(a), _finite_or_nan(b), _finite_or_nan(c), _finite_or_nan(d)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
        if tiles is not None:
            if is_own:
                _store_tile(a, b, c, d, tiles, slot, head, num_heads, DIM_BLOCK)
        if out is not None:
            a, b, c, d = a.to(tl.float8e4nv), b.to(tl.float8e4nv), c.to(tl.float8e4nv), d.to(tl.float8e4nv)
            _store_rows(a, out, rows_a, length, num_heads, DIM_BLOCK)
            _store_rows(b, out, rows_b, length, num_heads, DIM_BLOCK)
            _store_rows(c, out, rows_c, length, num_heads, DIM_BLOCK)
            _store_rows(d, out, rows_d, length, num_heads, DIM_BLOCK)
            if norm is not None:
                _add_norm(norm, _longest_row(a, b, c, d), _descale_of(scale), is_own)


@kernel(per_batch=[*PER_BATCH, "num_cells"])
def quantize_kernel(
    q, k, v, q_out, k_out, v_out, q_tiles, k_tiles, v_tiles, q_descale, k_descale, v_descale, v_tile_descale,
    amax, num_cells, norms, v_norms,
    schedule, q_row, q_head, k_row, k_head, v_row, v_head, num_users, num_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CELLS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """To FP8, by rows (``x_out``) and as tiles: q, k and v, or with one of PARTS v alone. What is None isn't made.

    amax: of ``amax_kernel``. norms: (2, B, H) int32, bits of the norms of the longest rows of q and k, from 0 on;
    v_norms: (B, H), of v. v_tile_descale: where tiles have other scales than rows.
    """
    part, slot, head = _find_work(num_heads, PARTS)
    user, begin, length, tile = find_tile(slot, schedule, num_users, _BLOCK)
    first = (tile * _BLOCK).to(tl.int32)
    if first >= length:
        return
    slot = slot.to(tl.int64)
    if part == PARTS - 1:
        _quantize(
            v, v_out, v_tiles, v_descale, v_tile_descale, amax, num_cells, v_norms, part,
            user, slot, begin, first, length, head, v_row, v_head, num_users, num_heads,
            V_DIM, V_BLOCK, CELLS, PARTS,
        )  # fmt: skip
    if PARTS > 1:
        if part == 0:
            _quantize(
                q, q_out, q_tiles, q_descale, None, amax, num_cells, norms, part,
                user, slot, begin, first, length, head, q_row, q_head, num_users, num_heads,
                QK_DIM, QK_BLOCK, CELLS, PARTS,
            )  # fmt: skip
        if part == 1:
            _quantize(
                k, k_out, k_tiles, k_descale, None, amax, num_cells, norms + num_users * num_heads, part,
                user, slot, begin, first, length, head, k_row, k_head, num_users, num_heads,
                QK_DIM, QK_BLOCK, CELLS, PARTS,
            )  # fmt: skip


@kernel(per_batch=["size"])
def bound_scale_kernel(norms, other_norms, scale, size, factor, BLOCK: tl.constexpr):
    """scale: (size,), of what is at most the product of two norms and a factor; quantization's ``_power_below``."""
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    norm = tl.load(norms + cells, mask=cells < size, other=0).to(tl.float32, bitcast=True)
    other = tl.load(other_norms + cells, mask=cells < size, other=0).to(tl.float32, bitcast=True)
    bound = norm * other * factor
    room = tl.div_rn(tl.full((BLOCK,), _MAX, tl.float32), bound)
    exponent = (room.to(tl.int32, bitcast=True) >> 23) - 127
    power = ((tl.minimum(exponent, _MAX_EXPONENT) + 127) << 23).to(tl.float32, bitcast=True)
    power = tl.where(exponent < -_MAX_EXPONENT, float("nan"), power)
    tl.store(scale + cells, tl.where(bound > 0, power, 1.0), mask=cells < size)
