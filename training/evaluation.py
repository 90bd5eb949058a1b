"""Evaluation: exact metrics of a split in a protocol, over all ranks, leaving training alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from genrec.data.batch import Batch
from genrec.data.format import DataError
from genrec.hstu.precision.state import restore, snapshot
from genrec.model.ranking import RankingModel
from genrec.training.metrics import RankingMetrics
from genrec.training.ranks import Attempt, Ranks
from genrec.training.score_table import ScoreTable
from genrec.training.state import random_state, set_random_state
from genrec.training.stopping import Stopped, stop_asked


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one split in one protocol; NaN where undefined (one class only, or no target)."""

    split: str
    protocol: str
    metrics: dict[str, float]
    num_targets: int


def evaluate(
    model: RankingModel,
    loader: Iterable[Batch],
    *,
    split: str,
    protocol: str,
    ranks: Ranks,
    make_metrics: Callable[[], RankingMetrics],
    max_iters: int | None = None,
    table: ScoreTable | None = None,
) -> Evaluation:
    """Evaluate ``model`` (without DDP) on ``loader``, of which this rank sees its own part.

    Leaves random generators, the model's mode and FP8 state as they were. An error in a rank's data stops all ranks.
    Raises Stopped on all of them where one is asked to stop.
    """
    metrics = make_metrics().to(ranks.device)
    num_targets = torch.zeros(1, dtype=torch.int64, device=ranks.device)

    batches = iter(itertools.islice(loader, max_iters))
    reading = f"reading a batch of the {split} split"
    ranks.progress.enter(reading)
    with undisturbed(model), torch.no_grad():
        # All ranks have the same number of batches, so they end together.
        while (batch := _agreed(Attempt.of(lambda: _next(batches, split)), ranks)) is not None:
            ranks.progress.enter(f"scoring the {split} split")
            on_device = batch.to(ranks.device)
            output = model(on_device)
            scores, labels = model.scores(output), model.binary_labels(output.labels)
            if not ranks.is_first_peer:  # its peers have the same
                continue
            user_ids = on_device.user_ids.repeat_interleave(on_device.num_labelled)
            metrics.update(scores, labels, user_ids, hits=model.hits(output))
            num_targets.add_(len(labels))
            if table is not None:
                table.add(on_device, scores=scores, labels=labels)
            ranks.progress.enter(reading)
    ranks.progress.enter(f"metrics of the {split} split")
    metrics.ensure_filled()  # a peer has counted nothing, of which torchmetrics would warn
    return Evaluation(split, protocol, metrics.compute(), int(ranks.sum(num_targets)))


def _next(batches: Iterator[Batch], split: str) -> Batch | None:
    """The next batch, None at the end; ids are checked as they are read, and an error says of which split they are."""
    try:
        return next(batches, None)
    except DataError as error:
        raise DataError(f"{split} split: {error}") from error


def _agreed(attempt: Attempt[Batch | None], ranks: Ranks) -> Batch | None:
    num_failed, num_stop = ranks.sum_counts([int(attempt.error is not None), int(stop_asked())])
    batch = ranks.settle(attempt, num_failed=num_failed)
    if num_stop:
        raise Stopped
    return batch


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode; afterwards its mode, random generators and FP8 state are as before."""
    was_training, state, precision = model.training, random_state(), snapshot(model)
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        restore(model, precision)
        set_random_state(state)
