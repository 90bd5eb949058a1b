"""Balanced shares: a partition, even in count, better than contiguous slices, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.data.balance import Imbalance, SequenceCost, partition

COST = SequenceCost()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(lengths=st.lists(st.integers(0, 500), max_size=40), parts=st.integers(1, 6))
def test_is_a_partition_with_even_counts(lengths, parts):
    costs = COST(np.array(lengths, dtype=np.int64))
    sets = partition(costs, parts)
    assert len(sets) == parts
    assert sorted(np.concatenate(sets).tolist()) == list(range(len(lengths)))
    counts = [len(places) for places in sets]
    assert max(counts) - min(counts) <= 1
    assert all((np.diff(places) > 0).all() for places in sets)
    again = partition(costs, parts)
    assert all(np.array_equal(a, b) for a, b in zip(sets, again, strict=True))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_evens_out_zipf_lengths(world_size):
    lengths = np.minimum(np.random.default_rng(0).zipf(1.3, size=32 * world_size), 4096)
    costs = COST(lengths)
    sums = np.array([costs[places].sum() for places in partition(costs, world_size)])
    slices = costs.reshape(world_size, -1).sum(axis=1)
    # Nothing can be below the largest sequence or the mean.
    assert sums.max() <= 1.05 * max(costs.max(), costs.sum() / world_size)
    assert sums.max() <= slices.max()


def test_costs_are_of_tokens():
    assert COST(np.array([0, 3])).tolist() == [0.0, 9.0]
    # 1 + 2 * 3 = 7 tokens: 10 * 7 + 7^2; a user without events still has its context.
    assert SequenceCost(linear=10, tokens_per_event=2, num_contexts=1)(np.array([0, 3])).tolist() == [11.0, 119.0]


def test_the_linear_term_matters():
    """Wide layers make tokens count, not their squares: shares are then even in tokens."""
    lengths = np.random.default_rng(1).integers(1, 100, size=40)
    gaps = {}
    for linear in (0.0, 1e5):
        sums = [lengths[places].sum() for places in partition(SequenceCost(linear=linear)(lengths), 4)]
        gaps[linear] = max(sums) - min(sums)
    assert 5 * gaps[1e5] < gaps[0.0], gaps


def test_imbalance():
    costs = np.array([8.0, 4.0, 3.0, 1.0])
    assert Imbalance.of([costs], 2) == Imbalance(sliced=12 / 8, balanced=9 / 8, num_batches=1)
    assert Imbalance.of([costs, np.ones(4)], 2) == Imbalance(sliced=1.25, balanced=17 / 16, num_batches=2)
    assert Imbalance.of([np.zeros(0), np.zeros(3)], 2) is None
    alone = Imbalance.of([np.array([5.0])], 4)  # one sequence for four ranks
    assert alone == Imbalance(sliced=4.0, balanced=4.0, num_batches=1)
