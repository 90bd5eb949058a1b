"""A rank's batch at a place in an epoch's order, made by the loader itself or by a worker process of it."""

from __future__ import annotations

import numpy as np
from torch.utils.data import Dataset

from genrec.data.balance import SequenceCost, partition
from genrec.data.batch import Batch
from genrec.data.collate import CollateOptions, collate
from genrec.data.dataset import SequenceDataset
from genrec.data.format import DataError
from genrec.data.windows import WindowPlan, shuffled_order


class BatchesByPlace(Dataset[Batch | DataError]):
    """Map-style: (epoch, first place of the global batch) to this rank's Batch."""

    def __init__(
        self,
        dataset: SequenceDataset,
        plan: WindowPlan,
        options: CollateOptions,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        balanced: bool,
        cost: SequenceCost,
    ) -> None:
        self.dataset, self.plan, self.options = dataset, plan, options
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.shuffle, self.balanced, self.cost = shuffle, balanced, cost
        self._lengths = plan.lengths
        self._order: tuple[int, np.ndarray] | None = None

    def __getitem__(self, key: tuple[int, int]) -> Batch | DataError:
        epoch, place = key
        windows = self._windows(epoch, place)
        if self.balanced:
            share = windows[partition(self.costs(epoch, place), self.world_size)[self.rank]]
        else:
            share = np.array_split(windows, self.world_size)[self.rank]
        try:
            return collate(self.dataset, self.plan, share, options=self.options, epoch=epoch)
        except DataError as error:
            # Returned, because a worker process would wrap what it raises in its traceback.
            return error

    def costs(self, epoch: int, place: int) -> np.ndarray:
        """The work of each sequence of the global batch at ``place``, (N,); event dropout, drawn later, isn't known."""
        return self.cost(self._lengths[self._windows(epoch, place)])

    def _windows(self, epoch: int, place: int) -> np.ndarray:
        return self._epoch_order(epoch)[place : place + self.batch_size * self.world_size]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(len(self.plan))
            if self.shuffle:
                groups, _ = self.dataset.locate(self.plan.row)
                rng = np.random.default_rng([self.options.seed, epoch])
                order = shuffled_order(groups, self.dataset.group_events, rng=rng)
            self._order = (epoch, order)
        return self._order[1]
