"""Time buckets: their edges, and that they don't show the future or other candidates."""

from __future__ import annotations

import pytest
import torch

from genrec.hstu.position import NUM_TIME_ROWS, PositionEncoding, event_time_buckets, time_bucket


def buckets(times, *, offsets, candidates=None, reference):
    candidates = candidates or [0] * (len(offsets) - 1)
    args = (torch.tensor(x, dtype=torch.int64) for x in (times, offsets, candidates))
    return event_time_buckets(*args, reference=reference).tolist()


def test_bucket_is_the_square_root_of_minutes():
    gaps = [-5, 0, 59, 60, 239, 240, 60 * 3**2 - 1, 60 * 3**2, 60 * 2047**2 - 1, 60 * 2048**2, 10**12]
    assert time_bucket(torch.tensor(gaps)).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 2046, 2048, 2048]
    squares = torch.arange(NUM_TIME_ROWS) ** 2 * 60
    assert time_bucket(squares).tolist() == list(range(NUM_TIME_ROWS))


def test_last_is_the_time_to_the_users_last_event():
    assert buckets([0, 60, 240, 7, 7], offsets=[0, 3, 3, 5], reference="last") == [2, 1, 0, 0, 0]


def test_previous_is_the_gap_before():
    times = [1000, 1000, 1060, 1300, 500, 740]
    assert buckets(times, offsets=[0, 4, 4, 6], reference="previous") == [0, 0, 1, 2, 0, 2]


def test_previous_of_a_candidate_is_the_end_of_the_history():
    times = [0, 60, 120, 300, 50, 110]
    got = buckets(times, offsets=[0, 4, 6], candidates=[2, 2], reference="previous")
    # Candidates at 120 and 300 come 60 and 240 s after the history's 60; without any history the bucket is 0.
    assert got == [0, 1, 1, 2, 0, 0]


def test_previous_reads_nothing_that_comes_later():
    times = torch.randint(0, 10**6, (12,)).cumsum(0)
    whole = buckets(times.tolist(), offsets=[0, 12], reference="previous")
    for end in range(1, 12):
        assert buckets(times[:end].tolist(), offsets=[0, end], reference="previous") == whole[:end]


@pytest.mark.parametrize("reference", ["last", "previous"])
def test_no_events(reference):
    assert buckets([], offsets=[0], reference=reference) == []
    assert buckets([], offsets=[0, 0, 0], reference=reference) == []


def test_tables_start_within_one_over_the_root_of_their_rows(make_network):
    encoding = PositionEncoding(make_network(num_position_buckets=100, use_time_encoding=True))
    assert encoding.position.abs().max() <= 0.1
    assert encoding.time.shape == (2049, 12)
    assert encoding.time.abs().max() <= 2049**-0.5
    assert PositionEncoding(make_network()).time is None
