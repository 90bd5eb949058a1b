"""The three split rules, as properties of any lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.data.format import DataError
from genrec.data.splits import check_split, plan_split, split_options

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any)


def plan(make_source, lengths, rule, holdout=2, seed=3):
    users = np.arange(len(lengths)) + 100
    return plan_split(make_source(lengths), users, np.array(lengths), rule=rule, holdout=holdout, seed=seed)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(lengths=LENGTHS, holdout=st.integers(1, 4))
def test_leave_last(make_source, lengths, holdout):
    split = plan(make_source, lengths, "leave_last", holdout)
    sizes = np.array(lengths)
    is_long = sizes >= 2 * holdout
    for name in ("valid", "test"):
        assert (split.num_targets[name] == np.where(is_long, holdout, 0)).all()
    assert (sum(split.num_targets.values()) == sizes).all()
    assert split.num_short_users == (~is_long & (sizes > 0)).sum()
    assert split.is_written("train").all()


@settings(max_examples=15, derandomize=True, deadline=None)
@given(lengths=LENGTHS)
def test_global_time_puts_no_time_on_both_sides(make_source, lengths):
    split = plan(make_source, lengths, "global_time")
    assert (sum(split.num_targets.values()) == np.array(lengths)).all()
    first, second = split.options["cut_timestamps"]
    starts = np.cumsum([0, *lengths[:-1]]) * 10  # the timestamps of make_source
    for user, length in enumerate(lengths):
        times = starts[user] + np.arange(length) * 10
        assert split.num_targets["train"][user] == (times < first).sum()
        assert split.num_targets["test"][user] == (times >= second).sum()


def test_user_split_holds_out_whole_users(make_source):
    lengths = [5] * 100 + [0, 1]
    split = plan(make_source, lengths, "user", holdout=2)
    train = split.is_written("train") & (np.array(lengths) > 0)
    valid, test = split.is_written("valid"), split.is_written("test")
    assert (train.astype(int) + valid + test == (np.array(lengths) > 0)).all()
    assert split.is_written("train")[100]  # a user without events is kept
    assert abs(int(train.sum()) - 71) <= 1 and abs(int(valid.sum()) - int(test.sum())) <= 2
    assert (split.num_targets["test"][test] == np.minimum(np.array(lengths)[test], 2)).all()
    again = plan(make_source, lengths, "user", holdout=2)
    assert (again.in_train == split.in_train).all()
    assert (plan(make_source, lengths, "user", holdout=2, seed=4).in_train != split.in_train).any()


def test_bad_options():
    with pytest.raises(DataError, match="split is 'random', allowed are 'leave_last', 'user', 'global_time'"):
        check_split("random", holdout=1)
    with pytest.raises(DataError, match="holdout is 0"):
        check_split("leave_last", holdout=0)
    assert split_options("leave_last", holdout=3, seed=1) == {"rule": "leave_last", "holdout": 3}
