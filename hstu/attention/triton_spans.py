# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
"""Who sees whom, and so which tiles a program visits.

A row's keys lie in few spans (history, its window, contexts, its own group of targets). What all rows of a tile see
goes through a loop without any mask; the borders of the spans go through a second one, tile by tile, masked.
"""

from __future__ import annotations

from genrec.hstu.attention.triton_jit import jit, tl
from genrec.hstu.attention.triton_schedule import count_blocks


@jit
def user_parts(user, length, num_contexts, num_targets, CONTEXTS: tl.constexpr, TARGETS: tl.constexpr):
    """(where history ends, how many contexts), kept within the user whatever the tensors say."""
    history_end = length
    if TARGETS:
        history_end = length - tl.minimum(tl.maximum(tl.load(num_targets + user).to(tl.int32), 0), length)
    contexts = 0
    if CONTEXTS != "none":
        contexts = tl.minimum(tl.load(num_contexts + user).to(tl.int32), history_end)
    return history_end, contexts


@jit
def visible(
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


@jit
def key_spans(
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
    full_low = low + count_blocks(full_low - low, BLOCK) * BLOCK  # The masked tiles before it cover these too.
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


@jit
def row_spans(
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
    full_low = low + count_blocks(full_low - low, BLOCK) * BLOCK  # The masked tiles before it cover these too.
    num_full = tl.maximum(full_high - full_low, 0) // BLOCK
    full_low = tl.where(num_full > 0, full_low, low)
    return full_low, num_full, 0, context_high, low, full_low, full_low + num_full * BLOCK, high, 0, 0


@jit
def align_spans(full, num_full, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: tl.constexpr):
    """The spans of :func:`key_spans` with tiles that start at multiples of BLOCK; none is visited twice."""
    full_end = full + num_full * BLOCK
    a_end = count_blocks(a_end, BLOCK) * BLOCK
    b = tl.maximum(b // BLOCK * BLOCK, a_end)
    full = count_blocks(full, BLOCK) * BLOCK
    num_full = tl.maximum(full_end - full, 0) // BLOCK
    full = tl.where(num_full > 0, full, b)
    c_end = count_blocks(c_end, BLOCK) * BLOCK
    d = tl.maximum(d // BLOCK * BLOCK, tl.maximum(a_end, c_end))
    return full, num_full, a, a_end, b, full, full + num_full * BLOCK, c_end, d, d_end


@jit
def masked_tile(i, a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: tl.constexpr):
    """(start, end of its span) of the i-th tile of four spans."""
    start = a + i * BLOCK
    end = a_end
    i -= count_blocks(a_end - a, BLOCK)
    start, end = tl.where(i >= 0, b + i * BLOCK, start), tl.where(i >= 0, b_end, end)
    i -= count_blocks(b_end - b, BLOCK)
    start, end = tl.where(i >= 0, c + i * BLOCK, start), tl.where(i >= 0, c_end, end)
    i -= count_blocks(c_end - c, BLOCK)
    start, end = tl.where(i >= 0, d + i * BLOCK, start), tl.where(i >= 0, d_end, end)
    return start, end


@jit
def count_masked(a, a_end, b, b_end, c, c_end, d, d_end, BLOCK: tl.constexpr):
    """How many tiles four spans have."""
    history = count_blocks(b_end - b, BLOCK) + count_blocks(c_end - c, BLOCK)
    return count_blocks(a_end - a, BLOCK) + history + count_blocks(d_end - d, BLOCK)
