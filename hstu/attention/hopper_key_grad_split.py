# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, RUF005, SIM102
"""dK and dV on Hopper GPUs, in Gluon, each in a warp group of its own.

With 256 dims the sums of dK and dV fill the registers of two warp groups. One computes S = K Q^T, P and dV = P^T dO,
and hands SiLU'(S) to the other, which computes dP = V dO^T, dS and dK = dS^T Q; a warp beside them loads.
"""

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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from genrec.hstu.attention.triton_schedule import FP8_BLOCK, find_first_slot
from genrec.hstu.attention.triton_spans import align_spans, count_masked, masked_tile, row_spans, user_parts


@gluon_jit
def _load_rows(
    q_tiles, g_tiles, q8_tiles, g8_tiles, q_smem, g_smem, q8_smem, g8_smem,
    q_full, q_empty, g_full, g_empty, q8_full, q8_empty, g8_full, g8_empty,
    begin, column, first_slot, head, num_heads, num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
    ROWS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    for i in range(num_tiles):
        slot = i % STAGES
        parity = ((i // STAGES) & 1) ^ 1
        start, _ = tile_span(i, num_masked, full, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        row = (begin + start).to(gl.int32)
        if SCALES != "none":
            mbarrier.wait(q8_empty.index(slot), parity)
            fetch(q8_tiles, q8_full.index(slot), q8_smem.index(slot), row, column, True)
            mbarrier.wait(g8_empty.index(slot), parity)
            fetch(g8_tiles, g8_full.index(slot), g8_smem.index(slot), row, column, True)
            mbarrier.wait(g_empty.index(slot), parity)
            if SCALES == "user":
                mbarrier.expect(g_full.index(slot), g_tiles.block_type.nbytes)
                fetch_columns(
                    g_tiles, g_full.index(slot), g_smem.index(slot), first_slot, start, head, num_heads, True,
                    DIM, FP8_BLOCK,
                )  # fmt: skip
            else:
                fetch(g_tiles, g_full.index(slot), g_smem.index(slot), row, column, True)
            mbarrier.wait(q_empty.index(slot), parity)
            if SCALES == "user":
                mbarrier.expect(q_full.index(slot), q_tiles.block_type.nbytes)
                fetch_columns(
                    q_tiles, q_full.index(slot), q_smem.index(slot), first_slot, start, head, num_heads, True,
                    DIM, FP8_BLOCK,
                )  # fmt: skip
            else:
                fetch(q_tiles, q_full.index(slot), q_smem.index(slot), row, column, True)
        else:
            mbarrier.wait(q_empty.index(slot), parity)
            fetch(q_tiles, q_full.index(slot), q_smem.index(slot), row, column, True)
            mbarrier.wait(g_empty.index(slot), parity)
            fetch(g_tiles, g_full.index(slot), g_smem.index(slot), row, column, True)


@gluon_jit
def _value_step(
    i, s, dv, k_smem, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    first, num_tiles, k_scale, q_scale, weight_scale, start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """In and out: S of this tile of rows, of the next one."""
    slot = i % STAGES
    after = (i + 1) % STAGES
    has_next = i + 1 < num_tiles
    p, slope = silu(scaled(s, k_scale, q_scale, SCALES))
    if MASKED:
        seen = visible_rows(
            first, start, end, history_end, contexts, window, group_size,
            ROWS, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW, s_layout,
        )  # fmt: skip
        p = gl.where(seen, p, 0.0)
        slope = gl.where(seen, slope, 0.0)
    buffer = i % 2
    mbarrier.wait(slope_empty.index(buffer), (i // 2) & 1)
    slope_smem.index(buffer).store(slope.to(gl.float16))
    gl.thread_barrier()
    mbarrier.arrive(slope_full.index(buffer), count=1)
    if SCALES == "user":
        p = p * weight_scale
    p = as_operand(p, a_layout, g_smem.dtype)
    mbarrier.wait(g_full.index(slot), (i // STAGES) & 1)
    if MASKED and SCALES != "user":
        if end < start + ROWS:
            zero_from(g_smem.index(slot), end - start, ROWS, DIM)
    grad = g_smem.index(slot)
    if SCALES == "user":
        grad = grad.permute((1, 0))
    dv = warpgroup_mma(p, grad, dv, is_async=True)
    mbarrier.wait(q_full.index(after), ((i + 1) // STAGES) & 1, pred=has_next)
    s = warpgroup_mma(
        k_smem.index(changing_zero(i, first)), q_smem.index(after).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    s, dv = warpgroup_mma_wait(0, deps=[s, dv])
    gl.thread_barrier()
    mbarrier.arrive(g_empty.index(slot), count=1)
    mbarrier.arrive(q_empty.index(after), count=1, pred=has_next)
    return s, dv


@gluon_jit
def _value_group(
    k_smem, q_smem, g_smem, slope_smem, k_full, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    q_descale, k_descale, g_descale, weight_scales, user, head, num_heads, begin, schedule, num_users, out, grad_row,
    length, first, half_alpha, inverse_seqlen, history_end, contexts, window, group_size,
    num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """S, P and dV."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16 if SCALES == "none" else 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32 if SCALES == "user" else 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sum_layout, k_width=4 if SCALES == "user" else 2
    )
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dv = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    weight_scale, value_factor = load_product_scale(weight_scales, g_descale, user, head, num_heads, 1.0, SCALES)
    if num_tiles > 0:
        k_scale = half_alpha * load_user_descale(q_descale, k_descale, user, head, num_heads, SCALES)
        k_scale *= load_descales(
            k_descale, user, head, num_heads, begin, schedule, num_users, first, length,
            KEYS, SCALES, gl.SliceLayout(1, s_layout),
        )  # fmt: skip
        mbarrier.wait(k_full, 0)
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma(
            k_smem.index(0), q_smem.index(0).permute((1, 0)),
            gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        gl.thread_barrier()
        mbarrier.arrive(q_empty.index(0), count=1)
        for i in range(num_masked):
            start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
            if SCALES != "none":
                end = length
            q_scale = load_descales(
                q_descale, user, head, num_heads, begin, schedule, num_users, start, length, ROWS, SCALES, row_layout
            )
            s, dv = _value_step(
                i, s, dv, k_smem, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, k_scale, q_scale, weight_scale, start, end,
                history_end, contexts, window, group_size,
                ROWS, KEYS, DIM, STAGES, True, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
            )  # fmt: skip
        for i in range(num_masked, num_tiles):
            q_scale = load_descales(
                q_descale, user, head, num_heads, begin, schedule, num_users, full + (i - num_masked) * ROWS, length,
                ROWS, SCALES, row_layout,
            )  # fmt: skip
            s, dv = _value_step(
                i, s, dv, k_smem, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, k_scale, q_scale, weight_scale, 0, 0,
                history_end, contexts, window, group_size,
                ROWS, KEYS, DIM, STAGES, False, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
            )  # fmt: skip
    if SCALES == "user":
        inverse_seqlen = gl.where(num_tiles > 0, inverse_seqlen * value_factor, 0.0)  # the padding has no scales
    store(dv * inverse_seqlen, out, first, length, grad_row, KEYS, DIM, sum_layout)


@gluon_jit
def _key_step(
    i, dp, dk, value, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    first, num_tiles, count, v_scale, g_scale,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    SCALES: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """In and out: dP of this tile of rows, of the next one; ``count``: how many of its rows are seen at all."""
    slot = i % STAGES
    after = (i + 1) % STAGES
    has_next = i + 1 < num_tiles
    buffer = i % 2
    mbarrier.wait(slope_full.index(buffer), (i // 2) & 1)
    slope = slope_smem.index(buffer).load(s_layout).to(gl.float32)
    gl.thread_barrier()
    mbarrier.arrive(slope_empty.index(buffer), count=1)
    ds = grad_of_scores(dp, slope, v_scale, g_scale, SCALES, MASKED)
    ds = as_operand(ds, a_layout, q_smem.dtype)
    mbarrier.wait(q_full.index(slot), (i // STAGES) & 1)
    if MASKED and SCALES != "user":
        if count < ROWS:
            zero_from(q_smem.index(slot), count, ROWS, DIM)
    query = q_smem.index(slot)
    if SCALES == "user":
        query = query.permute((1, 0))
    dk = warpgroup_mma(ds, query, dk, is_async=True)
    mbarrier.wait(g_full.index(after), ((i + 1) // STAGES) & 1, pred=has_next)
    dp = warpgroup_mma(
        step_operand(value, i, first, SCALES != "none"), g_smem.index(after).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    dp, dk = warpgroup_mma_wait(0, deps=[dp, dk])
    gl.thread_barrier()
    mbarrier.arrive(q_empty.index(slot), count=1)
    mbarrier.arrive(g_empty.index(after), count=1, pred=has_next)
    return dp, dk


@gluon_jit
def _key_group(
    v_smem, q_smem, g_smem, slope_smem, v_full, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    q_descale, v_descale, g_descale, score_scales, user, head, num_heads, begin, schedule, num_users,
    out, grad_row, length, first, scale, num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """dP, dS and dK."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16 if SCALES == "none" else 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32 if SCALES == "user" else 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sum_layout, k_width=4 if SCALES == "user" else 2
    )
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dk = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    score_scale, key_factor = load_product_scale(score_scales, q_descale, user, head, num_heads, 0.5, SCALES)
    if num_tiles > 0:
        v_scale = load_user_descale(v_descale, g_descale, user, head, num_heads, SCALES) * load_descales(
            v_descale, user, head, num_heads, begin, schedule, num_users, first, length,
            KEYS, SCALES, gl.SliceLayout(1, s_layout),
        )  # fmt: skip
        if SCALES == "user":
            v_scale *= score_scale
        mbarrier.wait(v_full, 0)
        # In FP8 v moves to registers, and the slopes take its place.
        value = hold_operand(v_smem, SCALES != "none", s_layout)
        gl.thread_barrier()
        mbarrier.arrive(slope_empty.index(0), count=1)
        mbarrier.arrive(slope_empty.index(1), count=1)
        mbarrier.wait(g_full.index(0), 0)
        dp = warpgroup_mma(
            step_operand(value, 0, first, SCALES != "none"), g_smem.index(0).permute((1, 0)),
            gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
        )  # fmt: skip
        dp = warpgroup_mma_wait(0, deps=[dp])
        gl.thread_barrier()
        mbarrier.arrive(g_empty.index(0), count=1)
        for i in range(num_masked):
            start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
            if SCALES != "none":
                end = length
            g_scale = load_descales(
                g_descale, user, head, num_heads, begin, schedule, num_users, start, length, ROWS, SCALES, row_layout
            )
            dp, dk = _key_step(
                i, dp, dk, value, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, end - start, v_scale, g_scale,
                ROWS, KEYS, DIM, STAGES, True, SCALES, s_layout, a_layout,
            )  # fmt: skip
        for i in range(num_masked, num_tiles):
            g_scale = load_descales(
                g_descale, user, head, num_heads, begin, schedule, num_users, full + (i - num_masked) * ROWS, length,
                ROWS, SCALES, row_layout,
            )  # fmt: skip
            dp, dk = _key_step(
                i, dp, dk, value, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, ROWS, v_scale, g_scale,
                ROWS, KEYS, DIM, STAGES, False, SCALES, s_layout, a_layout,
            )  # fmt: skip
    if SCALES == "user":
        scale = gl.where(num_tiles > 0, scale * key_factor, 0.0)  # the padding has no scales
    store(dk * scale, out, first, length, grad_row, KEYS, DIM, sum_layout)


@gluon_kernel
def split_key_grad_kernel(
    q_tiles, k_tiles, v_tiles, g_tiles, q8_tiles, g8_tiles, q_descale, k_descale, v_descale, g_descale,
    weight_scales, score_scales, dk, dv, grad_row, schedule, num_contexts, num_targets,
    num_users, num_heads, window, group_size, half_alpha, inverse_seqlen,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, dV in one warp group and dK in another.

    In FP8 ``k_tiles``, ``v_tiles``, ``q8_tiles`` and ``g8_tiles`` are of the quantized tensors; with "user" scales
    ``q_tiles`` and ``g_tiles`` are of their blocks of columns.
    """
    head = gl.program_id(0) % num_heads
    slot = gl.program_id(0) // num_heads
    user, begin, length, tile = find_tile(slot, schedule, num_users, KEYS)
    first = tile * KEYS
    dk += begin * grad_row + head * DIM
    dv += begin * grad_row + head * DIM
    # The padding, and slots that are left over, see no rows: zeros are stored where there are rows.
    is_work = (user < num_users) & (first < length)
    history_end, contexts = user_parts(gl.where(is_work, user, 0), length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = gl.minimum(first + KEYS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = row_spans(
        first, last, length, history_end, contexts, window, group_size, ROWS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, ROWS
        )
    num_masked = gl.where(is_work, count_masked(a, a_end, b, b_end, c, c_end, 0, 0, ROWS), 0)
    num_tiles = num_masked + gl.where(is_work, num_full, 0)
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [1, KEYS, DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [1, KEYS, DIM], v_tiles.layout)
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES] + q_tiles.block_shape, q_tiles.layout)
    g_smem = gl.allocate_shared_memory(g_tiles.dtype, [STAGES] + g_tiles.block_shape, g_tiles.layout)
    slope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
    kv_full = make_barriers(2, 1)
    q_full = make_barriers(STAGES, 1)
    g_full = make_barriers(STAGES, 1)
    slope_full = make_barriers(2, 1)
    slope_empty = make_barriers(2, 1)
    if SCALES != "none":
        slope_smem = v_smem._reinterpret(gl.float16, [2, KEYS, ROWS], slope_layout)
        q8_smem = gl.allocate_shared_memory(q8_tiles.dtype, [STAGES, ROWS, DIM], q8_tiles.layout)
        g8_smem = gl.allocate_shared_memory(g8_tiles.dtype, [STAGES, ROWS, DIM], g8_tiles.layout)
        q_empty = make_barriers(STAGES, 1)
        g_empty = make_barriers(STAGES, 1)
        q8_full = make_barriers(STAGES, 1)
        g8_full = make_barriers(STAGES, 1)
        q8_empty = make_barriers(STAGES, 1)
        g8_empty = make_barriers(STAGES, 1)
    else:
        slope_smem = gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], slope_layout)
        q8_smem = q_smem
        g8_smem = g_smem
        q_empty = make_barriers(STAGES, 2)
        g_empty = make_barriers(STAGES, 2)
        q8_full = q_full
        g8_full = g_full
        q8_empty = q_empty
        g8_empty = g_empty
    fence_async_shared()
    row = (begin + first).to(gl.int32)
    column = head * DIM
    first_slot = 0
    if SCALES == "user":
        first_slot = find_first_slot(user, schedule, num_users)
        user = gl.where(is_work, user, 0)
    fetch(k_tiles, kv_full.index(0), k_smem.index(0), row, column, num_tiles > 0)
    fetch(v_tiles, kv_full.index(1), v_smem.index(0), row, column, num_tiles > 0)
    gl.warp_specialize(
        [
            (
                _value_group,
                (
                    k_smem, q8_smem, g_smem, slope_smem, kv_full.index(0), q8_full, q8_empty, g_full, g_empty,
                    slope_full, slope_empty, q_descale, k_descale, g_descale, weight_scales,
                    user, head, num_heads, begin, schedule, num_users,
                    dv, grad_row, length, first, half_alpha, inverse_seqlen,
                    history_end, contexts, window, group_size,
                    num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
                    ROWS, KEYS, DIM, STAGES, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES,
                ),
            ),
            (
                _key_group,
                (
                    v_smem, q_smem, g8_smem, slope_smem, kv_full.index(1), q_full, q_empty, g8_full, g8_empty,
                    slope_full, slope_empty, q_descale, v_descale, g_descale, score_scales,
                    user, head, num_heads, begin, schedule, num_users,
                    dk, grad_row, length, first, half_alpha * inverse_seqlen,
                    num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end, ROWS, KEYS, DIM, STAGES, SCALES,
                ),
            ),
            (
                _load_rows,
                (
                    q_tiles, g_tiles, q8_tiles, g8_tiles, q_smem, g_smem, q8_smem, g8_smem,
                    q_full, q_empty, g_full, g_empty, q8_full, q8_empty, g8_full, g8_empty,
                    begin, column, first_slot, head, num_heads, num_tiles, num_masked, full,
                    a, a_end, b, b_end, c, c_end, ROWS, DIM, STAGES, SCALES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
