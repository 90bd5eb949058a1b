# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RET505, SIM102
"""The kernel that quantizes attention's operands to FP8, as :mod:`genrec.hstu.attention.quantization` defines it.

A program takes 128 tokens of a user and head, of q, k or v, in the slots of
:mod:`genrec.hstu.attention.triton_schedule`. Scales of a tensor, user or head need the largest magnitude of all it has.
Then there are two programs for each of these: the first looks for magnitudes, the second waits until all that it needs
have been found, and quantizes. It is launched ``delay`` slots after the first, which is as many as the longest user
has: near enough to find the numbers still in the L2 cache, and late enough that whom it waits for has been launched
before. GPUs start a grid's programs in order, so no program waits for one that can't start.
"""

from __future__ import annotations

from genrec.hstu.attention import quantization, triton_jit
from genrec.hstu.attention.triton_jit import PER_BATCH, constexpr, jit, kernel, tl
from genrec.hstu.attention.triton_schedule import count_blocks, find_tile
from genrec.hstu.precision.formats import E4M3

_BLOCK = constexpr(quantization.BLOCK)
_MAX = constexpr(E4M3.max)
_MAX_SCALE = constexpr(quantization.MAX_SCALE)
_INTERPRETED = constexpr(triton_jit.INTERPRETED)
_MAX_EXPONENT = constexpr(quantization.MAX_WEIGHT_EXPONENT)


