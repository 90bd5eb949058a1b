"""How events are split into train, valid and test: three rules, each a plan of how many events a user's rows hold.

=============  =====================================================================================================
"leave_last"   per user by time: the last ``holdout`` events are test, the ``holdout`` before them valid, the rest train
               (maybe none). A user with fewer than 2 * holdout events is too short: all stay in train.
"user"         70% of the users (drawn by the seed) are train with all their events, 15% valid and 15% test, of whom the
               last ``holdout`` events (all, if fewer) are targets. recsys-examples' 70/30, with its 30% halved so that
               nothing is chosen on the test users.
"global_time"  the first 80% of all events are train, then 10% valid, 10% test. Events at exactly a cut's time go to the
               later part, so that no timestamp is on both sides.
=============  =====================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from genrec.configs.schema import SPLIT_RULES
from genrec.data.format import SPLIT_NAMES, DataError, check_one_of
from genrec.data.source import EventSource

TRAIN_USERS = 0.70
GLOBAL_TIME_CUTS = (0.8, 0.9)


@dataclass(frozen=True)
class SplitPlan:
    """Per user, in the order of the users given: events a row of each split holds and how many of the last are targets.

    num_events, num_targets: split name to (U,) int64; users with a target are written to valid and test, and all users
    that are not held out are written to train, also those without events. in_train: (U,) bool.
    options: what metadata.json says of the rule. num_short_users: users left in train only.
    """

    num_events: dict[str, np.ndarray]
    num_targets: dict[str, np.ndarray]
    in_train: np.ndarray
    options: dict[str, Any]
    num_short_users: int = 0

    def is_written(self, split: str) -> np.ndarray:
        """(U,) bool: which users have a row in ``split``."""
        return self.in_train if split == "train" else self.num_targets[split] > 0


def check_split(rule: str, *, holdout: int) -> None:
    """Raises DataError for an unknown rule or a holdout below 1."""
    check_one_of(rule, field_name="split", allowed=SPLIT_RULES)
    if holdout < 1:
        raise DataError(f"holdout is {holdout}, allowed are whole numbers from 1")


def split_options(rule: str, *, holdout: int, seed: int) -> dict[str, Any]:
    """The options that decide a split, as metadata.json keeps them."""
    options: dict[str, dict[str, Any]] = {
        "leave_last": {"holdout": holdout},
        "user": {"holdout": holdout, "seed": seed, "train_users": TRAIN_USERS},
        "global_time": {"cuts": list(GLOBAL_TIME_CUTS)},
    }
    return {"rule": rule, **options[rule]}


def plan_split(
    source: EventSource, user_ids: np.ndarray, num_events: np.ndarray, *, rule: str, holdout: int, seed: int
) -> SplitPlan:
    """The plan of ``rule`` for users ``user_ids (U,)``, ascending, that have ``num_events (U,)`` events."""
    options = split_options(rule, holdout=holdout, seed=seed)
    if rule == "leave_last":
        return _leave_last(num_events, holdout=holdout, options=options)
    if rule == "user":
        return _by_user(num_events, holdout=holdout, seed=seed, options=options)
    return _global_time(source, user_ids, num_events, options=options)


def _nested(num_events: np.ndarray, train: np.ndarray, valid: np.ndarray, **plan: Any) -> SplitPlan:
    """A plan where each user's first ``train`` events are train, the next ``valid`` valid, and the rest test."""
    return SplitPlan(
        num_events={"train": train, "valid": train + valid, "test": num_events},
        num_targets={"train": train, "valid": valid, "test": num_events - train - valid},
        in_train=np.ones(len(num_events), dtype=bool),
        **plan,
    )


def _leave_last(num_events: np.ndarray, *, holdout: int, options: dict[str, Any]) -> SplitPlan:
    is_long = num_events >= 2 * holdout
    train = np.where(is_long, num_events - 2 * holdout, num_events)
    valid = np.where(is_long, holdout, 0)
    # Users without events are counted on their own.
    num_short = int((~is_long & (num_events > 0)).sum())
    return _nested(num_events, train, valid, options=options, num_short_users=num_short)


def _by_user(num_events: np.ndarray, *, holdout: int, seed: int, options: dict[str, Any]) -> SplitPlan:
    num_users = len(num_events)
    rank = np.empty(num_users, dtype=np.int64)
    rank[np.random.default_rng(seed).permutation(num_users)] = np.arange(num_users)
    num_train = round(TRAIN_USERS * num_users)
    num_valid = (num_users - num_train) // 2
    part = (rank >= num_train).astype(np.int64) + (rank >= num_train + num_valid)
    targets = np.minimum(num_events, holdout)
    return SplitPlan(
        num_events={name: np.where(part == i, num_events, 0) for i, name in enumerate(SPLIT_NAMES)},
        num_targets={
            "train": np.where(part == 0, num_events, 0),
            "valid": np.where(part == 1, targets, 0),
            "test": np.where(part == 2, targets, 0),
        },
        in_train=(part == 0) | (num_events == 0),
        options=options,
    )


def _global_time(
    source: EventSource, user_ids: np.ndarray, num_events: np.ndarray, *, options: dict[str, Any]
) -> SplitPlan:
    times = source.events.select("timestamp").collect(engine="streaming")["timestamp"].to_numpy()
    positions = [min(int(cut * len(times)), len(times) - 1) for cut in GLOBAL_TIME_CUTS]
    cuts = [int(np.partition(times, position)[position]) for position in positions]
    is_before = [pl.col("timestamp") < cut for cut in cuts]
    counts = [is_before[0].sum().cast(pl.Int64).alias("first"), is_before[1].sum().cast(pl.Int64).alias("second")]
    counted = source.events.group_by("user_id").agg(counts).collect(engine="streaming")
    first, second = np.zeros_like(num_events), np.zeros_like(num_events)
    rows = np.searchsorted(user_ids, counted["user_id"].to_numpy())
    first[rows], second[rows] = counted["first"].to_numpy(), counted["second"].to_numpy()
    return _nested(num_events, first, second - first, options={**options, "cut_timestamps": cuts})
