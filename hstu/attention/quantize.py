# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RET505, SIM102
"""Kernels that quantize attention's operands to FP8, as :mod:`genrec.hstu.attention.quantization` defines it.

A program takes 128 tokens of a user and head, of q, k or v, in the slots of
:mod:`genrec.hstu.attention.triton_schedule`. Scales of a tensor, user or head take a pass of ``amax_kernel`` before.
"""

from __future__ import annotations

from genrec.hstu.attention import quantization
from genrec.hstu.attention.triton_jit import PER_BATCH, constexpr, jit, kernel, tl
from genrec.hstu.attention.triton_schedule import find_tile
from genrec.hstu.precision.formats import E4M3

_BLOCK = constexpr(quantization.BLOCK)
_MAX = constexpr(E4M3.max)
_MAX_SCALE = constexpr(quantization.MAX_SCALE)
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
    magnitudes = tl.abs(x)
    return tl.where(magnitudes < float("inf"), magnitudes, 0.0)  # NaN is less than nothing


@jit
def _scale_of(amax):
    return tl.where(amax > 0, tl.minimum(tl.div_rn(tl.full(amax.shape, _MAX, tl.float32), amax), _MAX_SCALE), 1.0)


@jit
def _descale_of(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@jit
def _to_fp8(x, scale):
    values = tl.clamp(x * scale, -_MAX, _MAX)
    return tl.where(tl.abs(x) < float("inf"), values, float("nan")).to(tl.float8e4nv)


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
def _add_amax(x, amax, first, end, x_row, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    block = _load_block(x, first, end, x_row, DIM, DIM_BLOCK)
    largest = tl.max(tl.max(_magnitudes(block), axis=1), axis=0)
    # Of numbers that are not negative the order is that of their bits.
    tl.atomic_max(amax, largest.to(tl.int32, bitcast=True), sem="relaxed")


@kernel(per_batch=[*PER_BATCH, "num_cells"])
def amax_kernel(
    q, k, v, amax, num_cells, schedule, offsets, q_row, q_head, k_row, k_head, v_row, v_head,
    num_users, num_rows, num_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CELLS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """amax: (PARTS, num_cells) int32, the bits of the largest magnitudes of the first 1 to 3 PARTS of q, k, v."""
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % num_heads
    slot = tl.program_id(0) // PARTS // num_heads
    user, begin, length, tile = find_tile(slot, schedule, offsets, num_users, num_rows, _BLOCK)
    first = tile * _BLOCK
    if (first >= length) | (user == num_users):
        return
    amax += part * num_cells + _cell(user, head, num_heads, CELLS)
    if part == 0:
        _add_amax(q + begin * q_row + head * q_head, amax, first, length, q_row, QK_DIM, QK_BLOCK)
    if PARTS > 1:
        if part == 1:
            _add_amax(k + begin * k_row + head * k_head, amax, first, length, k_row, QK_DIM, QK_BLOCK)
        if part == 2:
            _add_amax(v + begin * v_row + head * v_head, amax, first, length, v_row, V_DIM, V_BLOCK)


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
        return _scale_of(tl.load(amax).to(tl.float32, bitcast=True))


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
    rows = first + tl.arange(0, _BLOCK)[:, None]
    places = ((begin + rows) * num_heads + head) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)[None, :]
    tl.store(out + places, values, mask=rows < length)


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
        exact = tl.where(exact == exact, exact, 0.0)
        norms = tl.sqrt_rn(tl.sum(exact * exact, axis=1)) * _descale_of(scale)
        longest = tl.max(norms, axis=0)
        tl.atomic_max(norm, longest.to(tl.int32, bitcast=True), mask=user < num_users, sem="relaxed")


@jit
def _quantize_tile(
    v, tiles, descale, amax, user, slot, begin, first, length, head, v_row, v_head, num_users, num_heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """A block of v as operand of products over its rows: transposed, in ``quantization.KEY_ORDER``."""
    block = _load_block(v + begin * v_row + head * v_head, first, length, v_row, DIM, DIM_BLOCK)
    if CELLS == "row":
        scale = _scale_of(tl.max(_magnitudes(block), axis=0))
        columns = tl.arange(0, DIM_BLOCK)
        tl.store(descale + (slot * num_heads + head) * DIM_BLOCK + columns, _descale_of(scale))
        values = _to_fp8(block, scale[None, :])
    else:
        scale = _scale_of_block(_magnitudes(block), amax, CELLS)
        _store_descale(descale, scale, user, slot, begin, first, length, head, num_users, num_heads, CELLS)
        values = _to_fp8(block, scale)
    values = tl.permute(tl.reshape(values, (_BLOCK // 16, 2, 4, 2, DIM_BLOCK)), (0, 2, 1, 3, 4))
    places = tl.arange(0, DIM_BLOCK)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    tiles += (slot * num_heads + head).to(tl.int64) * (DIM_BLOCK * _BLOCK)
    tl.store(tiles + places, tl.trans(tl.reshape(values, (_BLOCK, DIM_BLOCK))))


@kernel(per_batch=[*PER_BATCH, "num_cells"])
def quantize_kernel(
    q, k, v, q_out, k_out, v_out, v_tiles, q_descale, k_descale, v_descale, v_tile_descale, amax, num_cells, norms,
    schedule, offsets, q_row, q_head, k_row, k_head, v_row, v_head, num_users, num_rows, num_heads,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CELLS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """To FP8. The first 1 to 4 PARTS of: q and k by rows, v as tiles, v by rows; the others' pointers are None.

    amax: of ``amax_kernel``. norms: (2, B, H) int32, bits of the norms of the longest rows of q and k, from 0 on.
    """
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % num_heads
    slot = (tl.program_id(0) // PARTS // num_heads).to(tl.int64)
    user, begin, length, tile = find_tile(slot, schedule, offsets, num_users, num_rows, _BLOCK)
    first = (tile * _BLOCK).to(tl.int32)
    if first >= length:
        return
    if amax is not None:
        cell = _cell(tl.minimum(user, tl.maximum(num_users - 1, 0)), head, num_heads, CELLS)
        amax += tl.minimum(part, 2) * num_cells + cell
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
    if PARTS > 2:
        if (part == 2) & (user < num_users):
            _quantize_tile(
                v, v_tiles, v_tile_descale, amax, user, slot, begin, first, length, head, v_row, v_head,
                num_users, num_heads, V_DIM, V_BLOCK, CELLS,
            )  # fmt: skip
    if PARTS > 3:
        if part == 3:
            _quantize_rows(
                v, v_out, v_descale, amax, None, user, slot, begin, first, length, head, v_row, v_head,
                num_users, num_heads, V_DIM, V_BLOCK, CELLS,
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
