# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005, SIM102
"""HSTU attention's forward pass for compute capability 9.0, in bfloat16, float16 and FP8 (e4m3), in Gluon.

A program takes one or two groups of four warps; each has 64 rows of queries, and all share the tiles of keys and values
that TMA brings into rings in shared memory. Between groups, "full" and "empty" barriers say what has arrived and what
may be overwritten; the first group refills the keys, the last one the values. With S(i) = Q K(i)^T and
P(i) = SiLU(S(i)), P(i) V(i) runs on the tensor cores together with S(i + 1), and groups drift apart by themselves,
so that one's products run while another computes SiLU.

Tiles of keys start at multiples of ``KEYS`` from the user's first token. Those that all rows see entirely take no mask.
Rows of the next user may be loaded with the last tile: scores of those keys are masked, and their values, which a zero
weight would not hide if they are NaN, are overwritten with zeros in shared memory.

FP8: half = (alpha / 2) q_scale k_scale (q . k), and the weights, times a power of two that keeps them in range, are
rounded to e4m3 in registers. The values lie transposed in the order in which the scores' registers hold their keys, so
that no weight moves between threads. Scales are one a (user, head) ("user"), one a block of 128 tokens ("block"), or
one a row of q and k and one a block and column of v ("row").
"""

from __future__ import annotations

