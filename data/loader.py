"""SequenceLoader: a prepared split as Batches, the same whatever the number of ranks and workers, resumable anywhere.

An epoch is one order of all windows (windows.py). Global step s takes the next batch_size * world_size of them, each
rank its share. With 10 windows, batch_size 2 and 2 ranks::

    step 0: [0 1 | 2 3]    step 1: [4 5 | 6 7]    step 2: [8 | 9]      the last part is shared evenly, maybe as nothing

A batch is a function of (seed, epoch, place in the order): nothing random is kept, so the state is two counters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from genrec.data.balance import Imbalance, SequenceCost
from genrec.data.batch import Batch
from genrec.data.batches_by_place import BatchesByPlace
from genrec.data.collate import CollateOptions
from genrec.data.dataset import SequenceDataset
from genrec.data.format import LOADER_MODES, DataError, check_one_of
from genrec.data.item_features import read_padded_values
from genrec.data.windows import WindowPlan, plan_evaluation, plan_training
from genrec.data.worker_signals import outlive_sigterm, sigterm_held

LABELS = ("mask", "class")


class SequenceLoader:
    """Iterating yields the Batches of one epoch from the cursor on; the next iteration is the next epoch.

    mode: "train" (targets: every event, or the last ``max_num_candidates``), "sequential" or "frozen" (evaluation: the
    split's targets, as labelled history or as candidates). label: "mask" (the metadata's label_bits) or "class".
    max_history_seqlen, max_num_candidates: events. batch_size: sequences a rank. contextual_features: None for all.
    item_features: names of features of the items that each event gets. event_dropout: share of a training sequence's
    events left out, drawn anew each epoch; candidates and at least one event always stay. dynamic_features: names of
    features of which every id from 0 on is legal (not of actions, nor of items with item_features).
    balanced: ranks share each global batch so that the sums of ``cost`` are even (balance.py).

    Raises:
        DataError: an argument that cannot be; while iterating, an id outside its table or a damaged file.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        *,
        batch_size: int,
        mode: str,
        label: str,
        max_history_seqlen: int,
        max_num_candidates: int = 0,
        contextual_features: Sequence[str] | None = None,
        item_features: Sequence[str] = (),
        dynamic_features: Collection[str] = (),
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        event_dropout: float = 0.0,
        num_workers: int = 0,
        balanced: bool = False,
        cost: SequenceCost = SequenceCost(),  # noqa: B008 (frozen)
        pin_memory: bool = False,
    ) -> None:
        check_one_of(mode, field_name="mode", allowed=LOADER_MODES)
        check_one_of(label, field_name="label", allowed=LABELS)
        _check_at_least("batch_size", batch_size, 1)
        _check_at_least("max_history_seqlen", max_history_seqlen, 1)
        _check_at_least("max_num_candidates", max_num_candidates, 0)
        _check_at_least("num_workers", num_workers, 0)
        _check_at_least("seed", seed, 0)
        assert 0 <= rank < world_size, (rank, world_size)
        if mode == "train" and dataset.split != "train":
            raise DataError(f"mode is 'train' but the split is {dataset.split!r}, which must never be trained on")
        if not 0 <= event_dropout < 1 or (event_dropout > 0 and mode != "train"):
            raise DataError(f"event_dropout is {event_dropout}, allowed are 0 to below 1, and only 0 in evaluation")
        self.dataset = dataset
        self.plan = _plan(dataset, mode, max_history_seqlen, max_num_candidates)
        options = CollateOptions(
            contextual_features=_choose_contexts(dataset, contextual_features),
            item_features=_read_item_features(dataset, item_features),
            label=label,
            with_candidates=mode == "frozen" or (mode == "train" and max_num_candidates > 0),
            protect_targets=max_num_candidates > 0,
            event_dropout=event_dropout,
            seed=seed,
            dynamic_features=frozenset(dynamic_features),
        )
        self._batches = BatchesByPlace(
            dataset,
            self.plan,
            options,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            balanced=balanced,
            cost=cost,
        )
        self._global_batch_size = batch_size * world_size
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._epoch = 0
        self._num_consumed = 0  # sequences of the epoch handed out, over all ranks

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return len(self._places(0))

    def __iter__(self) -> Iterator[Batch]:
        if not self._places(self._num_consumed):
            self._epoch, self._num_consumed = self._epoch + 1, 0
        epoch = self._epoch
        places = self._places(self._num_consumed)
        batches = DataLoader(
            self._batches,
            sampler=[(epoch, place) for place in places],
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_unchanged,
            pin_memory=self._pin_memory,
            worker_init_fn=outlive_sigterm,
            generator=torch.Generator(),  # or it would draw a seed, which nothing here uses, from the global generator
        )
        with sigterm_held():
            read = iter(batches)
        for place, batch in zip(places, read, strict=True):
            if isinstance(batch, DataError):
                raise batch
            # Before the hand-out, so that a state saved while the batch is trained on doesn't hold it again.
            self._num_consumed = min(place + self._global_batch_size, len(self.plan))
            yield batch

    def imbalance(self, *, num_batches: int) -> Imbalance | None:
        """How uneven the ranks' work is, in at most ``num_batches`` global batches from the start of the epoch."""
        places = self._places(0)[:num_batches]
        return Imbalance.of((self._batches.costs(self._epoch, place) for place in places), self._batches.world_size)

    def state_dict(self) -> dict[str, int]:
        """The cursor: counts batches handed out, not those that workers have prefetched."""
        step = -(-self._num_consumed // self._global_batch_size)
        return {
            "epoch": self._epoch,
            "step": step,
            "num_consumed": self._num_consumed,
            "num_sequences": len(self.plan),
            "seed": self._batches.options.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the batches that ``state`` counts, also with another batch size or number of ranks.

        Raises:
            DataError: the state is of other data or another seed, whose order would be another.
        """
        own = self.state_dict()
        for name in ("num_sequences", "seed"):
            if state[name] != own[name]:
                raise DataError(f"the saved data position is of {name} {state[name]}, this run has {own[name]}")
        self._epoch = int(state["epoch"])
        self._num_consumed = int(state["num_consumed"])

    def _places(self, first: int) -> range:
        """Where in the epoch's order the global batches from ``first`` on start."""
        return range(first, len(self.plan), self._global_batch_size)


def _unchanged(batch: Any) -> Any:
    return batch


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise DataError(f"{name} is {value}, allowed are whole numbers from {least}")


def _plan(dataset: SequenceDataset, mode: str, max_history: int, max_candidates: int) -> WindowPlan:
    if mode == "train":
        return plan_training(dataset.num_events, max_history=max_history, max_candidates=max_candidates)
    return plan_evaluation(
        dataset.num_events, dataset.num_targets, max_events=max_history + max_candidates, frozen=mode == "frozen"
    )


def _choose_contexts(dataset: SequenceDataset, names: Sequence[str] | None) -> tuple[str, ...]:
    known = dataset.metadata.contextual_features
    for name in names or ():
        check_one_of(name, field_name="contextual_features", allowed=tuple(known))
    return tuple(known if names is None else names)


def _read_item_features(dataset: SequenceDataset, names: Sequence[str]) -> dict[str, np.ndarray]:
    for name in names:
        check_one_of(name, field_name="item_features", allowed=tuple(dataset.metadata.item_features))
    return {name: read_padded_values(dataset.directory, dataset.metadata, name) for name in names}
