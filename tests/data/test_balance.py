"""Balanced shares: a partition, even in count, better than contiguous slices, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.data.balance import partition, sequence_costs


@settings(max_examples=60, derandomize=True, deadline=None)
@given(lengths=st.lists(st.integers(0, 500), max_size=40), parts=st.integers(1, 6))
def test_is_a_partition_with_even_counts(lengths, parts):
    costs = sequence_costs(np.array(lengths, dtype=np.int64))
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
    costs = sequence_costs(lengths)
    sums = np.array([costs[places].sum() for places in partition(costs, world_size)])
    slices = costs.reshape(world_size, -1).sum(axis=1)
    # Nothing can be below the largest sequence or the mean.
    assert sums.max() <= 1.05 * max(costs.max(), costs.sum() / world_size)
    assert sums.max() <= slices.max()


def test_costs():
    assert sequence_costs(np.array([0, 3])).tolist() == [0.0, 9.0]
