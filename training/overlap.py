"""Overlap: while a step computes, the next steps' batches are on their way (TrainerArgs.pipeline_type).

Beside step i's forward and backward, each on a stream of its own::

    step i       i+1                            i+2
    computes     its ids arrive where the       is read, the ranks' counts are summed on the host, it is copied to
                 sharded tables lie; "prefetch" the device, and its ids set out for the sharded tables
                 caches their rows, too

The host does all of that once step i's backward is queued, so that the device has work meanwhile, and nothing of it
waits for the device: what is awaited was started a step before (pipeline.py).

Values are the same in all types: only when something is computed differs. Steps between two pauses (evaluation,
checkpoint, end) are read ahead, and never across a pause, so that nothing is in flight in one.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

from genrec.configs.schema import TrainerArgs
from genrec.model.embedding import FeatureEmbeddings
from genrec.training.feed import Feed, Read, StepCounts, StepInput, own_counts
from genrec.training.pipeline import InFlight, Lookups, StepPipeline, cached_tables
from genrec.training.ranks import Attempt, Ranks

LOG = logging.getLogger(__name__)
OVERLAPPING_DEVICES = ("cuda",)


class Cursor(Protocol):
    """A loader's place in its data."""

    def state_dict(self) -> dict[str, int]:
        """The place."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place."""


def make_feed(trainer: TrainerArgs, embeddings: FeatureEmbeddings, *, loader: Cursor, ranks: Ranks) -> Feed:
    """The feed of TrainerArgs.pipeline_type on this device. Logs once where that is not what its name says."""
    kind, device = trainer.pipeline_type, ranks.device.type
    if kind == "none":
        return Feed(ranks)
    if device not in OVERLAPPING_DEVICES:
        LOG.info("pipeline_type %r has no effect on a CPU, where there is nothing to overlap", kind)
        return Feed(ranks)
    if embeddings.row_maps:  # an id's row, to which its table's rank belongs, is known when its step begins
        LOG.info("pipeline_type %r is 'none' here: the ids of dynamic tables get their rows step by step", kind)
        return Feed(ranks)
    prefetches = kind == "prefetch" and has_cached_tables(embeddings)
    if kind == "prefetch" and not prefetches:
        LOG.info("pipeline_type 'prefetch' is 'native' here: no embedding table is cached on the device")
    return OverlappedFeed(embeddings, prefetches=prefetches, loader=loader, ranks=ranks)


def has_cached_tables(embeddings: FeatureEmbeddings) -> bool:
    """Whether there is anything to prefetch."""
    return bool(cached_tables(embeddings))


class OverlappedFeed(Feed):
    """Reads up to two steps ahead."""

    def __init__(self, embeddings: FeatureEmbeddings, *, prefetches: bool, loader: Cursor, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._pipeline = StepPipeline(Lookups(embeddings), ranks.device, prefetches=prefetches)
        self._loader = loader
        self._cursor: dict[str, int] | None = None

    def begin(self, read: Read, num_steps: int) -> None:
        """As of a Feed; steps are read ahead within these ``num_steps``."""
        super().begin(read, num_steps)
        self._source = (self._read_one() for _ in range(num_steps))
        self._pipeline.first(self._source)

    def next(self) -> StepInput:
        """The next step's input, on the device."""
        step = self._pipeline.present()
        return StepInput(step.batches, step.counts())

    def done(self) -> None:
        """The step is behind; after the last one the model is as if there had been no pipeline."""
        super().done()
        self._cursor = self._pipeline.batches[0].cursor
        self.stop_asked = any(step.counts().num_stop for step in self._pipeline.batches)
        self._pipeline.dequeue_batch()
        if not self.num_left:
            self._pipeline.let_go()

    def give_back(self) -> None:
        """Rewind the loader to the last step that is done. Ranks call alike."""
        super().give_back()
        self._pipeline.settle()
        self._pipeline.let_go()
        if self._cursor is not None:
            self._loader.load_state_dict(self._cursor)

    def backward_is_queued(self) -> None:
        """Let the steps behind this one move on."""
        self._pipeline.ahead(self._source)

    def leave_out(self) -> None:
        """The step's ids are on their way to the tables: meet them there."""
        self._pipeline.pass_over()
        self._pipeline.ahead(self._source)

    def let_go(self) -> None:
        """The model is to be called outside of the pipeline."""
        self._pipeline.let_go()

    def _read_one(self) -> InFlight:
        self.ranks.progress.enter("reading a batch ahead")
        batches = Attempt.of(self._read)
        sums = self.ranks.start_sum_counts(own_counts(batches, ranks=self.ranks))
        counts = functools.cache(lambda: StepCounts(*sums()))
        return InFlight(batches, counts, self._loader.state_dict())
