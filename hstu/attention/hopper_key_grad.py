# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005, SIM102
"""dK and dV on Hopper GPUs, in Gluon: all warps of a program sum both. :mod:`genrec.hstu.attention.hopper_backward`."""

from __future__ import annotations

from genrec.hstu.attention.hopper_scores import (
    as_operand,
    grad_of_scores,
    load_descales,
    load_product_scale,
    load_user_descale,
    scaled,
    silu,
    visible_rows,
)
from genrec.hstu.attention.hopper_tiles import (
    changing_zero,
    fetch_columns,
    find_tile,
    make_barriers,
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
from genrec.hstu.attention.triton_schedule import FP8_BLOCK, find_first_slot
from genrec.hstu.attention.triton_spans import align_spans, count_masked, masked_tile, row_spans, user_parts


@gluon_jit
def _key_grad_step(
    i, dk, dv, k_smem, v_smem, q_smem, g_smem, q8_smem, g8_smem, full_bar, q_tiles, g_tiles, q8_tiles, g8_tiles,
    next_row, next_start, column, first_slot, weight_scale, num_tiles, first,
    k_scale, v_scale, q_descale, g_descale, user, head, num_heads, begin, schedule,
    num_users, length, start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """A tile of rows; its products with P and dS still run at the end."""
    slot = i % STAGES
    mbarrier.wait(full_bar.index(slot), (i // STAGES) & 1)
    if MASKED and SCALES != "user":
        if end < start + ROWS:
            zero_from(q_smem.index(slot), end - start, ROWS, DIM)
            zero_from(g_smem.index(slot), end - start, ROWS, DIM)
    s = warpgroup_mma(
        k_smem.index(changing_zero(i, first)), q8_smem.index(slot).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    dp = warpgroup_mma(
        v_smem.index(changing_zero(i, first)), g8_smem.index(slot).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    s, dk, dv = warpgroup_mma_wait(1, deps=[s, dk, dv])
    gl.thread_barrier()
    # All are done with the tile before, whose place takes the next one.
    before = (i + STAGES - 1) % STAGES
    _fetch_rows(
        q_tiles, g_tiles, q8_tiles, g8_tiles, full_bar.index(before), q_smem.index(before), g_smem.index(before),
        q8_smem.index(before), g8_smem.index(before), next_row, next_start, column, first_slot, head, num_heads,
        (i > 0) & (i + STAGES - 1 < num_tiles), DIM, SCALES,
    )  # fmt: skip
    q_scale = load_descales(
        q_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        ROWS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    p, slope = silu(scaled(s, k_scale, q_scale, SCALES))
    if SCALES == "user":
        p = p * weight_scale
    if MASKED:
        seen = visible_rows(
            first, start, end, history_end, contexts, window, group_size,
            ROWS, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW, s_layout,
        )  # fmt: skip
        p = gl.where(seen, p, 0.0)
        slope = gl.where(seen, slope, 0.0)
    g_scale = load_descales(
        g_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        ROWS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    query = q_smem.index(slot)
    grad = g_smem.index(slot)
    if SCALES == "user":
        query = query.permute((1, 0))
        grad = grad.permute((1, 0))
    dv = warpgroup_mma(as_operand(p, a_layout, g_smem.dtype), grad, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = grad_of_scores(dp, slope, v_scale, g_scale, SCALES, MASKED)
    dk = warpgroup_mma(as_operand(ds, a_layout, q_smem.dtype), query, dk, is_async=True)
    return dk, dv


@gluon_jit
def _fetch_rows(
    q_tiles, g_tiles, q8_tiles, g8_tiles, ready, q_smem, g_smem, q8_smem, g8_smem, row, start, column, first_slot, head,
    num_heads, pred, DIM: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    if SCALES != "none":
        size: gl.constexpr = 2 * q_tiles.block_type.nbytes + 2 * q8_tiles.block_type.nbytes
        mbarrier.expect(ready, size, pred=pred)
        tma.async_copy_global_to_shared(q8_tiles, [row, column], ready, q8_smem, pred=pred)
        tma.async_copy_global_to_shared(g8_tiles, [row, column], ready, g8_smem, pred=pred)
    else:
        mbarrier.expect(ready, 2 * q_tiles.block_type.nbytes, pred=pred)
    if SCALES == "user":
        fetch_columns(q_tiles, ready, q_smem, first_slot, start, head, num_heads, pred, DIM, FP8_BLOCK)
        fetch_columns(g_tiles, ready, g_smem, first_slot, start, head, num_heads, pred, DIM, FP8_BLOCK)
    else:
        tma.async_copy_global_to_shared(q_tiles, [row, column], ready, q_smem, pred=pred)
        tma.async_copy_global_to_shared(g_tiles, [row, column], ready, g_smem, pred=pred)


@gluon_kernel
def key_grad_kernel(
    q_tiles, k_tiles, v_tiles, g_tiles, q8_tiles, g8_tiles, q_descale, k_descale, v_descale, g_descale,
    weight_scales, score_scales, dk, dv, grad_row, schedule, num_contexts, num_targets,
    num_users, num_heads, window, group_size, half_alpha, inverse_seqlen,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values.

    In FP8 ``k_tiles``, ``v_tiles``, ``q8_tiles`` and ``g8_tiles`` are of the quantized tensors; with "user" scales
    ``q_tiles`` and ``g_tiles`` are of their blocks of columns.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, ROWS, 16 if SCALES == "none" else 32]
    )
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, DIM, 32 if SCALES == "user" else 16]
    )
    a_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sum_layout, k_width=4 if SCALES == "user" else 2
    )
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    head = gl.program_id(0) % num_heads
    slot = gl.program_id(0) // num_heads
    user, begin, length, tile = find_tile(slot, schedule, num_users, KEYS)
    first = tile * KEYS
    if first >= length:
        return
    dk += begin * grad_row + head * DIM
    dv += begin * grad_row + head * DIM
    grad_key = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    grad_value = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    if user == num_users:
        store(grad_key, dk, first, length, grad_row, KEYS, DIM, sum_layout)
        store(grad_value, dv, first, length, grad_row, KEYS, DIM, sum_layout)
        return
    history_end, contexts = user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = gl.minimum(first + KEYS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = row_spans(
        first, last, length, history_end, contexts, window, group_size, ROWS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, ROWS
        )
    num_masked = count_masked(a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
    num_tiles = num_masked + num_full
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [1, KEYS, DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [1, KEYS, DIM], v_tiles.layout)
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES] + q_tiles.block_shape, q_tiles.layout)
    g_smem = gl.allocate_shared_memory(g_tiles.dtype, [STAGES] + g_tiles.block_shape, g_tiles.layout)
    if SCALES != "none":
        q8_smem = gl.allocate_shared_memory(q8_tiles.dtype, [STAGES, ROWS, DIM], q8_tiles.layout)
        g8_smem = gl.allocate_shared_memory(g8_tiles.dtype, [STAGES, ROWS, DIM], g8_tiles.layout)
    else:
        q8_smem = q_smem
        g8_smem = g_smem
    kv_full = make_barriers(1, 1)
    full_bar = make_barriers(STAGES, 1)
    fence_async_shared()
    row = begin.to(gl.int32)
    column = head * DIM
    first_slot = 0
    if SCALES == "user":
        first_slot = find_first_slot(user, schedule, num_users)
    mbarrier.expect(kv_full.index(0), 2 * k_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(k_tiles, [row + first, column], kv_full.index(0), k_smem.index(0))
    tma.async_copy_global_to_shared(v_tiles, [row + first, column], kv_full.index(0), v_smem.index(0))
    for stage in gl.static_range(STAGES):
        start, _ = tile_span(stage, num_masked, full, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        _fetch_rows(
            q_tiles, g_tiles, q8_tiles, g8_tiles, full_bar.index(stage), q_smem.index(stage), g_smem.index(stage),
            q8_smem.index(stage), g8_smem.index(stage), row + start, start, column, first_slot, head, num_heads,
            stage < num_tiles, DIM, SCALES,
        )  # fmt: skip
    k_scale = half_alpha * load_user_descale(q_descale, k_descale, user, head, num_heads, SCALES)
    k_scale *= load_descales(
        k_descale, user, head, num_heads, begin, schedule, num_users, first, length, KEYS, SCALES, key_layout
    )
    v_scale = load_user_descale(v_descale, g_descale, user, head, num_heads, SCALES)
    v_scale *= load_descales(
        v_descale, user, head, num_heads, begin, schedule, num_users, first, length, KEYS, SCALES, key_layout
    )
    weight_scale, value_factor = load_product_scale(weight_scales, g_descale, user, head, num_heads, 1.0, SCALES)
    score_scale, key_factor = load_product_scale(score_scales, q_descale, user, head, num_heads, 0.5, SCALES)
    if SCALES == "user":
        v_scale *= score_scale
    mbarrier.wait(kv_full.index(0), 0)
    grad_key = warpgroup_mma_init(grad_key)
    grad_value = warpgroup_mma_init(grad_value)
    for i in range(num_masked):
        start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        if SCALES != "none":
            end = length
        next_start, _ = tile_span(i + STAGES - 1, num_masked, full, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        grad_key, grad_value = _key_grad_step(
            i, grad_key, grad_value, k_smem, v_smem, q_smem, g_smem, q8_smem, g8_smem, full_bar,
            q_tiles, g_tiles, q8_tiles, g8_tiles, row + next_start, next_start, column, first_slot, weight_scale,
            num_tiles, first,
            k_scale, v_scale, q_descale, g_descale, user, head, num_heads, begin, schedule, num_users, length,
            start, end, history_end, contexts, window, group_size,
            ROWS, KEYS, DIM, STAGES, True, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        start = full + (i - num_masked) * ROWS
        grad_key, grad_value = _key_grad_step(
            i, grad_key, grad_value, k_smem, v_smem, q_smem, g_smem, q8_smem, g8_smem, full_bar,
            q_tiles, g_tiles, q8_tiles, g8_tiles, row + start + (STAGES - 1) * ROWS, start + (STAGES - 1) * ROWS,
            column, first_slot, weight_scale, num_tiles, first,
            k_scale, v_scale, q_descale, g_descale, user, head, num_heads, begin, schedule, num_users, length,
            start, 0, history_end, contexts, window, group_size,
            ROWS, KEYS, DIM, STAGES, False, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
        )  # fmt: skip
    grad_key, grad_value = warpgroup_mma_wait(0, deps=[grad_key, grad_value])
    if SCALES == "user":
        half_alpha *= key_factor
    key_inverse = half_alpha * inverse_seqlen
    if SCALES == "user":
        inverse_seqlen *= value_factor
    store(grad_key * key_inverse, dk, first, length, grad_row, KEYS, DIM, sum_layout)
    store(grad_value * inverse_seqlen, dv, first, length, grad_row, KEYS, DIM, sum_layout)
