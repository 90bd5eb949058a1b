# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202, SIM102
"""Backward of HSTU attention on Hopper GPUs, in Gluon: what :mod:`genrec.hstu.attention.triton` does, explicitly.

Tiles, spans and schedule are those of the Triton kernels. Here tiles come by TMA, several in flight, and products
(``wgmma``) run while the scores of others are worked on. TMA also brings the rows of the next user: what a product sums
over is set to zero there, in shared memory.

With 256 dims the sums of dK and dV fill the registers of two warp groups. One computes S = K Q^T, P and dV = P^T dO,
and hands SiLU'(S) to the other, which computes dP = V dO^T, dS and dK = dS^T Q; a warp beside them loads.

In FP8 (SCALES other than "none") S and dP are made of quantized operands, the ``x8`` and what a docstring names, and
tiles start at multiples of their size; dV, dK and dQ are made of q, k and dO as they came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention import triton as kernels
from genrec.hstu.attention.descriptors import descriptor, gluon, has_whole_rows, is_hopper
from genrec.hstu.attention.descriptors import gluon_jit as _jit
from genrec.hstu.attention.quantization import ScoreTensors
from genrec.hstu.attention.request import Request
from genrec.hstu.attention.tuning import check_number, tunable

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
except ImportError:  # No Triton, or one without Gluon: the Triton kernels serve.
    pass

_FP8_BLOCK = kernels._FP8_BLOCK
_align_spans = kernels._align_spans
_first_slot = kernels._first_slot
_masked_tile = kernels._masked_tile
_num_blocks = kernels._num_blocks
_num_masked = kernels._num_masked
_key_spans = kernels._key_spans
_row_spans = kernels._row_spans
_user_parts = kernels._user_parts
_user_span = kernels._user_span
_visible = kernels._visible
_PER_BATCH = ["num_users", "num_rows", "window", "group_size"]


@_jit
def _find_tile(slot, schedule, offsets, num_users, num_rows, BLOCK: gl.constexpr):
    """As in the Triton kernels: (user, first row, length, tile) of a slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    num_started = 0
    for first in range(0, num_users + 1, 256):
        rank = first + gl.arange(0, 256, layout)
        tokens_before = gl.load(schedule + num_users + 1 + rank, mask=rank <= num_users, other=0)
        has_started = (tokens_before // BLOCK + rank <= slot) & (rank <= num_users)
        num_started += gl.sum(has_started.to(gl.int32), axis=0)
    rank = num_started - 1
    user = gl.load(schedule + rank)
    begin, length = _user_span(user, offsets, num_users, num_rows)
    return user, begin, length, slot - gl.load(schedule + num_users + 1 + rank) // BLOCK - rank


@_jit
def _silu(half):
    """SiLU(2 h) and twice its derivative there, of h: h (1 + t) and 1 + t + h (1 + t) (1 - t), with t = tanh h.

    Where h is huge and t is 1, the last term is 0: nothing that large is added up, and no 1 is lost.
    """
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1)
    value = gl.fma(half, t, half)
    return value, gl.fma(value, 1.0 - t, 1.0 + t)


