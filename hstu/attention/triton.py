# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RET505
"""HSTU attention in Triton: the kernels. :mod:`genrec.hstu.attention.launch` starts them.

Work is cut into tiles of one user's rows (or keys), longest user first, without the host knowing any length. With s_r
the tokens of all users longer than the r-th longest, its tiles of ``BLOCK`` tokens have the slots from
floor(s_r / BLOCK) + r on. These never collide, and there are at most floor(T / BLOCK) + B + 1, which is the grid. The
tokens beyond ``offsets[-1]`` are one more "user", whose results are zeros.

A row's keys lie in few spans (history, its window, contexts, its own group of targets). What all rows of a tile see
goes through a loop without any mask; the borders of the spans go through a second one, tile by tile, masked.

In FP8 (SCALES other than "none") the operands of S, dP and O = P v are those of
:mod:`genrec.hstu.attention.quantization`, and forward's tiles of keys start at multiples of KEYS from the user's first
token, as the blocks of v do.

SiLU(x) = h (1 + tanh h) with h = x / 2, which is one special-function instruction a score; its derivative is
(1 + tanh h)(1 + h (1 - tanh h)) / 2. All factors that are the same for all scores (alpha, 1 / N, 1 / 2) are applied to
the small results.
"""

from __future__ import annotations

from typing import Any

from genrec.hstu.attention import quantization
from genrec.hstu.attention.bias import LOG_BUCKET_WIDTH

try:
    import triton as triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ModuleNotFoundError:  # genrec imports without it; asking for these kernels says what is missing.
    triton = None

_FP8_BLOCK = quantization.BLOCK if triton is None else tl.constexpr(quantization.BLOCK)
_BUCKET_WIDTH = LOG_BUCKET_WIDTH if triton is None else tl.constexpr(LOG_BUCKET_WIDTH)
# Triton's own switch for running kernels on the CPU, read as the kernels are defined.
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)


def _jit(kernel: Any = None, **options: Any) -> Any:
    if kernel is None:
        return lambda function: _jit(function, **options)
    return kernel if triton is None else triton.jit(kernel, **options)


# Values that change from batch to batch: no new compilation for one that divides by 16, or is 1.
_PER_BATCH = ["num_users", "num_rows", "window", "group_size", "num_positions", "num_buckets"]


@_jit
def _num_blocks(size, BLOCK: tl.constexpr):
    return (tl.maximum(size, 0) + BLOCK - 1) // BLOCK


@_jit
def _user_span(user, offsets, num_users, num_rows):
    """First row and length of users; user ``num_users`` is the padding."""
    begin = tl.load(offsets + user, mask=user <= num_users, other=num_rows).to(tl.int64)
    end = tl.load(offsets + user + 1, mask=user < num_users, other=num_rows).to(tl.int64)
    return begin, (tl.minimum(end, num_rows) - begin).to(tl.int32)


