# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005, SIM102
"""dQ on Hopper GPUs, in Gluon. :mod:`genrec.hstu.attention.hopper_backward` starts it."""

from __future__ import annotations

from genrec.hstu.attention.hopper_scores import (
    as_operand,
    grad_of_scores,
    load_descales,
    load_product_scale,
    load_user_descale,
    scaled,
    silu,
)
from genrec.hstu.attention.hopper_tiles import (
    fetch,
    fetch_columns,
    find_tile,
    hold_operand,
    make_barriers,
    step_operand,
    store,
    tile_span,
    zero_from,
)
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
from genrec.hstu.attention.triton_schedule import FP8_BLOCK, count_blocks, find_first_slot
from genrec.hstu.attention.triton_spans import align_spans, count_masked, key_spans, masked_tile, user_parts, visible


@gluon_jit
def _query_grad_step(
    i, dq, query, grad, k_smem, k8_smem, v_smem, k_full, v_full, k_tiles, k8_tiles, v_tiles, k_row, k_start, v_row,
    column, first_slot, num_tiles, first, q_scale, g_scale, k_descale, v_descale,
    user, head, num_heads, begin, schedule, num_users, length, start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, HELD: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """A tile of keys; its product with dS still runs at the end."""
    slot = i % KEY_STAGES
    value_slot = i % VALUE_STAGES
    mbarrier.wait(k_full.index(slot), (i // KEY_STAGES) & 1)
    if MASKED and SCALES != "user":
        if end < start + KEYS:
            zero_from(k_smem.index(slot), end - start, KEYS, DIM)
    s = warpgroup_mma(
        step_operand(query, i, first, HELD), k8_smem.index(slot).permute((1, 0)),
        gl.zeros([ROWS, KEYS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(v_full.index(value_slot), (i // VALUE_STAGES) & 1)
    dp = warpgroup_mma(
        step_operand(grad, i, first, HELD), v_smem.index(value_slot).permute((1, 0)),
        gl.zeros([ROWS, KEYS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    s, dq = warpgroup_mma_wait(1, deps=[s, dq])
    gl.thread_barrier()
    # All are done with the keys of the tile before, whose place takes the next ones.
    before = (i + KEY_STAGES - 1) % KEY_STAGES
    _fetch_keys(
        k_tiles, k8_tiles, k_full.index(before), k_smem.index(before), k8_smem.index(before), k_row, k_start, column,
        first_slot, head, num_heads, (i > 0) & (i + KEY_STAGES - 1 < num_tiles), DIM, SCALES,
    )  # fmt: skip
    k_scale = load_descales(
        k_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        KEYS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    _, slope = silu(scaled(s, q_scale, k_scale, SCALES))
    if MASKED:
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        keys = start + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
        seen = visible(
            rows[:, None], keys[None, :], history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW
        )
        seen = seen & (keys < end)[None, :]
        slope = gl.where(seen, slope, 0.0)
    v_scale = load_descales(
        v_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        KEYS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    dp = warpgroup_mma_wait(0, deps=[dp])
    gl.thread_barrier()
    fetch(v_tiles, v_full.index(value_slot), v_smem.index(value_slot), v_row, column, i + VALUE_STAGES < num_tiles)
    ds = grad_of_scores(dp, slope, g_scale, v_scale, SCALES, MASKED)
    key = k_smem.index(slot)
    if SCALES == "user":
        key = key.permute((1, 0))
    return warpgroup_mma(as_operand(ds, a_layout, k_smem.dtype), key, dq, is_async=True)


@gluon_jit
def _fetch_keys(
    k_tiles, k8_tiles, ready, k_smem, k8_smem, row, start, column, first_slot, head, num_heads, pred,
    DIM: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    if SCALES != "none":
        mbarrier.expect(ready, k_tiles.block_type.nbytes + k8_tiles.block_type.nbytes, pred=pred)
        tma.async_copy_global_to_shared(k8_tiles, [row, column], ready, k8_smem, pred=pred)
    else:
        mbarrier.expect(ready, k_tiles.block_type.nbytes, pred=pred)
    if SCALES == "user":
        fetch_columns(k_tiles, ready, k_smem, first_slot, start, head, num_heads, pred, DIM, FP8_BLOCK)
    else:
        tma.async_copy_global_to_shared(k_tiles, [row, column], ready, k_smem, pred=pred)


@gluon_kernel
def query_grad_kernel(
    q_tiles, k_tiles, v_tiles, g_tiles, k8_tiles, q_descale, k_descale, v_descale, g_descale,
    score_scales, dq, grad_row, schedule, num_contexts, num_targets,
    num_users, num_heads, window, group_size, half_alpha, inverse_seqlen,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Gradient of a tile of rows' queries.

    In FP8 ``q_tiles``, ``v_tiles``, ``g_tiles`` and ``k8_tiles`` are of the quantized tensors; with "user" scales
    ``k_tiles`` is of blocks of columns.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, KEYS, 16 if SCALES == "none" else 32]
    )
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, DIM, 32 if SCALES == "user" else 16]
    )
    a_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sum_layout, k_width=4 if SCALES == "user" else 2
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    head = gl.program_id(0) % num_heads
    slot = gl.program_id(0) // num_heads
    user, begin, length, tile = find_tile(slot, schedule, num_users, ROWS)
    num_blocks = count_blocks(length, ROWS)
    if tile >= num_blocks:
        return
    first = (num_blocks - 1 - tile) * ROWS
    dq += begin * grad_row + head * DIM
    grad_query = gl.zeros([ROWS, DIM], gl.float32, sum_layout)
    if user == num_users:
        store(grad_query, dq, first, length, grad_row, ROWS, DIM, sum_layout)
        return
    history_end, contexts = user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = gl.minimum(first + ROWS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS
        )
    num_masked = count_masked(a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
    num_tiles = num_masked + num_full
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [1, ROWS, DIM], q_tiles.layout)
    g_smem = gl.allocate_shared_memory(g_tiles.dtype, [1, ROWS, DIM], g_tiles.layout)
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [KEY_STAGES] + k_tiles.block_shape, k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [VALUE_STAGES, KEYS, DIM], v_tiles.layout)
    if SCALES != "none":
        k8_smem = gl.allocate_shared_memory(k8_tiles.dtype, [KEY_STAGES, KEYS, DIM], k8_tiles.layout)
    else:
        k8_smem = k_smem
    qg_full = make_barriers(1, 1)
    k_full = make_barriers(KEY_STAGES, 1)
    v_full = make_barriers(VALUE_STAGES, 1)
    fence_async_shared()
    row = begin.to(gl.int32)
    column = head * DIM
    first_slot = 0
    if SCALES == "user":
        first_slot = find_first_slot(user, schedule, num_users)
    mbarrier.expect(qg_full.index(0), 2 * q_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(q_tiles, [row + first, column], qg_full.index(0), q_smem.index(0))
    tma.async_copy_global_to_shared(g_tiles, [row + first, column], qg_full.index(0), g_smem.index(0))
    for stage in gl.static_range(KEY_STAGES):
        start, _ = tile_span(stage, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        _fetch_keys(
            k_tiles, k8_tiles, k_full.index(stage), k_smem.index(stage), k8_smem.index(stage), row + start, start,
            column, first_slot, head, num_heads, stage < num_tiles, DIM, SCALES,
        )  # fmt: skip
        if stage < VALUE_STAGES:
            fetch(v_tiles, v_full.index(stage), v_smem.index(stage), row + start, column, stage < num_tiles)
    q_scale = half_alpha * load_user_descale(q_descale, k_descale, user, head, num_heads, SCALES)
    q_scale *= load_descales(
        q_descale, user, head, num_heads, begin, schedule, num_users, first, length, ROWS, SCALES, row_layout
    )
    g_scale = load_user_descale(g_descale, v_descale, user, head, num_heads, SCALES)
    g_scale *= load_descales(
        g_descale, user, head, num_heads, begin, schedule, num_users, first, length, ROWS, SCALES, row_layout
    )
    score_scale, query_factor = load_product_scale(score_scales, k_descale, user, head, num_heads, 0.5, SCALES)
    if SCALES == "user":
        g_scale *= score_scale
    mbarrier.wait(qg_full.index(0), 0)
    query = hold_operand(q_smem, HELD, s_layout)
    grad = hold_operand(g_smem, HELD, s_layout)
    grad_query = warpgroup_mma_init(grad_query)
    for i in range(num_masked):
        start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        if SCALES != "none":
            end = length
        k_start, _ = tile_span(i + KEY_STAGES - 1, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        v_start, _ = tile_span(i + VALUE_STAGES, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        grad_query = _query_grad_step(
            i, grad_query, query, grad, k_smem, k8_smem, v_smem, k_full, v_full, k_tiles, k8_tiles, v_tiles,
            row + k_start, k_start, row + v_start, column, first_slot, num_tiles, first, q_scale, g_scale,
            k_descale, v_descale, user, head, num_heads, begin, schedule, num_users, length, start, end,
            history_end, contexts, window, group_size, ROWS, KEYS, DIM, KEY_STAGES, VALUE_STAGES, True,
            CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, HELD, s_layout, a_layout,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        start = full + (i - num_masked) * KEYS
        grad_query = _query_grad_step(
            i, grad_query, query, grad, k_smem, k8_smem, v_smem, k_full, v_full, k_tiles, k8_tiles, v_tiles,
            row + start + (KEY_STAGES - 1) * KEYS, start + (KEY_STAGES - 1) * KEYS,
            row + start + VALUE_STAGES * KEYS, column, first_slot, num_tiles, first, q_scale, g_scale,
            k_descale, v_descale, user, head, num_heads, begin, schedule, num_users, length, start, 0,
            history_end, contexts, window, group_size, ROWS, KEYS, DIM, KEY_STAGES, VALUE_STAGES, False,
            CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, HELD, s_layout, a_layout,
        )  # fmt: skip
    grad_query = warpgroup_mma_wait(0, deps=[grad_query])
    if SCALES == "user":
        half_alpha *= query_factor
    store(grad_query * (half_alpha * inverse_seqlen), dq, first, length, grad_row, ROWS, DIM, sum_layout)