@jit
def _load_block(x, first, end, x_row, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """(128, DIM_BLOCK) in float32 from row ``first`` on; zeros from row ``end`` on and beyond DIM."""
    rows = tl.arange(0, _BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    pointers = x + tl.cast(first, tl.int64) * x_row + (rows[:, None] * x_row + dims[None, :])
    mask = (first + rows < end)[:, None]
    if DIM < DIM_BLOCK:
        mask = mask & (dims < DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@jit
def _magnitudes(x):
    """NaN where ``x`` is not finite, which maxima pass over. Written so that it takes one instruction."""
    return tl.abs(x) + x * 0.0


@jit
def _number(x):
    """0 where there was nothing to find the largest of."""
    return tl.where(x == x, x, 0.0)


@jit
def _scale_of(amax):
    return tl.where(amax > 0, tl.minimum(tl.div_rn(tl.full(amax.shape, _MAX, tl.float32), amax), _MAX_SCALE), 1.0)


@jit
def _descale_of(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@jit
def _to_fp8(x, scale):
    """NaN where ``x`` is not finite."""
    values = x * scale + x * 0.0
    if _INTERPRETED:  # GPUs saturate as they round.
        values = tl.where(values == values, tl.clamp(values, -_MAX, _MAX), values)
    return values.to(tl.float8e4nv)


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
def _add_amax(x, amax, begin, first, length, head, x_row, x_head, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    block = _load_block(x + begin * x_row + head * x_head, first, length, x_row, DIM, DIM_BLOCK)
    largest = _number(tl.max(tl.max(_magnitudes(block), axis=1), axis=0))
    # Of numbers that are not negative the order is that of their bits.
    tl.atomic_max(amax, largest.to(tl.int32, bitcast=True), sem="relaxed")


@jit
def _wait(count, length, num_heads, num_slots, delay, CELLS: tl.constexpr):
    """Until the largest magnitude is known; not for users longer than the host was told, who would wait for ever."""
    num_tiles = count_blocks(length, _BLOCK)
    needed = num_tiles
    if CELLS == "user":
        needed = num_tiles * num_heads
    if CELLS == "tensor":
        needed = num_slots * num_heads
    needed = tl.where(num_tiles > delay, 0, needed)
    found = tl.atomic_add(count, 0, sem="acquire")
    while found < needed:
        found = tl.atomic_add(count, 0, sem="acquire")


@jit
def _scale_of_block(magnitudes, amax, CELLS: tl.constexpr):
    """Of a block's rows: one number, or with "row" (128,)."""
    if CELLS == "row":
        return _scale_of(tl.max(magnitudes, axis=1))
    elif CELLS == "block":
        return _scale_of(tl.max(tl.max(magnitudes, axis=1), axis=0))
    elif CELLS == "none":
        return tl.full((), 1.0, tl.float32)
    else:
        return _scale_of(tl.load(amax, volatile=True).to(tl.float32, bitcast=True))  # past the L1 cache


@jit
def _store_descale(descale, scale, user, slot, begin, first, length, head, num_users, num_heads, CELLS: tl.constexpr):
    if CELLS == "row":
        rows = first + tl.arange(0, _BLOCK)
        tl.store(descale + (begin + rows) * num_heads + head, _descale_of(scale), mask=rows < length)
    elif CELLS == "block":
        tl.store(descale + slot * num_heads + head, _descale_of(scale))
    else:
        tl.store(descale + user * num_heads + head, _descale_of(scale), mask=(first == 0) & (user < num_users))


@jit
def _store_rows(values, out, begin, first, length, head, num_heads, DIM_BLOCK: tl.constexpr):
    """To (T, H, DIM_BLOCK)."""
    rows = tl.arange(0, _BLOCK)[:, None]
    out += ((begin + first) * num_heads + head) * DIM_BLOCK
    places = rows * (num_heads * DIM_BLOCK) + tl.arange(0, DIM_BLOCK)[None, :]
    tl.store(out + places, values, mask=first + rows < length)


@jit
def _quantize_rows(
    x, out, descale, amax, norm, user, slot, begin, first, length, head, x_row, x_head, num_users, num_heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """A block as operand of products over its columns; norm: the cell with the bits of the longest row's norm."""
    x += begin * x_row + head * x_head
    block = _load_block(x, first, length, x_row, DIM, DIM_BLOCK)
    if user == num_users:
        block = tl.zeros_like(block)
    scale = _scale_of_block(_magnitudes(block), amax, CELLS)
    values = _to_fp8(block, scale[:, None] if CELLS == "row" else scale)
    _store_rows(values, out, begin, first, length, head, num_heads, DIM_BLOCK)
    _store_descale(descale, scale, user, slot, begin, first, length, head, num_users, num_heads, CELLS)
    if norm is not None:
        exact = values.to(tl.float32)
        norms = tl.sqrt_rn(tl.sum(exact * exact, axis=1)) * _descale_of(scale)
        longest = _number(tl.max(norms, axis=0))
        tl.atomic_max(norm, longest.to(tl.int32, bitcast=True), mask=user < num_users, sem="relaxed")


@jit
def _quantize_values(
    v, out, tiles, descale, tile_descale, amax, user, slot, begin, first, length, head, v_row, v_head,
    num_users, num_heads, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """A block of v as operand of products over its rows, transposed in ``quantization.KEY_ORDER``, and over columns.

    out, descale: of the latter, or None.
    """
    block = _load_block(v + begin * v_row + head * v_head, first, length, v_row, DIM, DIM_BLOCK)
    if user == num_users:
        block = tl.zeros_like(block)
    magnitudes = _magnitudes(block)
    scale = _scale_of_block(magnitudes, amax, CELLS)
    values = _to_fp8(block, scale[:, None] if CELLS == "row" else scale)
    if out is not None:
        _store_rows(values, out, begin, first, length, head, num_heads, DIM_BLOCK)
        _store_descale(descale, scale, user, slot, begin, first, length, head, num_users, num_heads, CELLS)
    if user < num_users:
        if CELLS == "row":
            column_scale = _scale_of(tl.max(magnitudes, axis=0))
            columns = tl.arange(0, DIM_BLOCK)
            tl.store(tile_descale + (slot * num_heads + head) * DIM_BLOCK + columns, _descale_of(column_scale))
            by_rows = _to_fp8(block, column_scale[None, :])
        else:
            _store_descale(tile_descale, scale, user, slot, begin, first, length, head, num_users, num_heads, CELLS)
            by_rows = values
        by_keys = tl.permute(tl.reshape(by_rows, (_BLOCK // 16, 2, 4, 2, DIM_BLOCK)), (0, 2, 1, 3, 4))
        places = tl.arange(0, DIM_BLOCK)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        tiles += (slot * num_heads + head).to(tl.int64) * (DIM_BLOCK * _BLOCK)
        tl.store(tiles + places, tl.trans(tl.reshape(by_keys, (_BLOCK, DIM_BLOCK))))


@kernel(per_batch=[*PER_BATCH, "num_cells", "num_slots", "delay"])
def quantize_kernel(
    q, k, v, q_out, k_out, v_out, v_tiles, q_descale, k_descale, v_descale, v_tile_descale, amax, num_cells, norms,
    schedule, offsets, q_row, q_head, k_row, k_head, v_row, v_head, num_users, num_rows, num_heads, num_slots, delay,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CELLS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """To FP8: q alone (PARTS = 1), or q, k and v (3).

    amax: (2, PARTS, num_cells) int32, zeros to begin with: bits of the largest magnitudes, and from how many blocks
    they are; None where no scale is for more than a block. norms: (2, B, H) int32, zeros: bits of the norms of the
    longest rows of q and k, or None.
    """
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % num_heads
    slot = (tl.program_id(0) // PARTS // num_heads).to(tl.int64)
    quantizes = True
    if amax is not None:
        quantizes = slot % 2 == 1
        slot = slot // 2 - tl.where(quantizes, delay, 0)
        if (slot < 0) | (slot >= num_slots):
            return
    user, begin, length, tile = find_tile(slot, schedule, offsets, num_users, num_rows, _BLOCK)
    first = (tile * _BLOCK).to(tl.int32)
    has_rows = first < length
    if amax is not None:
        amax += part * num_cells + _cell(tl.minimum(user, tl.maximum(num_users - 1, 0)), head, num_heads, CELLS)
        count = amax + PARTS * num_cells
        if quantizes == 0:
            is_counted = has_rows & (user < num_users)
            if is_counted:
                if part == 0:
                    _add_amax(q, amax, begin, first, length, head, q_row, q_head, QK_DIM, QK_BLOCK)
                if PARTS > 1:
                    if part == 1:
                        _add_amax(k, amax, begin, first, length, head, k_row, k_head, QK_DIM, QK_BLOCK)
                    if part == 2:
                        _add_amax(v, amax, begin, first, length, head, v_row, v_head, V_DIM, V_BLOCK)
            tl.atomic_add(count, 1, mask=is_counted | (CELLS == "tensor"), sem="release")
            return
    if first >= length:
        return
    if amax is not None:
        if user < num_users:
            _wait(count, length, num_heads, num_slots, delay, CELLS)
    if norms is not None:
        norms += (part * num_users + user) * num_heads + head
    if part == 0:
        _quantize_rows(
            q, q_out, q_descale, amax, norms, user, slot, begin, first, length, head, q_row, q_head,
            num_users, num_heads, QK_DIM, QK_BLOCK, CELLS,
        )  # fmt: skip
    if PARTS > 1:
        if part == 1:
            _quantize_rows(
                k, k_out, k_descale, amax, norms, user, slot, begin, first, length, head, k_row, k_head,
                num_users, num_heads, QK_DIM, QK_BLOCK, CELLS,
            )  # fmt: skip
        if part == 2:
            _quantize_values(
                v, v_out, v_tiles, v_descale, v_tile_descale, amax, user, slot, begin, first, length, head,
                v_row, v_head, num_users, num_heads, V_DIM, V_BLOCK, CELLS,
            )  # fmt: skip


@kernel(per_batch=["size"])
def weight_scale_kernel(norms, scale, size, alpha, BLOCK: tl.constexpr):
    """scale: (size,), :func:`genrec.hstu.attention.quantization.weight_scale` of norms (2, size)."""
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    query = tl.load(norms + cells, mask=cells < size, other=0).to(tl.float32, bitcast=True)
    key = tl.load(norms + size + cells, mask=cells < size, other=0).to(tl.float32, bitcast=True)
    bound = query * key * tl.abs(alpha)
    room = tl.div_rn(tl.full((BLOCK,), _MAX, tl.float32), bound)
    exponent = (room.to(tl.int32, bitcast=True) >> 23) - 127
    power = ((tl.minimum(exponent, _MAX_EXPONENT) + 127) << 23).to(tl.float32, bitcast=True)
    power = tl.where(exponent < -_MAX_EXPONENT, float("nan"), power)
    tl.store(scale + cells, tl.where(bound > 0, power, 1.0), mask=cells < size)
