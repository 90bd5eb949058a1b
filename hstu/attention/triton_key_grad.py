# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202
"""HSTU attention in Triton, backward: dK and dV, of which a program takes a tile of keys.

In FP8 (SCALES other than "none") the operands of S and dP are those of :mod:`genrec.hstu.attention.quantization`. With
"user" scales so are those of dV and dK, and tiles of rows start at multiples of ROWS from the user's first token.
"""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import jit, kernel, tl
from genrec.hstu.attention.triton_schedule import find_first_slot, find_tile
from genrec.hstu.attention.triton_scores import bias_indices, bias_of_pairs, load_times, one_plus_tanh
from genrec.hstu.attention.triton_spans import align_spans, count_masked, masked_tile, row_spans, user_parts, visible
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
def _key_grad_step(
    key, value, score_query, score_grad, query, grad, grad_key, grad_value, seen, half_bias, score_scale, grad_scale,
    weight_scale, ROWS: tl.constexpr, KEYS: tl.constexpr, TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dK and dV, keys down and rows across, so that scores are the first operand of the next products.

    key, value, score_query, score_grad: of S and dP, times score_scale (alpha / 2 with it) and grad_scale (or None).
    weight_scale: of P where query and grad are FP8 columns, else None; that of dS is in grad_scale.
    """
    half = tl.dot(key, tl.trans(score_query), input_precision=PRECISION) * score_scale
    if half_bias is not None:
        half += half_bias
    tanh_plus_one = one_plus_tanh(half, TANH)
    weights = half * tanh_plus_one
    grad_weights = tl.dot(value, tl.trans(score_grad), input_precision=PRECISION)
    if grad_scale is not None:
        grad_weights *= grad_scale
    grad_scores = grad_weights * (tanh_plus_one * (1.0 + half * (2.0 - tanh_plus_one)))
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
        grad_scores = tl.where(seen, grad_scores, 0.0)
    if weight_scale is not None:
        grad_value = add_fp8_product(weights * weight_scale, grad, grad_value, KEYS, ROWS)
        grad_key = add_fp8_product(grad_scores, query, grad_key, KEYS, ROWS)
    else:
        grad_value = tl.dot(weights.to(grad.dtype), grad, grad_value, input_precision=PRECISION)
        grad_scores = grad_scores.to(query.dtype)
        grad_key = tl.dot(grad_scores, query, grad_key, input_precision=PRECISION)
    return grad_key, grad_value, grad_scores


@jit
def _add_query_grad(
    grad_scores, key, begin, start, end, head, dq_sum_tiles,
    ROWS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a tile of keys gives rows start..end to the sums that all tiles share."""
    share = tl.dot(tl.trans(grad_scores), key, input_precision=PRECISION)
    rows = start + tl.arange(0, ROWS)[:, None]
    # A whole tile is added, beyond the user's end too: whatever its keys hold, nothing may reach the next user.
    share = tl.where(rows < end, share, 0.0)
    dq_sum_tiles.atomic_add([(begin + start).to(tl.int32), head * DIM], share)


@kernel()
def key_grad_kernel(
    q, k, v, grad_out, q_fp8, k_fp8, v_fp8, grad_fp8, q_descale, k_descale, v_descale, grad_descale,
    weight_scale, score_scales, dk, dv, query_tiles, grad_tiles, dq_sum_tiles,
    schedule, num_contexts, num_targets, position_weight, time_weight, query_times, key_times,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, grad_row,
    num_users, num_heads, window, group_size, num_positions, num_buckets, half_alpha, inverse_seqlen,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, over all rows that see them.

    Given ``dq_sum_tiles``, a TMA descriptor of float32 (T, H * QK_DIM), also adds what they give to the gradients of
    those rows' queries, without their factor. ``x_fp8``, ``x_descale``: None but in FP8, where they make S and dP. With
    "user" scales q and grad_out are blocks of columns, k and v None, and weight_scale and score_scales are not.
    """
    head = tl.program_id(0) % num_heads
    slot = tl.program_id(0) // num_heads
    user, begin, length, tile = find_tile(slot, schedule, num_users, KEYS)
    first = tile * KEYS  # A user's first keys have the most rows.
    if first >= length:
        return
    dk += begin * grad_row + head * QK_DIM
    dv += begin * grad_row + head * V_DIM
    grad_key = tl.full((KEYS, QK_DIM), 0.0, tl.float32)
    grad_value = tl.full((KEYS, V_DIM), 0.0, tl.float32)
    if user == num_users:
        store(grad_key, dk, first, length, grad_row, KEYS, QK_DIM)
        store(grad_value, dv, first, length, grad_row, KEYS, V_DIM)
        return
    if SCALES != "user":
        q += begin * q_row + head * q_head
        k += begin * k_row + head * k_head
        v += begin * v_row + head * v_head
        grad_out += begin * out_row + head * out_head
    history_end, contexts = user_parts(user, length, num_contexts, num_targets, CONTEXTS, TARGETS)
    last = tl.minimum(first + KEYS, length) - 1
    full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = row_spans(
        first, last, length, history_end, contexts, window, group_size, ROWS, CAUSAL, CONTEXTS, TARGETS, WINDOW
    )
    if SCALES == "none" or dq_sum_tiles is not None:
        key = load(k, first, length, k_row, KEYS, QK_DIM, True)
    if SCALES == "none":
        score_key = key
        score_value = load(v, first, length, v_row, KEYS, V_DIM, True)
    else:
        first_slot = find_first_slot(user, schedule, num_users)
        score_key, key_scale = load_fp8(
            k_fp8, k_descale, user, head, num_heads, begin, first_slot, first, length, KEYS, QK_DIM, SCALES
        )
        score_value, value_scale = load_fp8(
            v_fp8, v_descale, user, head, num_heads, begin, first_slot, first, length, KEYS, V_DIM, SCALES
        )
        key_scale *= half_alpha
    weight_factor = None
    if SCALES == "user":
        full, num_full, a, a_end, b, b_end, c, c_end, d, d_end = align_spans(
            full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, ROWS
        )
        weight_factor = tl.load(weight_scale + user * num_heads + head)
        score_factor = 0.5 * tl.load(score_scales + user * num_heads + head)
        value_scale *= score_factor
    keys = first + tl.arange(0, KEYS)[:, None]
    if BIAS:
        query_times += begin
        times = load_times(key_times + begin, first, length, KEYS)[:, None]
    for i in range(count_masked(a, a_end, b, b_end, c, c_end, d, d_end, ROWS)):
        start, end = masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, ROWS)
        if SCALES == "user":
            end = length
            query = load_columns(q, first_slot, head, num_heads, start, ROWS, QK_DIM)
            grad = load_columns(grad_out, first_slot, head, num_heads, start, ROWS, V_DIM)
        else:
            query = load(q, start, end, q_row, ROWS, QK_DIM, True)
            grad = load(grad_out, start, end, out_row, ROWS, V_DIM, True)
        score_query, score_grad, score_scale, grad_scale = query, grad, half_alpha, None
        if SCALES != "none":
            score_query, score_grad, score_scale, grad_scale = load_fp8_operands(
                q_fp8, grad_fp8, q_descale, grad_descale, key_scale, value_scale,
                user, head, num_heads, begin, first_slot, start, end, ROWS, QK_DIM, V_DIM, SCALES,
            )  # fmt: skip
        rows = start + tl.arange(0, ROWS)[None, :]
        seen = visible(rows, keys, history_end, contexts, window, group_size, CAUSAL, CONTEXTS, TARGETS, WINDOW)
        seen = seen & (rows < end)
        if BIAS:
            row_times = load_times(query_times, start, end, ROWS)[None, :]
            place, bucket = bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = bias_of_pairs(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_key, grad_value, grad_scores = _key_grad_step(
            score_key, score_value, score_query, score_grad, query, grad, grad_key, grad_value, seen, half_bias,
            score_scale, grad_scale, weight_factor, ROWS, KEYS, TANH, PRECISION,
        )  # fmt: skip
        if dq_sum_tiles is not None:
            _add_query_grad(grad_scores, key, begin, start, end, head, dq_sum_tiles, ROWS, QK_DIM, PRECISION)
    for i in range(num_full):
        start = full + i * ROWS
        if SCALES == "user":
            query = load_columns(q, first_slot, head, num_heads, start, ROWS, QK_DIM)
            grad = load_columns(grad_out, first_slot, head, num_heads, start, ROWS, V_DIM)
        else:
            query = load_full(query_tiles, q, begin, start, head, q_row, ROWS, QK_DIM)
            grad = load_full(grad_tiles, grad_out, begin, start, head, out_row, ROWS, V_DIM)
        score_query, score_grad, score_scale, grad_scale = query, grad, half_alpha, None
        if SCALES != "none":
            score_query, score_grad, score_scale, grad_scale = load_fp8_operands(
                q_fp8, grad_fp8, q_descale, grad_descale, key_scale, value_scale,
                user, head, num_heads, begin, first_slot, start, length, ROWS, QK_DIM, V_DIM, SCALES,
            )  # fmt: skip
        if BIAS:
            rows = start + tl.arange(0, ROWS)[None, :]
            row_times = load_times(query_times, start, length, ROWS)[None, :]
            place, bucket = bias_indices(rows, keys, row_times, times, history_end, num_positions, num_buckets)
            half_bias = bias_of_pairs(place, bucket, position_weight, time_weight)
        else:
            half_bias = None
        grad_key, grad_value, grad_scores = _key_grad_step(
            score_key, score_value, score_query, score_grad, query, grad, grad_key, grad_value, None, half_bias,
            score_scale, grad_scale, weight_factor, ROWS, KEYS, TANH, PRECISION,
        )  # fmt: skip
        if dq_sum_tiles is not None:
            _add_query_grad(grad_scores, key, begin, start, start + ROWS, head, dq_sum_tiles, ROWS, QK_DIM, PRECISION)
    key_factor = half_alpha * inverse_seqlen
    if SCALES == "user":
        key_factor *= tl.load(q_descale + user * num_heads + head) / score_factor
        inverse_seqlen *= tl.load(grad_descale + user * num_heads + head) / weight_factor
    store(grad_key * key_factor, dk, first, length, grad_row, KEYS, QK_DIM)
    store(grad_value * inverse_seqlen, dv, first, length, grad_row, KEYS, V_DIM)