@_jit
def _descales(
    descales, user, head, num_heads, begin, schedule, num_users, first, end,
    SIZE: gl.constexpr, SCALES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of rows from ``first`` on: (SIZE,), or one number for all of them; 1 where :func:`_user_descale` has it."""
    factor = 1.0
    if SCALES == "block":
        slot = _first_slot(user, schedule, num_users) + first // _FP8_BLOCK
        factor = gl.load(descales + slot * num_heads + head)
    if SCALES == "row":
        rows = gl.minimum(first + gl.arange(0, SIZE, layout), end - 1)
        factor = gl.load(descales + (begin * num_heads + head) + rows * num_heads)
    return factor


@_jit
def _user_descale(first, second, user, head, num_heads, SCALES: gl.constexpr):
    """The product of two descales of a user and head; 1 where :func:`_descales` has them."""
    factor = 1.0
    if SCALES == "user":
        place = user * num_heads + head
        factor = gl.load(first + place) * gl.load(second + place)
    return factor


@_jit
def _scaled(scores, down, across, SCALES: gl.constexpr):
    """Scores times the descales of their two sides."""
    if SCALES == "row":
        scores = scores * down[:, None] * across[None, :]
    else:
        scores = scores * (down * across)
    return scores


@_jit
def _tile(i, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: gl.constexpr):
    """Where the i-th tile starts and its span ends: first those with a mask, then the others."""
    start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK)
    whole = full + (i - num_masked) * BLOCK
    return gl.where(i < num_masked, start, whole), gl.where(i < num_masked, end, whole + BLOCK)


@_jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@_jit
def _fetch(tiles, ready, memory, row, column, pred):
    mbarrier.expect(ready, tiles.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(tiles, [row, column], ready, memory, pred=pred)


@_jit
def _zero_from(tile, count, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Set the rows of a tile in shared memory from ``count`` on to zero."""
    WIDTH: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for i in gl.static_range(DIM // WIDTH):
        part = tile.slice(i * WIDTH, WIDTH, dim=1)
        values = part.load(layout)
        part.store(gl.where((rows < count)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@_jit
def _zero(i, first):
    """Zero, and for all that the compiler knows another number in each step.

    It would compute addresses that don't change in a loop before it, and fill the registers with them.
    """
    return i & (first >> 31)


@_jit
def _operand(smem, HELD: gl.constexpr, s_layout: gl.constexpr):
    """What S or dP are made of in all steps of a loop, for :func:`_first_operand`; HELD: in registers."""
    operand = smem
    if HELD:
        width: gl.constexpr = 32 // smem.dtype.primitive_bitwidth
        operand = smem.index(0).load(gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=width))
    return operand


@_jit
def _first_operand(operand, i, first, HELD: gl.constexpr):
    if not HELD:
        operand = operand.index(_zero(i, first))
    return operand


@_jit
def _store(values, base, first, end, stride, ROWS: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    pointers = base + first.to(gl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    gl.store(pointers, values.to(base.dtype.element_ty), mask=(first + rows < end)[:, None])


@_jit
def _load_rows(
    q_tiles, g_tiles, q8_tiles, g8_tiles, q_smem, g_smem, q8_smem, g8_smem,
    q_full, q_empty, g_full, g_empty, q8_full, q8_empty, g8_full, g8_empty,
    begin, column, num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
    ROWS: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    for i in range(num_tiles):
        slot = i % STAGES
        parity = ((i // STAGES) & 1) ^ 1
        start, _ = _tile(i, num_masked, full, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        row = (begin + start).to(gl.int32)
        if SCALES != "none":
            mbarrier.wait(q8_empty.index(slot), parity)
            _fetch(q8_tiles, q8_full.index(slot), q8_smem.index(slot), row, column, True)
            mbarrier.wait(g8_empty.index(slot), parity)
            _fetch(g8_tiles, g8_full.index(slot), g8_smem.index(slot), row, column, True)
            mbarrier.wait(g_empty.index(slot), parity)
            _fetch(g_tiles, g_full.index(slot), g_smem.index(slot), row, column, True)
            mbarrier.wait(q_empty.index(slot), parity)
            _fetch(q_tiles, q_full.index(slot), q_smem.index(slot), row, column, True)
        else:
            mbarrier.wait(q_empty.index(slot), parity)
            _fetch(q_tiles, q_full.index(slot), q_smem.index(slot), row, column, True)
            mbarrier.wait(g_empty.index(slot), parity)
            _fetch(g_tiles, g_full.index(slot), g_smem.index(slot), row, column, True)


@_jit
def _value_step(
    i, s, dv, k_smem, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    first, num_tiles, k_scale, q_scale, start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """In and out: S of this tile of rows, of the next one."""
    slot = i % STAGES
    after = (i + 1) % STAGES
    has_next = i + 1 < num_tiles
    p, slope = _silu(_scaled(s, k_scale, q_scale, SCALES))
    if MASKED:
        keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
        rows = start + gl.arange(0, ROWS, gl.SliceLayout(0, s_layout))
        seen = (
            _visible(
                rows[None, :],
                keys[:, None],
                history_end,
                contexts,
                window,
                group_size,
                CAUSAL,
                CONTEXTS,
                TARGETS,
                WINDOW,
            )
            & (rows < end)[None, :]
        )
        p = gl.where(seen, p, 0.0)
        slope = gl.where(seen, slope, 0.0)
    buffer = i % 2
    mbarrier.wait(slope_empty.index(buffer), (i // 2) & 1)
    slope_smem.index(buffer).store(slope.to(gl.float16))
    gl.thread_barrier()
    mbarrier.arrive(slope_full.index(buffer), count=1)
    p = gl.convert_layout(p.to(g_smem.dtype), a_layout)
    mbarrier.wait(g_full.index(slot), (i // STAGES) & 1)
    if MASKED:
        if end < start + ROWS:
            _zero_from(g_smem.index(slot), end - start, ROWS, DIM)
    dv = warpgroup_mma(p, g_smem.index(slot), dv, is_async=True)
    mbarrier.wait(q_full.index(after), ((i + 1) // STAGES) & 1, pred=has_next)
    s = warpgroup_mma(
        k_smem.index(_zero(i, first)), q_smem.index(after).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    s, dv = warpgroup_mma_wait(0, deps=[s, dv])
    gl.thread_barrier()
    mbarrier.arrive(g_empty.index(slot), count=1)
    mbarrier.arrive(q_empty.index(after), count=1, pred=has_next)
    return s, dv


@_jit
def _value_group(
    k_smem, q_smem, g_smem, slope_smem, k_full, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    q_descale, k_descale, user, head, num_heads, begin, schedule, num_users,
    out, grad_row, length, first, half_alpha, inverse_seqlen, history_end, contexts, window, group_size,
    num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """S, P and dV."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16 if SCALES == "none" else 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dv = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    if num_tiles > 0:
        k_scale = half_alpha * _user_descale(q_descale, k_descale, user, head, num_heads, SCALES)
        k_scale *= _descales(
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
            start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
            if SCALES != "none":
                end = length
            q_scale = _descales(
                q_descale, user, head, num_heads, begin, schedule, num_users, start, length, ROWS, SCALES, row_layout
            )
            s, dv = _value_step(
                i, s, dv, k_smem, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, k_scale, q_scale, start, end, history_end, contexts, window, group_size,
                ROWS, KEYS, DIM, STAGES, True, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
            )  # fmt: skip
        for i in range(num_masked, num_tiles):
            q_scale = _descales(
                q_descale, user, head, num_heads, begin, schedule, num_users, full + (i - num_masked) * ROWS, length,
                ROWS, SCALES, row_layout,
            )  # fmt: skip
            s, dv = _value_step(
                i, s, dv, k_smem, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, k_scale, q_scale, 0, 0, history_end, contexts, window, group_size,
                ROWS, KEYS, DIM, STAGES, False, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
            )  # fmt: skip
    _store(dv * inverse_seqlen, out, first, length, grad_row, KEYS, DIM, sum_layout)


@_jit
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
    ds = dp * slope
    if SCALES != "none":
        ds = _scaled(ds, v_scale, g_scale, SCALES)
    if MASKED:  # Beyond the user's end, where the slope is zero, dP may be anything.
        ds = gl.where(slope == 0.0, 0.0, ds)
    ds = gl.convert_layout(ds.to(q_smem.dtype), a_layout)
    mbarrier.wait(q_full.index(slot), (i // STAGES) & 1)
    if MASKED:
        if count < ROWS:
            _zero_from(q_smem.index(slot), count, ROWS, DIM)
    dk = warpgroup_mma(ds, q_smem.index(slot), dk, is_async=True)
    mbarrier.wait(g_full.index(after), ((i + 1) // STAGES) & 1, pred=has_next)
    dp = warpgroup_mma(
        _first_operand(value, i, first, SCALES != "none"), g_smem.index(after).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    dp, dk = warpgroup_mma_wait(0, deps=[dp, dk])
    gl.thread_barrier()
    mbarrier.arrive(q_empty.index(slot), count=1)
    mbarrier.arrive(g_empty.index(after), count=1, pred=has_next)
    return dp, dk


@_jit
def _key_group(
    v_smem, q_smem, g_smem, slope_smem, v_full, q_full, q_empty, g_full, g_empty, slope_full, slope_empty,
    v_descale, g_descale, user, head, num_heads, begin, schedule, num_users,
    out, grad_row, length, first, scale, num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """dP, dS and dK."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16 if SCALES == "none" else 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dk = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    if num_tiles > 0:
        v_scale = _user_descale(v_descale, g_descale, user, head, num_heads, SCALES) * _descales(
            v_descale, user, head, num_heads, begin, schedule, num_users, first, length,
            KEYS, SCALES, gl.SliceLayout(1, s_layout),
        )  # fmt: skip
        mbarrier.wait(v_full, 0)
        # In FP8 v moves to registers, and the slopes take its place.
        value = _operand(v_smem, SCALES != "none", s_layout)
        gl.thread_barrier()
        mbarrier.arrive(slope_empty.index(0), count=1)
        mbarrier.arrive(slope_empty.index(1), count=1)
        mbarrier.wait(g_full.index(0), 0)
        dp = warpgroup_mma(
            _first_operand(value, 0, first, SCALES != "none"), g_smem.index(0).permute((1, 0)),
            gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
        )  # fmt: skip
        dp = warpgroup_mma_wait(0, deps=[dp])
        gl.thread_barrier()
        mbarrier.arrive(g_empty.index(0), count=1)
        for i in range(num_masked):
            start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
            if SCALES != "none":
                end = length
            g_scale = _descales(
                g_descale, user, head, num_heads, begin, schedule, num_users, start, length, ROWS, SCALES, row_layout
            )
            dp, dk = _key_step(
                i, dp, dk, value, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, end - start, v_scale, g_scale,
                ROWS, KEYS, DIM, STAGES, True, SCALES, s_layout, a_layout,
            )  # fmt: skip
        for i in range(num_masked, num_tiles):
            g_scale = _descales(
                g_descale, user, head, num_heads, begin, schedule, num_users, full + (i - num_masked) * ROWS, length,
                ROWS, SCALES, row_layout,
            )  # fmt: skip
            dp, dk = _key_step(
                i, dp, dk, value, q_smem, g_smem, slope_smem, q_full, q_empty, g_full, g_empty, slope_full,
                slope_empty, first, num_tiles, ROWS, v_scale, g_scale,
                ROWS, KEYS, DIM, STAGES, False, SCALES, s_layout, a_layout,
            )  # fmt: skip
    _store(dk * scale, out, first, length, grad_row, KEYS, DIM, sum_layout)


@_jit(do_not_specialize=_PER_BATCH)
def split_key_grad_kernel(
    q_tiles, k_tiles, v_tiles, g_tiles, q8_tiles, g8_tiles, q_descale, k_descale, v_descale, g_descale,
    dk, dv, grad_row, schedule, offsets, num_contexts, num_targets,
    num_users, num_rows, num_heads, window, group_size, half_alpha, inverse_seqlen,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, dV in one warp group and dK in another.

    In FP8 ``k_tiles``, ``v_tiles``, ``q8_tiles`` and ``g8_tiles`` are of the quantized tensors.
    """
    head = gl.program_id(0) % num_heads
    slot = gl.program_id(0) // num_heads
    user, begin, length, tile = _find_tile(slot, schedule, offsets, num_users, num_rows, KEYS)
    first = tile * KEYS
    dk += begin * grad_row + head * DIM
    dv += begin * grad_row + head * DIM
    # The padding, and slots that are left over, see no rows: zeros are stored where there are rows.
    is_work = (user < num_users) & (first < length)
    history_end, contexts = _user_parts(
        gl.where(is_work, user, 0), length, num_contexts, num_targets, CONTEXTS, TARGETS
    )
    last = gl.minimum(first + KEYS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _row_spans(
        first, last, length, history_end, contexts, window, group_size, ROWS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, ROWS
        )
    num_masked = gl.where(is_work, _num_masked(a, a_end, b, b_end, c, c_end, 0, 0, ROWS), 0)
    num_tiles = num_masked + gl.where(is_work, num_full, 0)
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [1, KEYS, DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [1, KEYS, DIM], v_tiles.layout)
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, ROWS, DIM], q_tiles.layout)
    g_smem = gl.allocate_shared_memory(g_tiles.dtype, [STAGES, ROWS, DIM], g_tiles.layout)
    slope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
    kv_full = _barriers(2, 1)
    q_full = _barriers(STAGES, 1)
    g_full = _barriers(STAGES, 1)
    slope_full = _barriers(2, 1)
    slope_empty = _barriers(2, 1)
    if SCALES != "none":
        slope_smem = v_smem._reinterpret(gl.float16, [2, KEYS, ROWS], slope_layout)
        q8_smem = gl.allocate_shared_memory(q8_tiles.dtype, [STAGES, ROWS, DIM], q8_tiles.layout)
        g8_smem = gl.allocate_shared_memory(g8_tiles.dtype, [STAGES, ROWS, DIM], g8_tiles.layout)
        q_empty = _barriers(STAGES, 1)
        g_empty = _barriers(STAGES, 1)
        q8_full = _barriers(STAGES, 1)
        g8_full = _barriers(STAGES, 1)
        q8_empty = _barriers(STAGES, 1)
        g8_empty = _barriers(STAGES, 1)
    else:
        slope_smem = gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], slope_layout)
        q8_smem = q_smem
        g8_smem = g_smem
        q_empty = _barriers(STAGES, 2)
        g_empty = _barriers(STAGES, 2)
        q8_full = q_full
        g8_full = g_full
        q8_empty = q_empty
        g8_empty = g_empty
    fence_async_shared()
    row = (begin + first).to(gl.int32)
    column = head * DIM
    _fetch(k_tiles, kv_full.index(0), k_smem.index(0), row, column, num_tiles > 0)
    _fetch(v_tiles, kv_full.index(1), v_smem.index(0), row, column, num_tiles > 0)
    gl.warp_specialize(
        [
            (
                _value_group,
                (
                    k_smem, q8_smem, g_smem, slope_smem, kv_full.index(0), q8_full, q8_empty, g_full, g_empty,
                    slope_full, slope_empty, q_descale, k_descale, user, head, num_heads, begin, schedule, num_users,
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
                    slope_full, slope_empty, v_descale, g_descale, user, head, num_heads, begin, schedule, num_users,
                    dk, grad_row, length, first, half_alpha * inverse_seqlen,
                    num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end, ROWS, KEYS, DIM, STAGES, SCALES,
                ),
            ),
            (
                _load_rows,
                (
                    q_tiles, g_tiles, q8_tiles, g8_tiles, q_smem, g_smem, q8_smem, g8_smem,
                    q_full, q_empty, g_full, g_empty, q8_full, q8_empty, g8_full, g8_empty,
                    begin, column, num_tiles, num_masked, full, a, a_end, b, b_end, c, c_end, ROWS, STAGES, SCALES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@_jit
def _key_grad_step(
    i, dk, dv, k_smem, v_smem, q_smem, g_smem, q8_smem, g8_smem, full_bar, q_tiles, g_tiles, q8_tiles, g8_tiles,
    next_row, column, num_tiles, first, k_scale, v_scale, q_descale, g_descale, user, head, num_heads, begin, schedule,
    num_users, length, start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """A tile of rows; its products with P and dS still run at the end."""
    slot = i % STAGES
    mbarrier.wait(full_bar.index(slot), (i // STAGES) & 1)
    if MASKED:
        if end < start + ROWS:
            _zero_from(q_smem.index(slot), end - start, ROWS, DIM)
            _zero_from(g_smem.index(slot), end - start, ROWS, DIM)
    s = warpgroup_mma(
        k_smem.index(_zero(i, first)), q8_smem.index(slot).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    dp = warpgroup_mma(
        v_smem.index(_zero(i, first)), g8_smem.index(slot).permute((1, 0)),
        gl.zeros([KEYS, ROWS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    s, dk, dv = warpgroup_mma_wait(1, deps=[s, dk, dv])
    gl.thread_barrier()
    # All are done with the tile before, whose place takes the next one.
    before = (i + STAGES - 1) % STAGES
    _fetch_rows(
        q_tiles, g_tiles, q8_tiles, g8_tiles, full_bar.index(before), q_smem.index(before), g_smem.index(before),
        q8_smem.index(before), g8_smem.index(before), next_row, column, (i > 0) & (i + STAGES - 1 < num_tiles), SCALES,
    )  # fmt: skip
    q_scale = _descales(
        q_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        ROWS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    p, slope = _silu(_scaled(s, k_scale, q_scale, SCALES))
    if MASKED:
        keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
        rows = start + gl.arange(0, ROWS, gl.SliceLayout(0, s_layout))
        seen = (
            _visible(
                rows[None, :],
                keys[:, None],
                history_end,
                contexts,
                window,
                group_size,
                CAUSAL,
                CONTEXTS,
                TARGETS,
                WINDOW,
            )
            & (rows < end)[None, :]
        )
        p = gl.where(seen, p, 0.0)
        slope = gl.where(seen, slope, 0.0)
    g_scale = _descales(
        g_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        ROWS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    dv = warpgroup_mma(gl.convert_layout(p.to(g_smem.dtype), a_layout), g_smem.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = dp * slope
    if SCALES != "none":
        ds = _scaled(ds, v_scale, g_scale, SCALES)
    if MASKED:  # Beyond the user's end, where the slope is zero, dP may be anything.
        ds = gl.where(slope == 0.0, 0.0, ds)
    dk = warpgroup_mma(gl.convert_layout(ds.to(q_smem.dtype), a_layout), q_smem.index(slot), dk, is_async=True)
    return dk, dv


@_jit
def _fetch_rows(
    q_tiles, g_tiles, q8_tiles, g8_tiles, ready, q_smem, g_smem, q8_smem, g8_smem, row, column, pred,
    SCALES: gl.constexpr,
):  # fmt: skip
    if SCALES != "none":
        size: gl.constexpr = 2 * q_tiles.block_type.nbytes + 2 * q8_tiles.block_type.nbytes
        mbarrier.expect(ready, size, pred=pred)
        tma.async_copy_global_to_shared(q8_tiles, [row, column], ready, q8_smem, pred=pred)
        tma.async_copy_global_to_shared(g8_tiles, [row, column], ready, g8_smem, pred=pred)
    else:
        mbarrier.expect(ready, 2 * q_tiles.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(q_tiles, [row, column], ready, q_smem, pred=pred)
    tma.async_copy_global_to_shared(g_tiles, [row, column], ready, g_smem, pred=pred)


@_jit(do_not_specialize=_PER_BATCH)
def key_grad_kernel(
    q_tiles, k_tiles, v_tiles, g_tiles, q8_tiles, g8_tiles, q_descale, k_descale, v_descale, g_descale,
    dk, dv, grad_row, schedule, offsets, num_contexts, num_targets,
    num_users, num_rows, num_heads, window, group_size, half_alpha, inverse_seqlen,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, ROWS, 16 if SCALES == "none" else 32]
    )
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    head = gl.program_id(0) % num_heads
    slot = gl.program_id(0) // num_heads
    user, begin, length, tile = _find_tile(slot, schedule, offsets, num_users, num_rows, KEYS)
    first = tile * KEYS
    if first >= length:
        return
    dk += begin * grad_row + head * DIM
    dv += begin * grad_row + head * DIM
    grad_key = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    grad_value = gl.zeros([KEYS, DIM], gl.float32, sum_layout)
    if user == num_users:
        _store(grad_key, dk, first, length, grad_row, KEYS, DIM, sum_layout)
        _store(grad_value, dv, first, length, grad_row, KEYS, DIM, sum_layout)
        return
    history_end, contexts = _user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = gl.minimum(first + KEYS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _row_spans(
        first, last, length, history_end, contexts, window, group_size, ROWS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, ROWS
        )
    num_masked = _num_masked(a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
    num_tiles = num_masked + num_full
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [1, KEYS, DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [1, KEYS, DIM], v_tiles.layout)
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, ROWS, DIM], q_tiles.layout)
    g_smem = gl.allocate_shared_memory(g_tiles.dtype, [STAGES, ROWS, DIM], g_tiles.layout)
    if SCALES != "none":
        q8_smem = gl.allocate_shared_memory(q8_tiles.dtype, [STAGES, ROWS, DIM], q8_tiles.layout)
        g8_smem = gl.allocate_shared_memory(g8_tiles.dtype, [STAGES, ROWS, DIM], g8_tiles.layout)
    else:
        q8_smem = q_smem
        g8_smem = g_smem
    kv_full = _barriers(1, 1)
    full_bar = _barriers(STAGES, 1)
    fence_async_shared()
    row = begin.to(gl.int32)
    column = head * DIM
    mbarrier.expect(kv_full.index(0), 2 * k_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(k_tiles, [row + first, column], kv_full.index(0), k_smem.index(0))
    tma.async_copy_global_to_shared(v_tiles, [row + first, column], kv_full.index(0), v_smem.index(0))
    for stage in gl.static_range(STAGES):
        start, _ = _tile(stage, num_masked, full, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        _fetch_rows(
            q_tiles, g_tiles, q8_tiles, g8_tiles, full_bar.index(stage), q_smem.index(stage), g_smem.index(stage),
            q8_smem.index(stage), g8_smem.index(stage), row + start, column, stage < num_tiles, SCALES,
        )  # fmt: skip
    k_scale = half_alpha * _user_descale(q_descale, k_descale, user, head, num_heads, SCALES)
    k_scale *= _descales(
        k_descale, user, head, num_heads, begin, schedule, num_users, first, length, KEYS, SCALES, key_layout
    )
    v_scale = _user_descale(v_descale, g_descale, user, head, num_heads, SCALES)
    v_scale *= _descales(
        v_descale, user, head, num_heads, begin, schedule, num_users, first, length, KEYS, SCALES, key_layout
    )
    mbarrier.wait(kv_full.index(0), 0)
    grad_key = warpgroup_mma_init(grad_key)
    grad_value = warpgroup_mma_init(grad_value)
    for i in range(num_masked):
        start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        if SCALES != "none":
            end = length
        next_start, _ = _tile(i + STAGES - 1, num_masked, full, a, a_end, b, b_end, c, c_end, 0, 0, ROWS)
        grad_key, grad_value = _key_grad_step(
            i, grad_key, grad_value, k_smem, v_smem, q_smem, g_smem, q8_smem, g8_smem, full_bar,
            q_tiles, g_tiles, q8_tiles, g8_tiles, row + next_start, column, num_tiles, first,
            k_scale, v_scale, q_descale, g_descale, user, head, num_heads, begin, schedule, num_users, length,
            start, end, history_end, contexts, window, group_size,
            ROWS, KEYS, DIM, STAGES, True, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        start = full + (i - num_masked) * ROWS
        grad_key, grad_value = _key_grad_step(
            i, grad_key, grad_value, k_smem, v_smem, q_smem, g_smem, q8_smem, g8_smem, full_bar,
            q_tiles, g_tiles, q8_tiles, g8_tiles, row + start + (STAGES - 1) * ROWS, column, num_tiles, first,
            k_scale, v_scale, q_descale, g_descale, user, head, num_heads, begin, schedule, num_users, length,
            start, 0, history_end, contexts, window, group_size,
            ROWS, KEYS, DIM, STAGES, False, CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, s_layout, a_layout,
        )  # fmt: skip
    grad_key, grad_value = warpgroup_mma_wait(0, deps=[grad_key, grad_value])
    _store(grad_key * (half_alpha * inverse_seqlen), dk, first, length, grad_row, KEYS, DIM, sum_layout)
    _store(grad_value * inverse_seqlen, dv, first, length, grad_row, KEYS, DIM, sum_layout)


@_jit
def _query_grad_step(
    i, dq, query, grad, k_smem, k8_smem, v_smem, k_full, v_full, k_tiles, k8_tiles, v_tiles, k_row, v_row, column,
    num_tiles, first, q_scale, g_scale, k_descale, v_descale, user, head, num_heads, begin, schedule, num_users, length,
    start, end, history_end, contexts, window, group_size,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, HELD: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr,
):  # fmt: skip
    """A tile of keys; its product with dS still runs at the end."""
    slot = i % KEY_STAGES
    value_slot = i % VALUE_STAGES
    mbarrier.wait(k_full.index(slot), (i // KEY_STAGES) & 1)
    if MASKED:
        if end < start + KEYS:
            _zero_from(k_smem.index(slot), end - start, KEYS, DIM)
    s = warpgroup_mma(
        _first_operand(query, i, first, HELD), k8_smem.index(slot).permute((1, 0)),
        gl.zeros([ROWS, KEYS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(v_full.index(value_slot), (i // VALUE_STAGES) & 1)
    dp = warpgroup_mma(
        _first_operand(grad, i, first, HELD), v_smem.index(value_slot).permute((1, 0)),
        gl.zeros([ROWS, KEYS], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    s, dq = warpgroup_mma_wait(1, deps=[s, dq])
    gl.thread_barrier()
    # All are done with the keys of the tile before, whose place takes the next ones.
    before = (i + KEY_STAGES - 1) % KEY_STAGES
    _fetch_keys(
        k_tiles, k8_tiles, k_full.index(before), k_smem.index(before), k8_smem.index(before), k_row, column,
        (i > 0) & (i + KEY_STAGES - 1 < num_tiles), SCALES,
    )  # fmt: skip
    k_scale = _descales(
        k_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        KEYS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    _, slope = _silu(_scaled(s, q_scale, k_scale, SCALES))
    if MASKED:
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        keys = start + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
        seen = (
            _visible(
                rows[:, None],
                keys[None, :],
                history_end,
                contexts,
                window,
                group_size,
                CAUSAL,
                CONTEXTS,
                TARGETS,
                WINDOW,
            )
            & (keys < end)[None, :]
        )
        slope = gl.where(seen, slope, 0.0)
    v_scale = _descales(
        v_descale, user, head, num_heads, begin, schedule, num_users, start, length,
        KEYS, SCALES, gl.SliceLayout(0, s_layout),
    )  # fmt: skip
    dp = warpgroup_mma_wait(0, deps=[dp])
    gl.thread_barrier()
    _fetch(v_tiles, v_full.index(value_slot), v_smem.index(value_slot), v_row, column, i + VALUE_STAGES < num_tiles)
    ds = dp * slope
    if SCALES != "none":
        ds = _scaled(ds, g_scale, v_scale, SCALES)
    if MASKED:  # Beyond the user's end, where the slope is zero, dP may be anything.
        ds = gl.where(slope == 0.0, 0.0, ds)
    return warpgroup_mma(gl.convert_layout(ds.to(k_smem.dtype), a_layout), k_smem.index(slot), dq, is_async=True)


@_jit
def _fetch_keys(k_tiles, k8_tiles, ready, k_smem, k8_smem, row, column, pred, SCALES: gl.constexpr):
    if SCALES != "none":
        mbarrier.expect(ready, k_tiles.block_type.nbytes + k8_tiles.block_type.nbytes, pred=pred)
        tma.async_copy_global_to_shared(k8_tiles, [row, column], ready, k8_smem, pred=pred)
    else:
        mbarrier.expect(ready, k_tiles.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(k_tiles, [row, column], ready, k_smem, pred=pred)


@_jit(do_not_specialize=_PER_BATCH)
def query_grad_kernel(
    q_tiles, k_tiles, v_tiles, g_tiles, k8_tiles, q_descale, k_descale, v_descale, g_descale,
    dq, grad_row, schedule, offsets, num_contexts, num_targets,
    num_users, num_rows, num_heads, window, group_size, half_alpha, inverse_seqlen,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, CONTEXTS: gl.constexpr, TARGETS: gl.constexpr, WINDOW: gl.constexpr,
    SCALES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Gradient of a tile of rows' queries.

    In FP8 ``q_tiles``, ``v_tiles``, ``g_tiles`` and ``k8_tiles`` are of the quantized tensors.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, KEYS, 16 if SCALES == "none" else 32]
    )
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIM, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    head = gl.program_id(0) % num_heads
    slot = gl.program_id(0) // num_heads
    user, begin, length, tile = _find_tile(slot, schedule, offsets, num_users, num_rows, ROWS)
    num_blocks = _num_blocks(length, ROWS)
    if tile >= num_blocks:
        return
    first = (num_blocks - 1 - tile) * ROWS
    dq += begin * grad_row + head * DIM
    grad_query = gl.zeros([ROWS, DIM], gl.float32, sum_layout)
    if user == num_users:
        _store(grad_query, dq, first, length, grad_row, ROWS, DIM, sum_layout)
        return
    history_end, contexts = _user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = gl.minimum(first + ROWS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = _align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS
        )
    num_masked = _num_masked(a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
    num_tiles = num_masked + num_full
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [1, ROWS, DIM], q_tiles.layout)
    g_smem = gl.allocate_shared_memory(g_tiles.dtype, [1, ROWS, DIM], g_tiles.layout)
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [KEY_STAGES, KEYS, DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [VALUE_STAGES, KEYS, DIM], v_tiles.layout)
    if SCALES != "none":
        k8_smem = gl.allocate_shared_memory(k8_tiles.dtype, [KEY_STAGES, KEYS, DIM], k8_tiles.layout)
    else:
        k8_smem = k_smem
    qg_full = _barriers(1, 1)
    k_full = _barriers(KEY_STAGES, 1)
    v_full = _barriers(VALUE_STAGES, 1)
    fence_async_shared()
    row = begin.to(gl.int32)
    column = head * DIM
    mbarrier.expect(qg_full.index(0), 2 * q_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(q_tiles, [row + first, column], qg_full.index(0), q_smem.index(0))
    tma.async_copy_global_to_shared(g_tiles, [row + first, column], qg_full.index(0), g_smem.index(0))
    for stage in gl.static_range(KEY_STAGES):
        start, _ = _tile(stage, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        _fetch_keys(
            k_tiles, k8_tiles, k_full.index(stage), k_smem.index(stage), k8_smem.index(stage), row + start, column,
            stage < num_tiles, SCALES,
        )  # fmt: skip
        if stage < VALUE_STAGES:
            _fetch(v_tiles, v_full.index(stage), v_smem.index(stage), row + start, column, stage < num_tiles)
    q_scale = half_alpha * _user_descale(q_descale, k_descale, user, head, num_heads, SCALES)
    q_scale *= _descales(
        q_descale, user, head, num_heads, begin, schedule, num_users, first, length, ROWS, SCALES, row_layout
    )
    g_scale = _user_descale(g_descale, v_descale, user, head, num_heads, SCALES)
    g_scale *= _descales(
        g_descale, user, head, num_heads, begin, schedule, num_users, first, length, ROWS, SCALES, row_layout
    )
    mbarrier.wait(qg_full.index(0), 0)
    query = _operand(q_smem, HELD, s_layout)
    grad = _operand(g_smem, HELD, s_layout)
    grad_query = warpgroup_mma_init(grad_query)
    for i in range(num_masked):
        start, end = _masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        if SCALES != "none":
            end = length
        k_start, _ = _tile(i + KEY_STAGES - 1, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        v_start, _ = _tile(i + VALUE_STAGES, num_masked, full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        grad_query = _query_grad_step(
            i, grad_query, query, grad, k_smem, k8_smem, v_smem, k_full, v_full, k_tiles, k8_tiles, v_tiles,
            row + k_start, row + v_start, column, num_tiles, first, q_scale, g_scale, k_descale, v_descale,
            user, head, num_heads, begin, schedule, num_users, length, start, end,
            history_end, contexts, window, group_size, ROWS, KEYS, DIM, KEY_STAGES, VALUE_STAGES, True,
            CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, HELD, s_layout, a_layout,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        start = full + (i - num_masked) * KEYS
        grad_query = _query_grad_step(
            i, grad_query, query, grad, k_smem, k8_smem, v_smem, k_full, v_full, k_tiles, k8_tiles, v_tiles,
            row + start + (KEY_STAGES - 1) * KEYS, row + start + VALUE_STAGES * KEYS, column, num_tiles, first,
            q_scale, g_scale, k_descale, v_descale, user, head, num_heads, begin, schedule, num_users, length, start, 0,
            history_end, contexts, window, group_size, ROWS, KEYS, DIM, KEY_STAGES, VALUE_STAGES, False,
            CAUSAL, CONTEXTS, TARGETS, WINDOW, SCALES, HELD, s_layout, a_layout,
        )  # fmt: skip
    grad_query = warpgroup_mma_wait(0, deps=[grad_query])
    _store(grad_query * (half_alpha * inverse_seqlen), dq, first, length, grad_row, ROWS, DIM, sum_layout)


@dataclass(frozen=True)
class KeyTile:
    """Of dK and dV: rows against keys that a program takes at a time, and how many tiles of rows are in flight.

    split: one group of four warps sums dV, a second one dK, and num_warps is that of a group. Otherwise each group of
    four warps sums both, of 64 keys at most.
    """

    rows: int
    keys: int
    num_warps: int
    stages: int
    split: bool = False

    def __post_init__(self) -> None:
        check_number("rows", self.rows, 16, 128, power_of_two=True)
        check_number("keys", self.keys, 64, 128, power_of_two=True)
        check_number("num_warps", self.num_warps, 4, 4 if self.split else 8, power_of_two=True)
        check_number("stages", self.stages, 2, 8)  # with one, a tile would be overwritten while it is in use


@dataclass(frozen=True)
class QueryTile:
    """Of dQ: rows against keys that a program takes at a time, and how many tiles of keys and of values are in flight.

    held: what S and dP are made of on the side of the rows stays in registers.
    """

    rows: int
    keys: int
    num_warps: int
    key_stages: int
    value_stages: int
    held: bool = False

    def __post_init__(self) -> None:
        check_number("rows", self.rows, 64, 128, power_of_two=True)
        check_number("keys", self.keys, 16, 128, power_of_two=True)
        check_number("num_warps", self.num_warps, 4, 8, power_of_two=True)
        check_number("key_stages", self.key_stages, 2, 8)  # with one, keys would be overwritten while they are in use
        check_number("value_stages", self.value_stages, 1, 8)


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the two kernels."""

    key: KeyTile
    query: QueryTile


# The best of some tens on an H200 with Triton 3.6, full causal sequences of 4096. Of 64 in half precision the Triton
# kernels are as fast.
TILES = {
    128: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    256: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2, split=True),
        query=QueryTile(128, 64, num_warps=8, key_stages=2, value_stages=1),
    ),
}
FP8_TILES = {
    64: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2),
    ),
    128: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2),
        query=QueryTile(64, 64, num_warps=4, key_stages=2, value_stages=2, held=True),
    ),
    256: BackwardTiles(
        key=KeyTile(64, 64, num_warps=4, stages=2, split=True),
        query=QueryTile(128, 64, num_warps=8, key_stages=2, value_stages=2),
    ),
}
# With a descale for each row, all of which are loaded for each tile.
FP8_ROW_TILES = {
    64: FP8_TILES[64],
    128: BackwardTiles(
        key=KeyTile(32, 64, num_warps=4, stages=3),
        query=QueryTile(64, 32, num_warps=4, key_stages=3, value_stages=3),
    ),
    256: FP8_TILES[256],
}
tunable("hopper_backward", TILES)
tunable("hopper_backward_fp8", FP8_TILES)
tunable("hopper_backward_fp8_row", FP8_ROW_TILES)


def _table(scales: str) -> dict[int, BackwardTiles]:
    """Tiles by the width of heads; scales: "none", or of the FP8 mode."""
    tables = {"none": TILES, "row": FP8_ROW_TILES}
    return tables.get(scales, FP8_TILES)


def why_not(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, request: Request, scales: str = "none") -> str | None:
    """Why :func:`backward` can't serve such tensors, (T, H, d) all, on this device; None if it can."""
    inputs, widths = (q, k, v, grad_output), _table(scales)
    if gluon is None:
        return "Triton with Gluon is not installed"
    if not is_hopper(q):
        return "it needs a GPU of compute capability 9.0"
    if q.dtype not in (torch.bfloat16, torch.float16) or any(x.dtype != q.dtype for x in inputs):
        return f"q, k, v and the gradient must share bfloat16 or float16, not {', '.join(str(x.dtype) for x in inputs)}"
    if q.shape[2] not in widths or v.shape[2] != q.shape[2]:
        return f"heads of q and v share a width of {', '.join(map(str, widths))}, not {q.shape[2]} and {v.shape[2]}"
    if not all(has_whole_rows(x) for x in inputs):
        return "TMA takes heads that lie side by side, in rows that start at multiples of 16 bytes"
    return None if request.bias is None else "it has no relative bias"


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_output: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    schedule: Tensor,
    request: Request,
    fp8: ScoreTensors | None = None,
) -> None:
    """Fill the gradients of v, q and k, (T, H * d) each, all with the same distance between rows.

    schedule: of :func:`genrec.hstu.attention.launch.make_schedule`. Every number is summed in one program, in the same
    order every time.
    """
    dv, dq, dk = grads
    if request.num_users == 0:
        for x in grads:
            x.zero_()
        return
    scored = (None,) * 4 if fp8 is None else (fp8.q.values, fp8.k.values, fp8.v.values, fp8.grad.values)
    descales = (None,) * 4 if fp8 is None else (fp8.q.descale, fp8.k.descale, fp8.v.descale, fp8.grad.descale)
    q8, k8, v8, grad8 = scored
    scales = "none" if fp8 is None else fp8.scales
    batch = (schedule, *request.users(), *request.sizes(q), *request.factors())
    constants = {"DIM": q.shape[2], **request.mask_constants(), "SCALES": scales}
    tiles = _table(scales)[q.shape[2]]
    by_key, by_query = tiles.key, tiles.query
    rows, keys = by_key.rows, by_key.keys
    if by_key.split and fp8 is not None and 4 * rows > q.shape[2]:  # slopes lie where v was
        raise ValueError(f"split FP8 tiles have at most {q.shape[2] // 4} rows where heads are {q.shape[2]} wide")
    kernel, options = (split_key_grad_kernel, {"REGISTERS": _REGISTERS}) if by_key.split else (key_grad_kernel, {})
    kernel[request.grid(q, keys)](
        *_descriptors((q, rows), (k if k8 is None else k8, keys), (v if v8 is None else v8, keys), (grad_output, rows)),
        *_descriptors((q8, rows), (grad8, rows)),
        *(*descales, dk, dv, dk.stride(0), *batch),
        ROWS=rows,
        KEYS=keys,
        STAGES=by_key.stages,
        num_warps=by_key.num_warps,
        **options,
        **constants,
    )
    rows, keys = by_query.rows, by_query.keys
    query, value, of_output = (q, v, grad_output) if fp8 is None else (q8, v8, grad8)
    query_grad_kernel[request.grid(q, rows)](
        *_descriptors((query, rows), (k, keys), (value, keys), (of_output, rows), (k8, keys)),
        *(*descales, dq, dq.stride(0), *batch),
        ROWS=rows,
        KEYS=keys,
        KEY_STAGES=by_query.key_stages,
        VALUE_STAGES=by_query.value_stages,
        HELD=by_query.held,
        num_warps=by_query.num_warps,
        **constants,
    )


# Of a thread of the warp group with dK. The one with dV gets as many: what a block has, less the loader's 24.
_REGISTERS = 240


def _descriptors(*tensors: tuple[Tensor | None, int]) -> list[Any]:
    """TMA descriptors of (T, H, d), each for tiles of so many rows of one head; None of None."""
    return [None if x is None else descriptor(x, rows) for x, rows in tensors]
