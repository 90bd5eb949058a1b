# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202
"""HSTU attention in Triton, backward: dQ and the bias's gradients; a program takes a tile of rows.

In FP8 (SCALES other than "none") the operands of S and dP are those of :mod:`genrec.hstu.attention.quantization`. With
"user" scales so are those of dQ, and tiles of keys start at multiples of KEYS from the user's first token.
"""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import jit, kernel, tl
from genrec.hstu.attention.triton_schedule import count_blocks, find_first_slot, find_tile
from genrec.hstu.attention.triton_scores import bias_indices, bias_of_pairs, load_times, one_plus_tanh
from genrec.hstu.attention.triton_spans import align_spans, count_masked, key_spans, masked_tile, user_parts, visible
from genrec.hstu.attention.triton_tiles import (
    add_fp8_product,
    load,
    load_columns,
    load_fp8,
    load_fp8_operands,
    load_full,
    store,
)


@jit
def _query_grad_step(
    query, grad, score_key, value, key, grad_query, seen, half_bias, score_scale, grad_scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One tile of dQ: with its sum so far, and the gradient of the scores but for the factors that all share.

    query, grad, score_key, value: of S and dP, times score_scale (alpha / 2 with it) and grad_scale (or None), which
    has dS's own scale with "user" scales, where key is FP8 columns.
    """
    half = tl.dot(query, tl.trans(score_key), input_precision=PRECISION) * score_scale
    if half_bias is not None:
        half += half_bias
    tanh_plus_one = one_plus_tanh(half, TANH)
    grad_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    if grad_scale is not None:
        grad_weights *= grad_scale
    grad_scores = grad_weights * (tanh_plus_one * (1.0 + half * (2.0 - tanh_plus_one)))
    if seen is not None:
        grad_scores = tl.where(seen, grad_scores, 0.0)
    if SCALES == "user":
        grad_query = add_fp8_product(grad_scores, key, grad_query, ROWS, KEYS)
    else:
        grad_query = tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision=PRECISION)
    return grad_query, grad_scores


@kernel()
def query_grad_kernel(
    q, k, v, grad_out, q_fp8, k_fp8, v_fp8, grad_fp8, q_descale, k_descale, v_descale, grad_descale, score_scales,
    dq, position_grad, time_grad, key_tiles, value_tiles,
    schedule, num_contexts, num_targets, position_weight, time_weight, query_times, key_times,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, grad_row,
    num_users, num_heads, window, group_size, num_positions, num_buckets, half_alpha, inverse_seqlen,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of rows' queries, over all keys that they see.

    ``x_fp8``, ``x_descale``: None but in FP8, where they make S and dP. With "user" scales k is blocks of columns, q, v
    and grad_out are None, and score_scales is not.
    """
    head = tl.program_id(0) % num_heads
    slot = tl.program_id(0) // num_heads
    user, begin, length, tile = find_tile(slot, schedule, num_users, ROWS)
    num_tiles = count_blocks(length, ROWS)
    if tile >= num_tiles:
        return
    first = (num_tiles - 1 - tile) * ROWS
    dq += begin * grad_row + head * QK_DIM
    grad_query = tl.full((ROWS, QK_DIM), 0.0, tl.float32)
    if user == num_users:
        store(grad_query, dq, first, length, grad_row, ROWS, QK_DIM)
        return
    if SCALES != "user":
        q += begin * q_row + head * q_head
        k += begin * k_row + head * k_head
        v += begin * v_row + head * v_head
        grad_out += begin * out_row + head * out_head
    history_end, contexts = user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = tl.minimum(first + ROWS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = key_spans(
        first, last, length, history_end, contexts, window, group_size, KEYS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES == "none":
        query = load(q, first, length, q_row, ROWS, QK_DIM, True)
        grad = load(grad_out, first, length, out_row, ROWS, V_DIM, True)
    else:
        first_slot = find_first_slot(user, schedule, num_users)
        query, query_scale = load_fp8(
            q_fp8, q_descale, user, head, num_heads, begin, first_slot, first, length, ROWS, QK_DIM, SCALES
        )
        grad, row_scale = load_fp8(
            grad_fp8, grad_descale, user, head, num_heads, begin, first_slot, first, length, ROWS, V_DIM, SCALES
        )
        query_scale *= half_alpha
    if SCALES == "user":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, KEYS
        )
        score_factor = 0.5 * tl.load(score_scales + user * num_heads + head)
        row_scale *= score_factor
    rows = first + tl.arange(0, ROWS)[:, None]
    if BIAS:
        key_times += begin
        row_times = load_times(query_times + begin, first, length, ROWS)[:, None]
        position_grad += (slot % SUMS) * num_positions
        time_grad += (slot % SUMS) * num_buckets
    for i in range(count_masked(a, a_end, b, b_end, c, c_end, d, d_end, KEYS)):
        start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, KEYS)
        if SCALES == "user":
            end = length
            key = load_columns(k, first_slot, head, num_heads, start, KEYS, QK_DIM)
        else:
            key = load(k, start, end, k_row, KEYS, QK_DIM, True)
        if SCALES == "none":
            score_key, score_scale, grad_scale = key, half_alpha, None
            value = load(v, start, end, v_row, KEYS, V_DIM, True)
        else:
            score_key, value, score_scale, grad_scale = load_fp8_operands(
                k_fp8, v_fp8, k_descale, v_descale, query_scale, row_scale,
                user, head, num_heads, begin, first_slot, start, end, KEYS, QK_DIM, V_DIM, SCALES,
            )  # fmt: skip
        keys = start + tl.arange(0, KEYS)[None, :]
        seen = visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        seen = seen & (keys < end)
        if BIAS:
            times = load_times(key_times, start, end, KEYS)[None, :]
            place, bucket = bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = bias_of_pairs(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_query, grad_scores = _query_grad_step(
            query, grad, score_key, value, key, grad_query, seen, half_bias, score_scale, grad_scale,
            ROWS, KEYS, TANH, PRECISION, SCALES,
        )  # fmt: skip
        if BIAS:
            grad_scores *= 0.5 * inverse_seqlen
            tl.atomic_add(position_grad + place, grad_scores, mask=seen & (rows < length), sem="relaxed")
            tl.atomic_add(time_grad + bucket, grad_scores, mask=seen & (rows < length), sem="relaxed")
    for i in range(num_full):
        start = full + i * KEYS
        if SCALES == "user":
            key = load_columns(k, first_slot, head, num_heads, start, KEYS, QK_DIM)
        else:
            key = load_full(key_tiles, k, begin, start, head, k_row, KEYS, QK_DIM)
        if SCALES == "none":
            score_key, score_scale, grad_scale = key, half_alpha, None
            value = load_full(value_tiles, v, begin, start, head, v_row, KEYS, V_DIM)
        else:
            score_key, value, score_scale, grad_scale = load_fp8_operands(
                k_fp8, v_fp8, k_descale, v_descale, query_scale, row_scale,
                user, head, num_heads, begin, first_slot, start, length, KEYS, QK_DIM, V_DIM, SCALES,
            )  # fmt: skip
        if BIAS:
            keys = start + tl.arange(0, KEYS)[None, :]
            times = load_times(key_times, start, length, KEYS)[None, :]
            place, bucket = bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = bias_of_pairs(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_query, grad_scores = _query_grad_step(
            query, grad, score_key, value, key, grad_query, None, half_bias, score_scale, grad_scale,
            ROWS, KEYS, TANH, PRECISION, SCALES,
        )  # fmt: skip
        if BIAS:
            grad_scores *= 0.5 * inverse_seqlen
            seen = (rows < length) & (keys < length)
            tl.atomic_add(position_grad + place, grad_scores, mask=seen, sem="relaxed")
            tl.atomic_add(time_grad + bucket, grad_scores, mask=seen, sem="relaxed")
    query_factor = half_alpha * inverse_seqlen
    if SCALES == "user":
        query_factor *= tl.load(k_descale + user * num_heads + head) / score_factor
    store(grad_query * query_factor, dq, first, length, grad_row, ROWS, QK_DIM)
