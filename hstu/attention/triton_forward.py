# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202
"""HSTU attention in Triton, forward: a program takes a tile of rows.

In FP8 (SCALES other than "none") the operands of S and O = P v are those of
:mod:`genrec.hstu.attention.quantization`, and tiles of keys start at multiples of KEYS from the user's first token, as
the blocks of v do.
"""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import jit, kernel, tl
from genrec.hstu.attention.triton_schedule import FP8_BLOCK, count_blocks, find_first_slot, find_tile
from genrec.hstu.attention.triton_scores import bias_indices, bias_of_pairs, load_times, one_plus_tanh
from genrec.hstu.attention.triton_spans import align_spans, count_masked, key_spans, masked_tile, user_parts, visible
from genrec.hstu.attention.triton_tiles import (
    add_fp8_product,
    as_fp8_operand,
    load,
    load_columns,
    load_descales,
    load_full,
    outer,
    store,
)


@jit
def _add_fp8_values(
    weights, output, tiles, tile_descales, first_slot, head, num_heads, start,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """output + P v, of weights (ROWS, KEYS) times their scale; but for v's descale where the whole user has one."""
    value = load_columns(tiles, first_slot, head, num_heads, start, KEYS, DIM)
    if SCALES == "user":
        return add_fp8_product(weights, value, output, ROWS, KEYS)
    weights = as_fp8_operand(weights, ROWS, KEYS)
    block = (first_slot + start // FP8_BLOCK) * num_heads + head
    if SCALES == "block":
        return output + tl.dot(weights, value) * tl.load(tile_descales + block)
    return output + tl.dot(weights, value) * tl.load(tile_descales + block * DIM + tl.arange(0, DIM))[None, :]


@kernel()
def forward_kernel(
    q, k, v, out, key_tiles, value_tiles, q_descale, k_descale, v_descale, weight_scale,
    schedule, num_contexts, num_targets, position_weight, time_weight, query_times, key_times,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    num_users, num_heads, window, group_size, num_positions, num_buckets, half_alpha, inverse_seqlen,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head.

    ``x_row``, ``x_head``: distances between rows and between heads of x. ``x_tiles``: its TMA descriptor or None. In
    FP8 v is its tiles, and the four before ``schedule`` are not None.
    """
    head = tl.program_id(0) % num_heads
    slot = tl.program_id(0) // num_heads
    user, begin, length, tile = find_tile(slot, schedule, num_users, ROWS)
    num_tiles = count_blocks(length, ROWS)
    if tile >= num_tiles:
        return
    first = (num_tiles - 1 - tile) * ROWS  # A user's last rows have the most keys: they start first.
    out += begin * out_row + head * out_head
    output = tl.full((ROWS, V_DIM), 0.0, tl.float32)
    if user == num_users:
        store(output, out, first, length, out_row, ROWS, V_DIM)
        return
    q += begin * q_row + head * q_head
    k += begin * k_row + head * k_head
    if SCALES == "none":
        v += begin * v_row + head * v_head
    history_end, contexts = user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = tl.minimum(first + ROWS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    query = load(q, first, length, q_row, ROWS, QK_DIM, True)
    rows = first + tl.arange(0, ROWS)[:, None]
    if BIAS:
        key_times += begin
        row_times = load_times(query_times + begin, first, length, ROWS)[:, None]
    if SCALES != "none":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS
        )
        first_slot = find_first_slot(user, schedule, num_users)
        factor = tl.load(weight_scale + user * num_heads + head)
        row_scale = half_alpha * load_descales(
            q_descale, user, head, num_heads, begin, first_slot, first, length, ROWS, SCALES
        )
    for i in range(count_masked(a, a_end, b, b_end, c, c_end, d, d_end, KEYS)):
        start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        if SCALES != "none":
            end = length
            key_scale = load_descales(k_descale, user, head, num_heads, begin, first_slot, start, end, KEYS, SCALES)
            score_scale = outer(row_scale, key_scale, SCALES)
        else:
            score_scale = half_alpha
        key = load(k, start, end, k_row, KEYS, QK_DIM, True)
        half = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
        keys = start + tl.arange(0, KEYS)[None, :]
        if BIAS:
            times = load_times(key_times, start, end, KEYS)[None, :]
            place, bucket = bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half += bias_of_pairs(place, bucket, position_weight, time_weight)
        seen = visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        weights = tl.where(seen & (keys < end), half * one_plus_tanh(half, TANH), 0.0)
        if SCALES != "none":
            output = _add_fp8_values(
                weights * factor, output, v, v_descale, first_slot, head, num_heads, start, ROWS, KEYS, V_DIM, SCALES
            )
        else:
            value = load(v, start, end, v_row, KEYS, V_DIM, True)
            output = tl.dot(weights.to(value.dtype), value, output, input_precision=PRECISION)
    for i in range(num_full):
        start = full + i * KEYS
        if SCALES != "none":
            key_scale = load_descales(k_descale, user, head, num_heads, begin, first_slot, start, length, KEYS, SCALES)
            score_scale = outer(row_scale, key_scale, SCALES)
        else:
            score_scale = half_alpha
        key = load_full(key_tiles, k, begin, start, head, k_row, KEYS, QK_DIM)
        half = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
        if BIAS:
            keys = start + tl.arange(0, KEYS)[None, :]
            times = load_times(key_times, start, length, KEYS)[None, :]
            place, bucket = bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half += bias_of_pairs(place, bucket, position_weight, time_weight)
        weights = half * one_plus_tanh(half, TANH)
        if SCALES != "none":
            output = _add_fp8_values(
                weights * factor, output, v, v_descale, first_slot, head, num_heads, start, ROWS, KEYS, V_DIM, SCALES
            )
        else:
            value = load_full(value_tiles, v, begin, start, head, v_row, KEYS, V_DIM)
            output = tl.dot(weights.to(value.dtype), value, output, input_precision=PRECISION)
    if SCALES != "none":
        inverse_seqlen /= factor
    if SCALES == "user":
        inverse_seqlen *= tl.load(v_descale + user * num_heads + head)
    store(output * inverse_seqlen, out, first, length, out_row, ROWS, V_DIM)