from genrec.hstu.attention.hopper_scores import as_operand
from genrec.hstu.attention.hopper_tiles import find_rank
from genrec.hstu.attention.triton_jit import (
    fence_async_shared,
    gl,
    gluon_jit,
    gluon_kernel,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from genrec.hstu.attention.triton_schedule import FP8_BLOCK, count_blocks, load_ranked
from genrec.hstu.attention.triton_spans import count_masked, key_spans, masked_tile, user_parts, visible


@gluon_jit
def _find_tile(slot, schedule, num_users, ROWS: gl.constexpr):
    """As the Triton kernels': (user, first row, length, tile), and the slot of the user's first block of 128 tokens."""
    rank = find_rank(slot, schedule, num_users, ROWS)
    user, tokens_before, begin, length = load_ranked(rank, schedule, num_users)
    return user, begin.to(gl.int32), length, slot - tokens_before // ROWS - rank, tokens_before // FP8_BLOCK + rank


@gluon_jit
def _key_tiles(
    first, last, length, history_end, contexts, window, group_size,
    KEYS: gl.constexpr, CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """(how many tiles of keys, the first so many with a mask, first tile without, then the masked spans in tiles)."""
    full, _, _, a_end, low, _, full_end, high, d, d_end = key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    # Spans begin and end anywhere; rounded to tiles, none may take what another has.
    a_end = count_blocks(a_end, KEYS)
    b = gl.maximum(low // KEYS, a_end)
    full = count_blocks(full, KEYS)
    full_end = gl.maximum(full_end // KEYS, full)
    c_end = gl.maximum(count_blocks(high, KEYS), full_end)
    has_targets = d_end > d
    d = gl.maximum(d // KEYS, c_end)
    d_end = gl.where(has_targets, count_blocks(d_end, KEYS), d)
    num_masked = count_masked(0, a_end, b, full, full_end, c_end, d, d_end, 1)
    if full_end == full:
        num_masked = gl.maximum(num_masked, 1)  # The loop has one tile at least, be there nothing to see.
    return num_masked + full_end - full, num_masked, full, a_end, b, full_end, c_end, d, d_end


@gluon_jit
def _first_key(i, tiles, KEYS: gl.constexpr, FULL: gl.constexpr):
    """The first key of the i-th tile; FULL says that it is known to take no mask."""
    _, num_masked, full, a_end, b, c, c_end, d, d_end = tiles
    tile = full + i - num_masked
    if not FULL:
        masked, _ = masked_tile(i, 0, a_end, b, full, c, c_end, d, d_end, 1)
        tile = gl.where(i < num_masked, masked, tile)
    return tile * KEYS


@gluon_jit
def _load_keys(
    i, tiles, descriptor, ring, full, begin, column, KEYS: gl.constexpr, STAGES: gl.constexpr, FULL: gl.constexpr
):
    """Start loading the i-th tile of keys, or of values that lie like keys."""
    is_there = i < tiles[0]
    mbarrier.expect(full.index(i % STAGES), descriptor.block_type.nbytes, pred=is_there)
    place = [begin + _first_key(i, tiles, KEYS, FULL), column]
    tma.async_copy_global_to_shared(descriptor, place, full.index(i % STAGES), ring.index(i % STAGES), pred=is_there)


@gluon_jit
def _load_values(
    i, tiles, descriptor, ring, full, begin, slot, head, num_heads,
    DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Start loading the i-th tile of values."""
    if SCALES == "none":
        _load_keys(i, tiles, descriptor, ring, full, begin, head * DIM, KEYS, STAGES, FULL)
    else:
        is_there = i < tiles[0]
        key = _first_key(i, tiles, KEYS, FULL)
        place = [((slot + key // 128) * num_heads + head) * DIM, key % 128]
        mbarrier.expect(full.index(i % STAGES), descriptor.block_type.nbytes, pred=is_there)
        tma.async_copy_global_to_shared(
            descriptor, place, full.index(i % STAGES), ring.index(i % STAGES), pred=is_there
        )


@gluon_jit
def _clear_rows(tile, end, KEYS: gl.constexpr, DIM: gl.constexpr):
    """Zero the rows from ``end`` on. All groups do so, each before its own product."""
    ROWS: gl.constexpr = 8 if DIM > 64 else 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    for i in gl.static_range(KEYS // ROWS):
        part = tile.slice(i * ROWS, ROWS)
        part.store(gl.where(i * ROWS + rows < end, part.load(layout), 0.0))
    fence_async_shared()


@gluon_jit
def _weights(
    scores, row_scale, key_scale, weight_scale, key, rows, mask,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """SiLU of twice the scaled scores, where they are seen; for FP8 times ``weight_scale``."""
    if SCALES == "block":
        row_scale = row_scale * key_scale
    half = scores * row_scale
    if SCALES == "row":
        half = half * key_scale
    tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1)
    if SCALES != "none":
        half = half * weight_scale
    weights = half * tanh + half
    if MASKED:
        length, history_end, contexts, window, group_size = mask
        keys = key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
        seen = visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        if not CAUSAL:  # else keys beyond the end are seen by rows beyond the end alone, which are not stored
            seen = seen & (keys < length)
        weights = gl.where(seen, weights, 0.0)
    return weights


@gluon_jit
def _wait_full(i, full, STAGES: gl.constexpr):
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)


@gluon_jit
def _start_scores(i, query, ring, full, zeros, STAGES: gl.constexpr):
    _wait_full(i, full, STAGES)
    keys = ring.index(i % STAGES).permute((1, 0))
    return warpgroup_mma(query, keys, zeros, use_acc=False, is_async=True)


@gluon_jit
def _start_output(
    i, weights, output, ring, full, end,
    DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Start adding a tile's product to the output, but with block scales, start it alone."""
    _wait_full(i, full, STAGES)
    values = ring.index(i % STAGES)
    if SCALES == "none":
        if MASKED:
            if end < KEYS:
                _clear_rows(values, end, KEYS, DIM)
    else:
        values = values.permute((1, 0))
    ADD: gl.constexpr = SCALES == "none" or SCALES == "user"
    return warpgroup_mma(weights, values, output, use_acc=ADD, is_async=True)


@gluon_jit
def _finish_output(
    product, weights, total, v_descale, slot, head, num_heads, key,
    DIM: gl.constexpr, SCALES: gl.constexpr, IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """Wait for the product with the last tile's values, which began ``key`` tokens after the user's start."""
    if SCALES == "none":
        product, weights = warpgroup_mma_wait(IN_FLIGHT, deps=[product, weights])
    else:
        product = warpgroup_mma_wait(IN_FLIGHT, deps=[product])
    if SCALES == "block":
        total += product * gl.load(v_descale + (slot + key // 128) * num_heads + head)
    if SCALES == "row":
        columns = gl.arange(0, DIM, gl.SliceLayout(0, product.type.layout))[None, :]
        total += product * gl.load(v_descale + ((slot + key // 128) * num_heads + head) * DIM + columns)
    return product, weights, total


@gluon_jit
def _row_scale(q_descale, half_alpha, begin, length, user, slot, head, num_heads, first, rows, SCALES: gl.constexpr):
    """What a group's scores are multiplied by: a number, or a column of them."""
    scale = half_alpha
    if SCALES == "user":
        scale = half_alpha * gl.load(q_descale + user * num_heads + head)
    if SCALES == "block":
        scale = half_alpha * gl.load(q_descale + (slot + first // 128) * num_heads + head)
    if SCALES == "row":
        scale = half_alpha * gl.load(q_descale + (begin + rows) * num_heads + head, mask=rows < length, other=0.0)
    return scale


@gluon_jit
def _key_scale(
    k_descale, begin, length, slot, head, num_heads, key,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """What undoes the scale of a tile of keys: a number, or a row of them."""
    scale = 1.0
    if SCALES == "block":
        scale = gl.load(k_descale + (slot + key // 128) * num_heads + head)
    if SCALES == "row":
        keys = key + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
        scale = gl.load(k_descale + (begin + keys) * num_heads + head, mask=keys < length, other=0.0)
    return scale


@gluon_jit
def _store(values, out, first, length, out_row, DIM: gl.constexpr):
    rows = first + gl.arange(0, values.shape[0], gl.SliceLayout(1, values.type.layout))[:, None]
    columns = gl.arange(0, DIM, gl.SliceLayout(0, values.type.layout))[None, :]
    gl.store(out + rows.to(gl.int64) * out_row + columns, values.to(out.dtype.element_ty), mask=rows < length)


@gluon_jit
def _attend(
    GROUP: gl.constexpr, k_tiles, v_tiles, queries, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
    out, q_descale, k_descale, v_descale, weight_scales, out_row, user, begin, first, slot, head, num_heads,
    mask, tiles, half_alpha, inverse_seqlen,
    DIM: gl.constexpr, KEYS: gl.constexpr, GROUPS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    EARLY: gl.constexpr, QUERY_IN_REGISTERS: gl.constexpr, SCALES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The output of one warp group's rows."""
    dtype: gl.constexpr = queries.dtype
    INSTRUCTION: gl.constexpr = 256 // dtype.primitive_bitwidth
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, INSTRUCTION])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, INSTRUCTION])
    WIDTH: gl.constexpr = 32 // dtype.primitive_bitwidth
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=WIDTH)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=WIDTH)
    num_tiles, num_masked = tiles[0], tiles[1]
    length = mask[0]
    first += GROUP * 64
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, s_layout))[:, None]
    row_scale = _row_scale(q_descale, half_alpha, begin, length, user, slot, head, num_heads, first, rows, SCALES)
    weight_scale = 1.0
    if SCALES != "none":
        weight_scale = gl.load(weight_scales + user * num_heads + head)
    if SCALES == "user":
        row_scale = row_scale * gl.load(k_descale + user * num_heads + head)
    zeros = gl.zeros([64, KEYS], gl.float32, s_layout)
    total = gl.to_tensor(0.0)
    if SCALES == "block" or SCALES == "row":
        total = gl.zeros([64, DIM], gl.float32, o_layout)
    output = warpgroup_mma_init(gl.zeros([64, DIM], gl.float32, o_layout))
    operand = as_operand(zeros, p_layout, dtype)
    mbarrier.wait(q_full, 0)
    query = queries.index(GROUP)
    if QUERY_IN_REGISTERS:
        query = query.load(q_layout)
    scores = _start_scores(0, query, k_ring, k_full, zeros, K_STAGES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if GROUPS > 1:
        mbarrier.arrive(k_empty.index(0))
    else:
        _load_keys(K_STAGES, tiles, k_tiles, k_ring, k_full, begin, head * DIM, KEYS, K_STAGES, False)
    key = _first_key(0, tiles, KEYS, False)
    num_masked_before_last = gl.minimum(num_masked, num_tiles - 1)
    for part in gl.static_range(2):
        start = 0 if part == 0 else num_masked_before_last
        stop = num_masked_before_last if part == 0 else num_tiles - 1
        for i in range(start, stop):
            last_key = key
            key = _first_key(i, tiles, KEYS, part == 1)
            if EARLY:
                next_scores = _start_scores(i + 1, query, k_ring, k_full, zeros, K_STAGES)
            key_scale = _key_scale(k_descale, begin, length, slot, head, num_heads, key, s_layout, KEYS, SCALES)
            weights = _weights(
                scores, row_scale, key_scale, weight_scale, key, rows, mask,
                CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, part == 0,
            )  # fmt: skip
            output, operand, total = _finish_output(
                output, operand, total, v_descale, slot, head, num_heads, last_key, DIM, SCALES, 1 if EARLY else 0
            )
            if GROUPS > 1:
                mbarrier.arrive(v_empty.index((i + V_STAGES - 1) % V_STAGES), pred=i > 0)
            operand = as_operand(weights, p_layout, dtype)
            if not EARLY:
                next_scores = _start_scores(i + 1, query, k_ring, k_full, zeros, K_STAGES)
            output = _start_output(
                i, operand, output, v_ring, v_full, length - key, DIM, KEYS, V_STAGES, SCALES, part == 0
            )
            scores = warpgroup_mma_wait(1, deps=[next_scores])
            if GROUPS == 1:
                _load_keys(
                    i + 1 + K_STAGES, tiles, k_tiles, k_ring, k_full, begin, head * DIM, KEYS, K_STAGES, part == 1
                )
                if i > 0:
                    _load_values(
                        i - 1 + V_STAGES, tiles, v_tiles, v_ring, v_full, begin, slot, head, num_heads,
                        DIM, KEYS, V_STAGES, SCALES, part == 1,
                    )  # fmt: skip
            else:
                mbarrier.arrive(k_empty.index((i + 1) % K_STAGES))
                # One tile less than could be, so that a group need not wait for another that is a tile behind.
                if GROUP == 0:
                    if i + K_STAGES < num_tiles:
                        mbarrier.wait(k_empty.index(i % K_STAGES), (i // K_STAGES) & 1)
                        _load_keys(
                            i + K_STAGES, tiles, k_tiles, k_ring, k_full, begin, head * DIM, KEYS, K_STAGES, part == 1
                        )
                if GROUP == GROUPS - 1:
                    if (i > 0) & (i - 1 + V_STAGES < num_tiles):
                        mbarrier.wait(v_empty.index((i - 1) % V_STAGES), ((i - 1) // V_STAGES) & 1)
                        _load_values(
                            i - 1 + V_STAGES, tiles, v_tiles, v_ring, v_full, begin, slot, head, num_heads,
                            DIM, KEYS, V_STAGES, SCALES, part == 1,
                        )  # fmt: skip
    last_key = key
    key = _first_key(num_tiles - 1, tiles, KEYS, False)
    key_scale = _key_scale(k_descale, begin, length, slot, head, num_heads, key, s_layout, KEYS, SCALES)
    if num_masked == num_tiles:
        weights = _weights(
            scores, row_scale, key_scale, weight_scale, key, rows, mask,
            CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, True,
        )  # fmt: skip
    else:
        weights = _weights(
            scores, row_scale, key_scale, weight_scale, key, rows, mask,
            CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, False,
        )  # fmt: skip
    output, operand, total = _finish_output(
        output, operand, total, v_descale, slot, head, num_heads, last_key, DIM, SCALES, 0
    )
    operand = as_operand(weights, p_layout, dtype)
    output = _start_output(
        num_tiles - 1, operand, output, v_ring, v_full, length - key, DIM, KEYS, V_STAGES, SCALES, True
    )
    output, operand, total = _finish_output(
        output, operand, total, v_descale, slot, head, num_heads, key, DIM, SCALES, 0
    )
    if SCALES == "block" or SCALES == "row":
        output = total
    if SCALES == "user":
        inverse_seqlen = inverse_seqlen * gl.load(v_descale + user * num_heads + head)
    if SCALES != "none":
        inverse_seqlen = inverse_seqlen / weight_scale
    _store(output * inverse_seqlen, out, first, length, out_row, DIM)


@gluon_kernel
def forward_kernel(
    q_tiles, k_tiles, v_tiles, out, q_descale, k_descale, v_descale, weight_scales,
    schedule, num_contexts, num_targets, out_row, out_head,
    num_users, num_heads, window, group_size, half_alpha, inverse_seqlen,
    DIM: gl.constexpr, KEYS: gl.constexpr, GROUPS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    EARLY: gl.constexpr, QUERY_IN_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr, SCALES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A tile of 64 * GROUPS rows of one head.

    ``x_tiles``: TMA descriptors of q and k, (T, H * d), and of values, like keys or as QuantizedBatch has them.
    """
    ROWS: gl.constexpr = 64 * GROUPS
    head = gl.program_id(0) % num_heads
    user, begin, length, tile, slot = _find_tile(gl.program_id(0) // num_heads, schedule, num_users, ROWS)
    num_row_tiles = count_blocks(length, ROWS)
    if tile >= num_row_tiles:
        return
    first = (num_row_tiles - 1 - tile) * ROWS  # A user's last rows have the most keys: they start first.
    out += begin.to(gl.int64) * out_row + head * out_head
    if user == num_users:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
        _store(gl.zeros([ROWS, DIM], gl.float32, layout), out, first, length, out_row, DIM)
        return
    history_end, contexts = user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = gl.minimum(first + ROWS, length) - 1
    tiles = _key_tiles(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    mask = (length, history_end, contexts, window, group_size)
    queries = gl.allocate_shared_memory(q_tiles.dtype, [GROUPS, 64, DIM], q_tiles.layout)
    k_ring = gl.allocate_shared_memory(k_tiles.dtype, [K_STAGES, KEYS, DIM], k_tiles.layout)
    v_ring = gl.allocate_shared_memory(v_tiles.dtype, [V_STAGES] + v_tiles.block_shape, v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    mbarrier.expect(q_full, GROUPS * q_tiles.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        row = begin + first + group * 64
        tma.async_copy_global_to_shared(q_tiles, [row, head * DIM], q_full, queries.index(group))
    for i in gl.static_range(K_STAGES):
        _load_keys(i, tiles, k_tiles, k_ring, k_full, begin, head * DIM, KEYS, K_STAGES, False)
    for i in gl.static_range(V_STAGES):
        _load_values(
            i, tiles, v_tiles, v_ring, v_full, begin, slot, head, num_heads, DIM, KEYS, V_STAGES, SCALES, False
        )
    if GROUPS == 1:
        _attend(
            0, k_tiles, v_tiles, queries, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
            out, q_descale, k_descale, v_descale, weight_scales, out_row, user, begin, first, slot, head, num_heads,
            mask, tiles, half_alpha, inverse_seqlen,
            DIM, KEYS, GROUPS, K_STAGES, V_STAGES, EARLY, QUERY_IN_REGISTERS, SCALES,
            CAUSAL, CONTEXTS, TARGETS, WINDOW,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    0, k_tiles, v_tiles, queries, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
                    out, q_descale, k_descale, v_descale, weight_scales, out_row,
                    user, begin, first, slot, head, num_heads, mask, tiles, half_alpha, inverse_seqlen,
                    DIM, KEYS, GROUPS, K_STAGES, V_STAGES, EARLY, QUERY_IN_REGISTERS, SCALES,
                    CAUSAL, CONTEXTS, TARGETS, WINDOW,
                )),
                (_attend, (
                    1, k_tiles, v_tiles, queries, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
                    out, q_descale, k_descale, v_descale, weight_scales, out_row,
                    user, begin, first, slot, head, num_heads, mask, tiles, half_alpha, inverse_seqlen,
                    DIM, KEYS, GROUPS, K_STAGES, V_STAGES, EARLY, QUERY_IN_REGISTERS, SCALES,
                    CAUSAL, CONTEXTS, TARGETS, WINDOW,
                )),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