@_jit(do_not_specialize=_PER_BATCH)
def schedule_kernel(offsets, schedule, num_users, num_rows, BLOCK: tl.constexpr):
    """schedule[0]: users from the longest to the shortest; schedule[1]: tokens of all users before them.

    schedule[2]: by user, the slot of its first tile of 128 tokens.

    Ranks are counted, not sorted: B is in the hundreds, and one small launch is all it may cost.
    """
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, own_length = _user_span(own, offsets, num_users, num_rows)
    rank = tl.full((BLOCK,), 0, tl.int32)
    tokens_before = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, num_users + 1, BLOCK):
        other = first + tl.arange(0, BLOCK)
        _, length = _user_span(other, offsets, num_users, num_rows)
        is_tie = (length[None, :] == own_length[:, None]) & (other[None, :] < own[:, None])
        is_before = ((length[None, :] > own_length[:, None]) | is_tie) & (other <= num_users)[None, :]
        rank += tl.sum(is_before.to(tl.int32), axis=1)
        tokens_before += tl.sum(tl.where(is_before, length[None, :], 0), axis=1)
    tl.store(schedule + rank, own, mask=own <= num_users)
    tl.store(schedule + num_users + 1 + rank, tokens_before, mask=own <= num_users)
    tl.store(schedule + 2 * (num_users + 1) + own, tokens_before // _FP8_BLOCK + rank, mask=own <= num_users)


@_jit
def _find_tile(slot, schedule, offsets, num_users, num_rows, BLOCK: tl.constexpr):
    """(user, first row, length, tile) of a slot; the tile is beyond the user's last where the slot is left over."""
    num_started = 0
    for first in range(0, num_users + 1, 256):
        rank = first + tl.arange(0, 256)
        tokens_before = tl.load(schedule + num_users + 1 + rank, mask=rank <= num_users, other=0)
        has_started = (tokens_before // BLOCK + rank <= slot) & (rank <= num_users)
        num_started += tl.sum(has_started.to(tl.int32), axis=0)
    rank = num_started - 1
    user = tl.load(schedule + rank)
    begin, length = _user_span(user, offsets, num_users, num_rows)
    return user, begin, length, slot - tl.load(schedule + num_users + 1 + rank) // BLOCK - rank


@_jit
def _user_parts(user, length, num_contexts, num_targets, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr):
    """(where history ends, how many contexts), kept within the user whatever the tensors say."""
    history_end = length
    if TARGETS:
        history_end = length - tl.minimum(tl.maximum(tl.load(num_targets + user).to(tl.int32), 0), length)
    contexts = 0
    if CONTEXTS != "none":
        contexts = tl.minimum(tl.load(num_contexts + user).to(tl.int32), history_end)
    return history_end, contexts


@_jit
def _visible(
    rows, keys, history_end, contexts, window, group_size,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """:func:`genrec.hstu.attention.mask.visible` for a tile; rows and keys broadcast."""
    if CAUSAL:
        seen = keys <= rows
    else:
        seen = (keys >= 0) & (rows >= 0)
    if WINDOW:
        gap = tl.minimum(rows, history_end) - keys
        if not CAUSAL:
            gap = tl.abs(gap)
        seen = seen & ((gap <= window) | (keys < contexts) | (keys >= history_end))
    if TARGETS:
        row_group = tl.where(rows < history_end, -1, (rows - history_end) // group_size)
        seen = seen & ((keys < history_end) | (row_group == (keys - history_end) // group_size))
    if CONTEXTS == "prefix":
        seen = tl.where(rows < contexts, keys < contexts, seen)
    if CONTEXTS == "history":
        seen = tl.where(rows < contexts, keys < history_end, seen)
    return seen


@_jit
def _key_spans(
    first, last, length, history_end, contexts, window, group_size,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What rows first..last see: (start, number of blocks) seen by all of them, then four (start, end) for the mask."""
    low = 0
    full_low = 0
    high = history_end
    full_high = history_end
    if CAUSAL:
        high = tl.minimum(last + 1, history_end)
        full_high = tl.minimum(first + 1, history_end)
    if WINDOW:
        low = tl.maximum(tl.minimum(first, history_end) - window, 0)
        full_low = tl.maximum(tl.minimum(last, history_end) - window, 0)
        if not CAUSAL:
            high = tl.minimum(last + window + 1, history_end)
            full_high = tl.minimum(first + window + 1, history_end)
    if CONTEXTS != "none":
        has_contexts = first < contexts
        low = tl.where(has_contexts, 0, low)
        high = tl.where(has_contexts, history_end if CONTEXTS == "history" else tl.maximum(high, contexts), high)
        full_high = tl.where(has_contexts, 0, full_high)
    full_low = low + _num_blocks(full_low - low, BLOCK) * BLOCK  # The masked tiles before it cover these too.
    num_full = tl.maximum(full_high - full_low, 0) // BLOCK
    full_low = tl.where(num_full > 0, full_low, low)
    target_low = 0
    target_high = 0
    if TARGETS:
        target_low = history_end + (tl.maximum(first - history_end, 0) // group_size) * group_size
        target_high = last + 1
        if not CAUSAL:
            last_group = tl.maximum(last - history_end, 0) // group_size
            target_high = tl.minimum(history_end + (last_group + 1) * group_size, length)
        target_high = tl.where(last >= history_end, target_high, target_low)
    full_end = full_low + num_full * BLOCK
    return full_low, num_full, 0, tl.minimum(contexts, low), low, full_low, full_end, high, target_low, target_high


@_jit
def _align_spans(full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: tl.constexpr):
    """The spans of ``_key_spans`` with tiles that start at multiples of BLOCK; none is visited twice."""
    full_end = full + num_full * BLOCK
    a_end = _num_blocks(a_end, BLOCK) * BLOCK
    b = tl.maximum(b // BLOCK * BLOCK, a_end)
    full = _num_blocks(full, BLOCK) * BLOCK
    num_full = tl.maximum(full_end - full, 0) // BLOCK
    full = tl.where(num_full > 0, full, b)
    c_end = _num_blocks(c_end, BLOCK) * BLOCK
    d = tl.maximum(d // BLOCK * BLOCK, tl.maximum(a_end, c_end))
    return full, num_full, a, a_end, b, full, full + num_full * BLOCK, c_end, d, d_end


@_jit
def _row_spans(
    first, last, length, history_end, contexts, window, group_size,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Who sees keys first..last: (start, number of blocks) that see them all, then four (start, end) for the mask."""
    low = 0
    full_low = contexts
    high = length
    full_high = length
    if CAUSAL:
        low = first
        full_low = tl.maximum(last, contexts)
    if WINDOW:
        # Targets stand at the end of the history: keys that are seen from there are seen by them all.
        is_near = (first < contexts) | (last + window >= history_end)
        high = tl.where(is_near, high, tl.minimum(last + window + 1, length))
        nearest = tl.maximum(first, contexts)
        is_near = (last < contexts) | (nearest + window >= history_end)
        full_high = tl.where(is_near, full_high, tl.minimum(nearest + window + 1, length))
        if not CAUSAL:
            low = tl.where(first < contexts, 0, tl.maximum(first - window, 0))
            full_low = tl.where(last < contexts, full_low, tl.maximum(full_low, last - window))
    context_high = 0
    if CONTEXTS != "none":
        low = tl.where(first < contexts, 0, low)
    if CONTEXTS == "prefix":
        low = tl.where(first < contexts, low, tl.maximum(low, contexts))
    if CONTEXTS == "history":
        context_high = tl.minimum(contexts, low)
    if TARGETS:
        full_high = tl.where(last < history_end, full_high, 0)
        is_target = first >= history_end
        last_group = tl.maximum(last - history_end, 0) // group_size
        high = tl.where(is_target, tl.minimum(history_end + (last_group + 1) * group_size, length), high)
        if not CAUSAL:
            own_group = history_end + (tl.maximum(first - history_end, 0) // group_size) * group_size
            low = tl.where(is_target, own_group, low)
        context_high = tl.where(is_target, 0, context_high)
    full_low = low + _num_blocks(full_low - low, BLOCK) * BLOCK  # The masked tiles before it cover these too.
    num_full = tl.maximum(full_high - full_low, 0) // BLOCK
    full_low = tl.where(num_full > 0, full_low, low)
    return full_low, num_full, 0, context_high, low, full_low, full_low + num_full * BLOCK, high, 0, 0


@_jit
def _masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: tl.constexpr):
    """(start, end of its span) of the i-th tile of four spans."""
    start = a + i * BLOCK
    end = a_end
    i -= _num_blocks(a_end - a, BLOCK)
    start, end = tl.where(i >= 0, b + i * BLOCK, start), tl.where(i >= 0, b_end, end)
    i -= _num_blocks(b_end - b, BLOCK)
    start, end = tl.where(i >= 0, c + i * BLOCK, start), tl.where(i >= 0, c_end, end)
    i -= _num_blocks(c_end - c, BLOCK)
    start, end = tl.where(i >= 0, d + i * BLOCK, start), tl.where(i >= 0, d_end, end)
    return start, end


@_jit
def _num_masked(a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: tl.constexpr):
    history = _num_blocks(b_end - b, BLOCK) + _num_blocks(c_end - c, BLOCK)
    return _num_blocks(a_end - a, BLOCK) + history + _num_blocks(d_end - d, BLOCK)


@_jit
def _load(base, first, end, stride, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr):
    """(ROWS, BLOCK) from row ``first`` on; zeros from row ``end`` on (if BOUNDED) and beyond DIM."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if BOUNDED and DIM < BLOCK:
        return tl.load(pointers, mask=(first + rows < end)[:, None] & (dims < DIM)[None, :], other=0.0)
    if BOUNDED:
        return tl.load(pointers, mask=(first + rows < end)[:, None], other=0.0)
    if DIM < BLOCK:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@_jit
def _load_full(
    descriptor, base, begin, first, head, stride, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """(ROWS, BLOCK) from row ``first`` of the user on, all of them its own; by TMA if there is a descriptor."""
    if descriptor is not None:
        return descriptor.load([(begin + first).to(tl.int32), head * DIM])
    return _load(base, first, first, stride, ROWS, DIM, BLOCK, False)


@_jit
def _store(values, base, first, end, stride, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    mask = (first + rows < end)[:, None]
    if DIM < BLOCK:
        mask = mask & (dims < DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@_jit
def _tanh_plus_one(h, TANH: tl.constexpr):
    if TANH == "exact":
        return 2.0 / (1.0 + tl.exp(-2.0 * h))
    if TANH == "approx":
        return 1.0 + tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1
        )
    # Two scores an instruction, at half precision's 11 bits, which are those of tanh.approx.f32 too.
    return 1.0 + tl.inline_asm_elementwise(
        """{
        .reg .b32 pair; .reg .b16 low, high;
        cvt.rn.f16x2.f32 pair, $3, $2;
        tanh.approx.f16x2 pair, pair;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        "=f,=f,f,f",
        [h],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@_jit
def _load_times(times, first, end, SIZE: tl.constexpr):
    places = first + tl.arange(0, SIZE)
    return tl.load(times + places, mask=places < end, other=0)


@_jit
def _bias_indices(rows, keys, row_times, key_times, history_end, num_positions, num_buckets):
    """Position and time weight of every pair, as :mod:`genrec.hstu.attention.bias` has them."""
    place = tl.minimum(keys, history_end) - tl.minimum(rows, history_end) + num_positions // 2
    gap = tl.maximum(tl.abs(row_times - key_times), 1).to(tl.float64)
    bucket = (tl.log(gap) / _BUCKET_WIDTH).to(tl.int32)
    return tl.minimum(tl.maximum(place, 0), num_positions - 1), tl.minimum(bucket, num_buckets - 1)


@_jit
def _half_bias(place, bucket, position_weight, time_weight):
    return 0.5 * (tl.load(position_weight + place).to(tl.float32) + tl.load(time_weight + bucket).to(tl.float32))


@_jit
def _first_slot(user, schedule, num_users):
    """The slot of a user's first 128 tokens."""
    return tl.load(schedule + 2 * (num_users + 1) + user)


@_jit
def _descales(descales, user, head, num_heads, begin, first_slot, first, end, SIZE: tl.constexpr, SCALES: tl.constexpr):
    """Of rows from ``first`` on: (SIZE,), or one number for all."""
    if SCALES == "user":
        return tl.load(descales + user * num_heads + head)
    else:
        rows = first + tl.arange(0, SIZE)
        index = first_slot + rows // _FP8_BLOCK if SCALES == "block" else begin + rows
        return tl.load(descales + index * num_heads + head, mask=rows < end, other=1.0)


@_jit
def _outer(a, b, SCALES: tl.constexpr):
    """What each score of a tile is multiplied with, from descales of its two sides."""
    if SCALES == "user":
        return a * b
    else:
        return a[:, None] * b[None, :]


@_jit
def _load_fp8(
    values, descales, user, head, num_heads, begin, first_slot, first, end,
    SIZE: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Rows from ``first`` on of (T, H, DIM), and their descales."""
    values += (begin * num_heads + head) * DIM
    tile = _load(values, first, end, num_heads * DIM, SIZE, DIM, DIM, True)
    return tile, _descales(descales, user, head, num_heads, begin, first_slot, first, end, SIZE, SCALES)


@_jit
def _add_fp8_values(
    weights, output, tiles, tile_descales, first_slot, head, num_heads, start,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """output + P v, of weights (ROWS, KEYS) times their scale; but for v's descale where the whole user has one."""
    block = (first_slot + start // _FP8_BLOCK) * num_heads + head
    within = tl.multiple_of(start % _FP8_BLOCK, KEYS)  # The compiler can't know, and would load byte by byte.
    places = tl.arange(0, DIM)[:, None] * _FP8_BLOCK + within + tl.arange(0, KEYS)[None, :]
    value = tl.trans(tl.load(tiles + tl.cast(block, tl.int64) * (DIM * _FP8_BLOCK) + places))
    # Keys in the tiles' order, which moves nothing between threads where this is tensor cores' register layout.
    weights = tl.reshape(weights.to(tl.float8e4nv), (ROWS, KEYS // 16, 2, 4, 2))
    weights = tl.reshape(tl.permute(weights, (0, 1, 3, 2, 4)), (ROWS, KEYS))
    if SCALES == "user":
        # Hopper's FP8 products keep 14 bits of a sum: each tile's is added in float32.
        return tl.dot(weights, value, output, max_num_imprecise_acc=KEYS)
    if SCALES == "block":
        return output + tl.dot(weights, value) * tl.load(tile_descales + block)
    return output + tl.dot(weights, value) * tl.load(tile_descales + block * DIM + tl.arange(0, DIM))[None, :]


@_jit(do_not_specialize=_PER_BATCH)
def forward_kernel(
    q, k, v, out, key_tiles, value_tiles, q_descale, k_descale, v_descale, weight_scale,
    schedule, offsets, num_contexts, num_targets, position_weight, time_weight, query_times, key_times,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    num_users, num_rows, num_heads, window, group_size, num_positions, num_buckets, half_alpha, inverse_seqlen,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head.

    ``x_row``, ``x_head``: distances between rows and between heads of x. ``x_tiles``: its TMA descriptor or None. In
    FP8 v is its tiles, and the four before ``schedule`` are not None.
    """
    head = tl.program_id(0) % num_heads
    slot = tl.program_id(0) // num_heads
    user, begin, length, tile = _find_tile(slot, schedule, offsets, num_users, num_rows, ROWS)
    num_tiles = _num_blocks(length, ROWS)
    if tile >= num_tiles:
        return
    first = (num_tiles - 1 - tile) * ROWS  # A user's last rows have the most keys: they start first.
    out += begin * out_row + head * out_head
    output = tl.full((ROWS, V_BLOCK), 0.0, tl.float32)
    if user == num_users:
        _store(output, out, first, length, out_row, ROWS, V_DIM, V_BLOCK)
        return
    q += begin * q_row + head * q_head
    k += begin * k_row + head * k_head
    if SCALES == "none":
        v += begin * v_row + head * v_head
    history_end, contexts = _user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = tl.minimum(first + ROWS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    query = _load(q, first, length, q_row, ROWS, QK_DIM, QK_BLOCK, True)
    rows = first + tl.arange(0, ROWS)[:, None]
    if BIAS:
        key_times += begin
        row_times = _load_times(query_times + begin, first, length, ROWS)[:, None]
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS
        )
        first_slot = _first_slot(user, schedule, num_users)
        factor = tl.load(weight_scale + user * num_heads + head)
        row_scale = half_alpha * _descales(
            q_descale, user, head, num_heads, begin, first_slot, first, length, ROWS, SCALES
        )
    for i in range(_num_masked(a, a_end, b, b_end, c, c_end, d, d_end, KEYS)):
        start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        if SCALES != "none":
            end = length
            key_scale = _descales(k_descale, user, head, num_heads, begin, first_slot, start, end, KEYS, SCALES)
            score_scale = _outer(row_scale, key_scale, SCALES)
        else:
            score_scale = half_alpha
        key = _load(k, start, end, k_row, KEYS, QK_DIM, QK_BLOCK, True)
        half = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
        keys = start + tl.arange(0, KEYS)[None, :]
        if BIAS:
            times = _load_times(key_times, start, end, KEYS)[None, :]
            place, bucket = _bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half += _half_bias(place, bucket, position_weight, time_weight)
        seen = _visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        weights = tl.where(seen & (keys < end), half * _tanh_plus_one(half, TANH), 0.0)
        if SCALES != "none":
            output = _add_fp8_values(
                weights * factor, output, v, v_descale, first_slot, head, num_heads, start, ROWS, KEYS, V_BLOCK, SCALES
            )
        else:
            value = _load(v, start, end, v_row, KEYS, V_DIM, V_BLOCK, True)
            output = tl.dot(weights.to(value.dtype), value, output, input_precision=PRECISION)
    for i in range(num_full):
        start = full + i * KEYS
        if SCALES != "none":
            key_scale = _descales(k_descale, user, head, num_heads, begin, first_slot, start, length, KEYS, SCALES)
            score_scale = _outer(row_scale, key_scale, SCALES)
        else:
            score_scale = half_alpha
        key = _load_full(key_tiles, k, begin, start, head, k_row, KEYS, QK_DIM, QK_BLOCK)
        half = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
        if BIAS:
            keys = start + tl.arange(0, KEYS)[None, :]
            times = _load_times(key_times, start, length, KEYS)[None, :]
            place, bucket = _bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half += _half_bias(place, bucket, position_weight, time_weight)
        weights = half * _tanh_plus_one(half, TANH)
        if SCALES != "none":
            output = _add_fp8_values(
                weights * factor, output, v, v_descale, first_slot, head, num_heads, start, ROWS, KEYS, V_BLOCK, SCALES
            )
        else:
            value = _load_full(value_tiles, v, begin, start, head, v_row, KEYS, V_DIM, V_BLOCK)
            output = tl.dot(weights.to(value.dtype), value, output, input_precision=PRECISION)
    if SCALES != "none":
        inverse_seqlen /= factor
    if SCALES == "user":
        inverse_seqlen *= tl.load(v_descale + user * num_heads + head)
    _store(output * inverse_seqlen, out, first, length, out_row, ROWS, V_DIM, V_BLOCK)


@_jit
def _key_grad_step(
    key, value, score_query, score_grad, query, grad, grad_key, grad_value, seen, half_bias, score_scale, grad_scale,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dK and dV, keys down and rows across, so that scores are the first operand of the next products.

    key, value, score_query, score_grad: of S and dP, times score_scale (alpha / 2 with it) and grad_scale (or None).
    """
    half = tl.dot(key, tl.trans(score_query), input_precision=PRECISION) * score_scale
    if half_bias is not None:
        half += half_bias
    tanh_plus_one = _tanh_plus_one(half, TANH)
    weights = half * tanh_plus_one
    grad_weights = tl.dot(value, tl.trans(score_grad), input_precision=PRECISION)
    if grad_scale is not None:
        grad_weights *= grad_scale
    grad_scores = grad_weights * (tanh_plus_one * (1.0 + half * (2.0 - tanh_plus_one)))
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
        grad_scores = tl.where(seen, grad_scores, 0.0)
    grad_value = tl.dot(weights.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
    grad_scores = grad_scores.to(query.dtype)
    grad_key = tl.dot(grad_scores, query, grad_key, input_precision=PRECISION)
    return grad_key, grad_value, grad_scores


@_jit
def _add_query_grad(
    grad_scores, key, begin, start, end, head, dq_sum, dq_sum_tiles, dq_sum_row,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a tile of keys gives rows start..end to the sums that all tiles share."""
    share = tl.dot(tl.trans(grad_scores), key, input_precision=PRECISION)
    rows = start + tl.arange(0, ROWS)[:, None]
    # A whole tile is added, beyond the user's end too: whatever its keys hold, nothing may reach the next user.
    share = tl.where(rows < end, share, 0.0)
    if dq_sum_tiles is not None:
        dq_sum_tiles.atomic_add([(begin + start).to(tl.int32), head * DIM], share)
    else:
        dims = tl.arange(0, BLOCK)[None, :]
        pointers = dq_sum + (begin + rows) * dq_sum_row + head * DIM + dims
        tl.atomic_add(pointers, share, mask=(rows < end) & (dims < DIM), sem="relaxed")


@_jit(do_not_specialize=_PER_BATCH)
def key_grad_kernel(
    q, k, v, grad_out, q_fp8, k_fp8, v_fp8, grad_fp8, q_descale, k_descale, v_descale, grad_descale,
    dk, dv, query_tiles, grad_tiles, dq_sum, dq_sum_tiles, dq_sum_row,
    schedule, offsets, num_contexts, num_targets, position_weight, time_weight, query_times, key_times,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, grad_row,
    num_users, num_rows, num_heads, window, group_size, num_positions, num_buckets, half_alpha, inverse_seqlen,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, over all rows that see them.

    Given ``dq_sum``, float32, also adds what they give to the gradients of those rows' queries, without their factor.
    ``x_fp8``, ``x_descale``: None but in FP8, where S and dP are made of them.
    """
    head = tl.program_id(0) % num_heads
    slot = tl.program_id(0) // num_heads
    user, begin, length, tile = _find_tile(slot, schedule, offsets, num_users, num_rows, KEYS)
    first = tile * KEYS  # A user's first keys have the most rows.
    if first >= length:
        return
    dk += begin * grad_row + head * QK_DIM
    dv += begin * grad_row + head * V_DIM
    grad_key = tl.full((KEYS, QK_BLOCK), 0.0, tl.float32)
    grad_value = tl.full((KEYS, V_BLOCK), 0.0, tl.float32)
    if user == num_users:
        _store(grad_key, dk, first, length, grad_row, KEYS, QK_DIM, QK_BLOCK)
        _store(grad_value, dv, first, length, grad_row, KEYS, V_DIM, V_BLOCK)
        return
    q += begin * q_row + head * q_head
    k += begin * k_row + head * k_head
    v += begin * v_row + head * v_head
    grad_out += begin * out_row + head * out_head
    history_end, contexts = _user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = tl.minimum(first + KEYS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _row_spans(
        first, last, length, history_end, contexts, window, group_size, ROWS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES == "none" or dq_sum is not None:
        key = _load(k, first, length, k_row, KEYS, QK_DIM, QK_BLOCK, True)
    if SCALES == "none":
        score_key = key
        score_value = _load(v, first, length, v_row, KEYS, V_DIM, V_BLOCK, True)
    else:
        first_slot = _first_slot(user, schedule, num_users)
        score_key, key_scale = _load_fp8(
            k_fp8, k_descale, user, head, num_heads, begin, first_slot, first, length, KEYS, QK_BLOCK, SCALES
        )
        score_value, value_scale = _load_fp8(
            v_fp8, v_descale, user, head, num_heads, begin, first_slot, first, length, KEYS, V_BLOCK, SCALES
        )
        key_scale *= half_alpha
    keys = first + tl.arange(0, KEYS)[:, None]
    if BIAS:
        query_times += begin
        times = _load_times(key_times + begin, first, length, KEYS)[:, None]
    for i in range(_num_masked(a, a_end, b, b_end, c, c_end, d, d_end, ROWS)):
        start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, ROWS)
        query = _load(q, start, end, q_row, ROWS, QK_DIM, QK_BLOCK, True)
        grad = _load(grad_out, start, end, out_row, ROWS, V_DIM, V_BLOCK, True)
        score_query, score_grad, score_scale, grad_scale = query, grad, half_alpha, None
        if SCALES != "none":
            score_query, query_scale = _load_fp8(
                q_fp8, q_descale, user, head, num_heads, begin, first_slot, start, end, ROWS, QK_BLOCK, SCALES
            )
            score_grad, row_scale = _load_fp8(
                grad_fp8, grad_descale, user, head, num_heads, begin, first_slot, start, end, ROWS, V_BLOCK, SCALES
            )
            score_scale = _outer(key_scale, query_scale, SCALES)
            grad_scale = _outer(value_scale, row_scale, SCALES)
        rows = start + tl.arange(0, ROWS)[None, :]
        seen = _visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        seen = seen & (rows < end)
        if BIAS:
            row_times = _load_times(query_times, start, end, ROWS)[None, :]
            place, bucket = _bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = _half_bias(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_key, grad_value, grad_scores = _key_grad_step(
            score_key, score_value, score_query, score_grad, query, grad, grad_key, grad_value, seen, half_bias,
            score_scale, grad_scale, TANH, PRECISION,
        )  # fmt: skip
        if dq_sum is not None:
            _add_query_grad(
                grad_scores, key, begin, start, end, head, dq_sum, dq_sum_tiles, dq_sum_row,
                ROWS, QK_DIM, QK_BLOCK, PRECISION,
            )  # fmt: skip
    for i in range(num_full):
        start = full + i * ROWS
        query = _load_full(query_tiles, q, begin, start, head, q_row, ROWS, QK_DIM, QK_BLOCK)
        grad = _load_full(grad_tiles, grad_out, begin, start, head, out_row, ROWS, V_DIM, V_BLOCK)
        score_query, score_grad, score_scale, grad_scale = query, grad, half_alpha, None
        if SCALES != "none":
            score_query, query_scale = _load_fp8(
                q_fp8, q_descale, user, head, num_heads, begin, first_slot, start, length, ROWS, QK_BLOCK, SCALES
            )
            score_grad, row_scale = _load_fp8(
                grad_fp8, grad_descale, user, head, num_heads, begin, first_slot, start, length, ROWS, V_BLOCK, SCALES
            )
            score_scale = _outer(key_scale, query_scale, SCALES)
            grad_scale = _outer(value_scale, row_scale, SCALES)
        if BIAS:
            rows = start + tl.arange(0, ROWS)[None, :]
            row_times = _load_times(query_times, start, length, ROWS)[None, :]
            place, bucket = _bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = _half_bias(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_key, grad_value, grad_scores = _key_grad_step(
            score_key, score_value, score_query, score_grad, query, grad, grad_key, grad_value, None, half_bias,
            score_scale, grad_scale, TANH, PRECISION,
        )  # fmt: skip
        if dq_sum is not None:
            _add_query_grad(
                grad_scores, key, begin, start, start + ROWS, head, dq_sum, dq_sum_tiles, dq_sum_row,
                ROWS, QK_DIM, QK_BLOCK, PRECISION,
            )  # fmt: skip
    _store(grad_key * (half_alpha * inverse_seqlen), dk, first, length, grad_row, KEYS, QK_DIM, QK_BLOCK)
    _store(grad_value * inverse_seqlen, dv, first, length, grad_row, KEYS, V_DIM, V_BLOCK)


@_jit
def _query_grad_step(
    query, grad, score_key, value, key, grad_query, seen, half_bias, score_scale, grad_scale,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dQ: with its sum so far, and the gradient of the scores but for the factors that all share.

    query, grad, score_key, value: of S and dP, times score_scale (alpha / 2 with it) and grad_scale (or None).
    """
    half = tl.dot(query, tl.trans(score_key), input_precision=PRECISION) * score_scale
    if half_bias is not None:
        half += half_bias
    tanh_plus_one = _tanh_plus_one(half, TANH)
    grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    if grad_scale is not None:
        grad_weights *= grad_scale
    grad_scores = grad_weights * (tanh_plus_one * (1.0 + half * (2.0 - tanh_plus_one)))
    if seen is not None:
        grad_scores = tl.where(seen, grad_scores, 0.0)
    return tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision=PRECISION), grad_scores


@_jit(do_not_specialize=_PER_BATCH)
def query_grad_kernel(
    q, k, v, grad_out, q_fp8, k_fp8, v_fp8, grad_fp8, q_descale, k_descale, v_descale, grad_descale,
    dq, position_grad, time_grad, key_tiles, value_tiles,
    schedule, offsets, num_contexts, num_targets, position_weight, time_weight, query_times, key_times,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, grad_row,
    num_users, num_rows, num_heads, window, group_size, num_positions, num_buckets, half_alpha, inverse_seqlen,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of rows' queries, over all keys that they see."""
    head = tl.program_id(0) % num_heads
    slot = tl.program_id(0) // num_heads
    user, begin, length, tile = _find_tile(slot, schedule, offsets, num_users, num_rows, ROWS)
    num_tiles = _num_blocks(length, ROWS)
    if tile >= num_tiles:
        return
    first = (num_tiles - 1 - tile) * ROWS
    dq += begin * grad_row + head * QK_DIM
    grad_query = tl.full((ROWS, QK_BLOCK), 0.0, tl.float32)
    if user == num_users:
        _store(grad_query, dq, first, length, grad_row, ROWS, QK_DIM, QK_BLOCK)
        return
    q += begin * q_row + head * q_head
    k += begin * k_row + head * k_head
    v += begin * v_row + head * v_head
    grad_out += begin * out_row + head * out_head
    history_end, contexts = _user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = tl.minimum(first + ROWS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES == "none":
        query = _load(q, first, length, q_row, ROWS, QK_DIM, QK_BLOCK, True)
        grad = _load(grad_out, first, length, out_row, ROWS, V_DIM, V_BLOCK, True)
    else:
        first_slot = _first_slot(user, schedule, num_users)
        query, query_scale = _load_fp8(
            q_fp8, q_descale, user, head, num_heads, begin, first_slot, first, length, ROWS, QK_BLOCK, SCALES
        )
        grad, row_scale = _load_fp8(
            grad_fp8, grad_descale, user, head, num_heads, begin, first_slot, first, length, ROWS, V_BLOCK, SCALES
        )
        query_scale *= half_alpha
    rows = first + tl.arange(0, ROWS)[:, None]
    if BIAS:
        key_times += begin
        row_times = _load_times(query_times + begin, first, length, ROWS)[:, None]
        position_grad += (slot % SUMS) * num_positions
        time_grad += (slot % SUMS) * num_buckets
    for i in range(_num_masked(a, a_end, b, b_end, c, c_end, d, d_end, KEYS)):
        start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        key = _load(k, start, end, k_row, KEYS, QK_DIM, QK_BLOCK, True)
        if SCALES == "none":
            score_key, score_scale, grad_scale = key, half_alpha, None
            value = _load(v, start, end, v_row, KEYS, V_DIM, V_BLOCK, True)
        else:
            score_key, key_scale = _load_fp8(
                k_fp8, k_descale, user, head, num_heads, begin, first_slot, start, end, KEYS, QK_BLOCK, SCALES
            )
            value, value_scale = _load_fp8(
                v_fp8, v_descale, user, head, num_heads, begin, first_slot, start, end, KEYS, V_BLOCK, SCALES
            )
            score_scale = _outer(query_scale, key_scale, SCALES)
            grad_scale = _outer(row_scale, value_scale, SCALES)
        keys = start + tl.arange(0, KEYS)[None, :]
        seen = _visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        seen = seen & (keys < end)
        if BIAS:
            times = _load_times(key_times, start, end, KEYS)[None, :]
            place, bucket = _bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = _half_bias(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_query, grad_scores = _query_grad_step(
            query, grad, score_key, value, key, grad_query, seen, half_bias, score_scale, grad_scale, TANH, PRECISION
        )
        if BIAS:
            grad_scores *= 0.5 * inverse_seqlen
            tl.atomic_add(position_grad + place, grad_scores, mask=seen & (rows < length), sem="relaxed")
            tl.atomic_add(time_grad + bucket, grad_scores, mask=seen & (rows < length), sem="relaxed")
    for i in range(num_full):
        start = full + i * KEYS
        key = _load_full(key_tiles, k, begin, start, head, k_row, KEYS, QK_DIM, QK_BLOCK)
        if SCALES == "none":
            score_key, score_scale, grad_scale = key, half_alpha, None
            value = _load_full(value_tiles, v, begin, start, head, v_row, KEYS, V_DIM, V_BLOCK)
        else:
            score_key, key_scale = _load_fp8(
                k_fp8, k_descale, user, head, num_heads, begin, first_slot, start, length, KEYS, QK_BLOCK, SCALES
            )
            value, value_scale = _load_fp8(
                v_fp8, v_descale, user, head, num_heads, begin, first_slot, start, length, KEYS, V_BLOCK, SCALES
            )
            score_scale = _outer(query_scale, key_scale, SCALES)
            grad_scale = _outer(row_scale, value_scale, SCALES)
        if BIAS:
            keys = start + tl.arange(0, KEYS)[None, :]
            times = _load_times(key_times, start, length, KEYS)[None, :]
            place, bucket = _bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = _half_bias(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_query, grad_scores = _query_grad_step(
            query, grad, score_key, value, key, grad_query, None, half_bias, score_scale, grad_scale, TANH, PRECISION
        )
        if BIAS:
            grad_scores *= 0.5 * inverse_seqlen
            seen = (rows < length) & (keys < length)
            tl.atomic_add(position_grad + place, grad_scores, mask=seen, sem="relaxed")
            tl.atomic_add(time_grad + bucket, grad_scores, mask=seen, sem="relaxed")
    _store(grad_query * (half_alpha * inverse_seqlen), dq, first, length, grad_row, ROWS, QK_DIM, QK_BLOCK)
