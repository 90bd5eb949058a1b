"""Which events of which user make one sequence, decided from lengths alone.

A window is a history slice and a target slice of one user's events (in training on every event the history is empty and
all events are targets). With at most 4 events a sequence, a user with 10 events::

    train, every event     [6 7 8 9] [2 3 4 5] [0 1]         newest first; each event is a target once
    train, 2 candidates    [6 7 | 8 9]                       at most max_history_seqlen events, then the candidates
    evaluate, 3 targets    [6 | 7 8 9]                       the newest history that fits

An evaluation user with more targets than fit is cut into windows of half the length of targets each, so that targets
have history too. In the "sequential" protocol a window's history is what comes just before it; in the "frozen" one it
lies before the user's first target.

A shuffled epoch takes the row groups of the files in random order, some at a time, and mixes the windows of those: a
small dataset is one such block and is mixed as a whole, a large one is still read about once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# About 200 MB decoded: what the cache of a SequenceDataset holds by default.
BLOCK_EVENTS = 8_000_000


@dataclass(frozen=True)
class WindowPlan:
    """All sequences of an epoch in their unshuffled order; every field is (W,) int64.

    row: the user. Events [history_start, history_stop) then [target_start, target_stop) of that user.
    """

    row: np.ndarray
    history_start: np.ndarray
    history_stop: np.ndarray
    target_start: np.ndarray
    target_stop: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def lengths(self) -> np.ndarray:
        """Events a sequence, (W,)."""
        return self.history_stop - self.history_start + self.target_stop - self.target_start


def plan_training(num_events: np.ndarray, *, max_history: int, max_candidates: int) -> WindowPlan:
    """Training windows of users with ``num_events (U,)`` events; users without events have none."""
    if max_candidates == 0:
        row, stop = _tile(num_events, np.full_like(num_events, max_history))
        start = np.maximum(stop - max_history, 0)
        return WindowPlan(row, history_start=start, history_stop=start, target_start=start, target_stop=stop)
    row = np.flatnonzero(num_events > 0)
    stop = num_events[row]
    target_start = np.maximum(stop - max_candidates, 0)
    history_start = np.maximum(target_start - max_history, 0)
    return WindowPlan(row, history_start, target_start, target_start, stop)


def plan_evaluation(num_events: np.ndarray, num_targets: np.ndarray, *, max_events: int, frozen: bool) -> WindowPlan:
    """Windows that have each of the last ``num_targets (U,)`` events as a target once."""
    fits = num_targets <= max_events
    tile = np.where(fits, num_targets, max(1, max_events // 2))
    row, stop_in_targets = _tile(num_targets, tile)
    first_target = (num_events - num_targets)[row]
    target_stop = first_target + stop_in_targets
    target_start = np.maximum(target_stop - tile[row], first_target)
    history_stop = first_target if frozen else target_start
    history_start = np.maximum(history_stop - (max_events - (target_stop - target_start)), 0)
    return WindowPlan(row, history_start, history_stop, target_start, target_stop)


def shuffled_order(
    window_groups: np.ndarray, group_events: np.ndarray, *, rng: np.random.Generator, block_events: int = BLOCK_EVENTS
) -> np.ndarray:
    """A random order (W,) of windows in row groups ``window_groups (W,)`` that have ``group_events (groups,)`` events.

    Blocks are random sets of groups with about ``block_events`` events: over by one group at most.
    """
    groups = rng.permutation(len(group_events))
    events_before = np.cumsum(group_events[groups]) - group_events[groups]
    block_of_group = np.empty(len(groups), dtype=np.int64)
    block_of_group[groups] = events_before // block_events
    return np.lexsort((rng.permutation(len(window_groups)), block_of_group[window_groups]))


def _tile(totals: np.ndarray, tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts each user's ``totals (U,)`` into tiles of ``tile (U,)`` from the newest end: user and end of tiles, (W,)."""
    counts = -(-totals // np.maximum(tile, 1))
    row = np.repeat(np.arange(len(totals)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, totals[row] - number * tile[row]
