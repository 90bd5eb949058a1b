"""Windows: every event once in training, every target once in evaluation, limits kept, newest history kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.data.windows import plan_evaluation, plan_training, shuffled_order

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=10)
EXAMPLES = settings(max_examples=60, derandomize=True, deadline=None)


@EXAMPLES
@given(lengths=LENGTHS, limit=st.integers(1, 15))
def test_training_on_every_event_covers_each_once_newest_first(lengths, limit):
    plan = plan_training(np.array(lengths), max_history=limit, max_candidates=0)
    seen = [(r, e) for r, a, b in zip(plan.row, plan.target_start, plan.target_stop, strict=True) for e in range(a, b)]
    assert sorted(seen) == [(user, event) for user, length in enumerate(lengths) for event in range(length)]
    assert (plan.lengths <= limit).all() and (plan.lengths > 0).all()
    for user in set(plan.row.tolist()):
        stops = plan.target_stop[plan.row == user]
        assert stops[0] == lengths[user] and (np.diff(stops) == -limit).all()


@EXAMPLES
@given(lengths=LENGTHS, limit=st.integers(1, 15), candidates=st.integers(1, 5))
def test_candidates_are_the_last_events_with_the_newest_history(lengths, limit, candidates):
    plan = plan_training(np.array(lengths), max_history=limit, max_candidates=candidates)
    assert plan.row.tolist() == [user for user, length in enumerate(lengths) if length]
    for row, start, stop, first, last in zip(*vars(plan).values(), strict=True):
        assert last == lengths[row] and last - first == min(candidates, lengths[row])
        assert stop == first and stop - start == min(limit, first)


@EXAMPLES
@given(data=st.data(), lengths=LENGTHS, limit=st.integers(1, 15), frozen=st.booleans())
def test_evaluation_has_each_target_once(data, lengths, limit, frozen):
    targets = [data.draw(st.integers(0, length)) for length in lengths]
    plan = plan_evaluation(np.array(lengths), np.array(targets), max_events=limit, frozen=frozen)
    seen = [(r, e) for r, a, b in zip(plan.row, plan.target_start, plan.target_stop, strict=True) for e in range(a, b)]
    wanted = [(user, event) for user, n in enumerate(lengths) for event in range(n - targets[user], n)]
    assert sorted(seen) == wanted
    assert (plan.lengths <= limit).all()
    for row, start, stop, first, last in zip(*vars(plan).values(), strict=True):
        assert stop == (lengths[row] - targets[row] if frozen else first)
        assert stop - start == min(stop, limit - (last - first))
        if targets[row] <= limit:
            assert last - first == targets[row]


def test_many_targets_leave_room_for_history():
    plan = plan_evaluation(np.array([30]), np.array([25]), max_events=8, frozen=False)
    assert (plan.target_stop - plan.target_start).tolist() == [4, 4, 4, 4, 4, 4, 1]
    assert (plan.history_stop - plan.history_start).tolist() == [4, 4, 4, 4, 4, 4, 5]


@EXAMPLES
@given(data=st.data(), group_events=st.lists(st.integers(0, 30), min_size=1, max_size=8), block=st.integers(1, 60))
def test_shuffled_order_reads_one_block_of_groups_after_another(data, group_events, block):
    groups = np.array(data.draw(st.lists(st.integers(0, len(group_events) - 1), max_size=40)), dtype=np.int64)
    rng = np.random.default_rng(data.draw(st.integers(0, 5)))
    order = shuffled_order(groups, np.array(group_events), rng=rng, block_events=block)
    assert sorted(order.tolist()) == list(range(len(groups)))
    first = {group: np.flatnonzero(groups[order] == group).min() for group in set(groups.tolist())}
    last = {group: np.flatnonzero(groups[order] == group).max() for group in first}
    for place in range(len(groups)):
        open_groups = [group for group in first if first[group] <= place <= last[group]]
        largest = max(group_events[group] for group in open_groups)
        assert sum(group_events[group] for group in open_groups) <= block + largest


def test_a_small_dataset_is_one_block():
    groups = np.repeat(np.arange(4), 500)
    order = shuffled_order(groups, np.full(4, 500), rng=np.random.default_rng(0))
    quarters = groups[order].reshape(4, 500)
    assert all(100 < (quarter == group).sum() < 150 for quarter in quarters for group in range(4))
