"""SyntheticLoader: random Batches from BenchmarkDatasetArgs, with the interface of SequenceLoader.

Sequence number n of a seed is always the same, whatever the batch size and the number of ranks. The
``num_generated_batches`` batches of an epoch are made on demand and kept, and every epoch repeats them, so that the
time of a training step is not the time of drawing numbers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
import torch

from genrec.configs.schema import BenchmarkDatasetArgs, DynamicEmbeddingArgs, FeatureArgs, RandomDistribution
from genrec.data.balance import Imbalance, SequenceCost, partition
from genrec.data.batch import Batch, jagged_features
from genrec.data.distributions import sample
from genrec.data.format import LOADER_MODES, DataError, check_one_of

logger = logging.getLogger(__name__)

MAX_GAP_S = 3600


class SyntheticLoader:
    """Iterating yields the rest of an epoch of ``num_generated_batches`` batches; all epochs are alike.

    Targets are the last ``max_num_candidates`` events, or all events if that is 0: candidates in the modes "train" and
    "frozen", labelled history in "sequential". Labels are uniform in [0, num_label_values): 2^tasks for bit masks,
    k for classes. Values without a distribution are uniform over their table; one without ``high`` is clamped to it.

    Raises:
        DataError: a contextual feature of more than one value, a distribution beyond its table, "frozen" without
            candidates.
    """

    def __init__(
        self,
        args: BenchmarkDatasetArgs,
        *,
        batch_size: int,
        num_label_values: int,
        mode: str = "train",
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        balanced: bool = False,
        cost: SequenceCost = SequenceCost(),  # noqa: B008 (frozen)
        pin_memory: bool = False,
    ) -> None:
        check_one_of(mode, field_name="mode", allowed=LOADER_MODES)
        if mode == "frozen" and args.max_num_candidates == 0:
            raise DataError("BenchmarkDatasetArgs.max_num_candidates is 0, frozen evaluation needs at least 1")
        self.args = args
        self._owners = _feature_owners(args)
        self._values = {name: _value_distribution(args, group, name) for name, group in self._owners.items()}
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._mode, self._seed, self._balanced, self._cost = mode, seed, balanced, cost
        self._num_label_values = num_label_values
        self._pin_memory = pin_memory
        self._epoch = 0
        self._step = 0
        self._made: dict[int, Batch] = {}

    def __len__(self) -> int:
        return self.args.num_generated_batches

    def __iter__(self) -> Iterator[Batch]:
        if self._step >= len(self):
            self._epoch, self._step = self._epoch + 1, 0
        for step in range(self._step, len(self)):
            if step not in self._made:
                made = self._make(step)
                self._made[step] = made.pin_memory() if self._pin_memory else made
            self._step = step + 1
            yield self._made[step]

    def imbalance(self, *, num_batches: int) -> Imbalance | None:
        """How uneven the ranks' work is, in at most ``num_batches`` global batches from the start of the epoch."""
        steps = range(min(num_batches, len(self)))
        return Imbalance.of((self._costs(step) for step in steps), self._world_size)

    def state_dict(self) -> dict[str, int]:
        """The cursor, in batches handed out."""
        return {"epoch": self._epoch, "step": self._step, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the batches that ``state`` counts; raises DataError if it is of another seed."""
        if state["seed"] != self._seed:
            raise DataError(f"the saved data position is of seed {state['seed']}, this run has {self._seed}")
        self._epoch, self._step = int(state["epoch"]), int(state["step"])

    def _make(self, step: int) -> Batch:
        numbers = self._numbers(step)
        if self._balanced:
            numbers = numbers[partition(self._costs(step), self._world_size)[self._rank]]
        else:
            numbers = np.array_split(numbers, self._world_size)[self._rank]
        return self._collate(numbers)

    def _numbers(self, step: int) -> np.ndarray:
        """The sequences of global batch ``step``."""
        first = step * self._batch_size * self._world_size
        return np.arange(first, first + self._batch_size * self._world_size)

    def _costs(self, step: int) -> np.ndarray:
        """The work of each sequence of global batch ``step``, (N,)."""
        return self._cost(np.array([self._length(self._rng(int(number))) for number in self._numbers(step)]))

    def _rng(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, number])

    def _length(self, rng: np.random.Generator) -> int:
        group = self._owners[self.args.item_feature_name]
        if not group.is_jagged:
            return group.max_sequence_length
        lengths = group.seqlen_dist or RandomDistribution(dist_type="uniform", high=group.max_sequence_length)
        return int(sample(lengths, 1, rng=rng)[0])

    def _collate(self, numbers: np.ndarray) -> Batch:
        contexts = self.args.contextual_feature_names
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*self._values, "label", "timestamp")}
        lengths, labelled = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
        for place, number in enumerate(numbers):
            rng = self._rng(int(number))
            length = lengths[place] = self._length(rng)  # first, so that balancing can draw it alone
            labelled[place] = min(length, self.args.max_num_candidates or length)
            for name, distribution in self._values.items():
                parts[name].append(sample(distribution, 1 if name in contexts else length, rng=rng))
            parts["label"].append(rng.integers(self._num_label_values, size=labelled[place]))
            parts["timestamp"].append(np.cumsum(rng.integers(MAX_GAP_S, size=length)))
        columns = {name: np.concatenate([np.empty(0, np.int64), *values]) for name, values in parts.items()}
        has_candidates = self._mode != "sequential" and self.args.max_num_candidates > 0
        return Batch(
            features=jagged_features({k: columns[k] for k in self._values}, lengths, num_contexts=len(contexts)),
            timestamps=torch.from_numpy(columns["timestamp"]),
            num_candidates=torch.from_numpy(labelled.copy() if has_candidates else np.zeros_like(labelled)),
            num_labelled=torch.from_numpy(labelled),
            labels=torch.from_numpy(columns["label"]),
            user_ids=torch.from_numpy(numbers.copy()),
            batch_size=len(numbers),
            max_num_events=int(lengths.max(initial=0)),
            item_feature_name=self.args.item_feature_name,
            action_feature_name=self.args.action_feature_name,
            contextual_feature_names=contexts,
        )


def _feature_owners(args: BenchmarkDatasetArgs) -> dict[str, FeatureArgs]:
    """Feature to its FeatureArgs: contexts, item, then action."""
    owners = {name: group for group in args.feature_args for name in group.feature_names}
    for name in args.contextual_feature_names:
        if owners[name].max_sequence_length != 1 or owners[name].is_jagged:
            raise DataError(
                f"contextual feature {name!r} has max_sequence_length {owners[name].max_sequence_length} and is_jagged"
                f" {owners[name].is_jagged}, allowed are 1 and False: one value a user"
            )
    action = [] if args.action_feature_name is None else [args.action_feature_name]
    used = [*args.contextual_feature_names, args.item_feature_name, *action]
    if unused := sorted(set(owners) - set(used)):
        logger.warning("synthetic features %s are neither item, action nor context and are left out", ", ".join(unused))
    return {name: owners[name] for name in used}


def _value_distribution(args: BenchmarkDatasetArgs, group: FeatureArgs, name: str) -> RandomDistribution:
    """The distribution of a feature's ids, within its table; where that is dynamic, ids are as they are drawn."""
    table = next(table for table in args.embedding_args if name in table.feature_names)
    num_rows = table.item_vocab_size_or_capacity
    given = (group.value_dists or {}).get(name)
    if given is None:
        return RandomDistribution(dist_type="uniform", high=num_rows)
    is_uniform = given.dist_type == "uniform"
    if isinstance(table, DynamicEmbeddingArgs):
        return dataclasses.replace(given, high=num_rows) if is_uniform and given.high is None else given
    limit = num_rows if is_uniform else num_rows - 1
    if given.low >= num_rows or (given.high is not None and given.high > limit):
        raise DataError(
            f"feature {name!r} draws ids from {given.low} to {given.high} but table {table.table_name!r} has {num_rows}"
            f" rows (ids 0 to {num_rows - 1})"
        )
    return given if given.high is not None else dataclasses.replace(given, high=limit)
