"""Evaluation: exact metrics of a split in a protocol, over all ranks, leaving training alone; the table of scores."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars
import torch
from torch import Tensor, nn

from genrec.data.batch import Batch
from genrec.data.format import DataError
from genrec.hstu.precision.state import restore, snapshot
from genrec.model.ranking import RankingModel
from genrec.training.metrics import RankingMetrics
from genrec.training.ranks import Attempt, Ranks
from genrec.training.state import random_state, set_random_state
from genrec.training.stopping import Stopped, stop_asked

PROTOCOLS = ("sequential", "frozen")


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one split in one protocol; NaN where undefined (one class only, or no target)."""

    split: str
    protocol: str
    metrics: dict[str, float]
    num_targets: int


class ScoreTable:
    """Collects a row for every evaluation target that this rank sees."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, batch: Batch, *, scores: Tensor, labels: Tensor) -> None:
        """scores, labels: (N, tasks) of the batch's N targets, in the batch's order."""
        events = labelled_events(batch)
        items = batch.features[batch.item_feature_name].values()
        part = {
            "user_id": batch.user_ids.repeat_interleave(batch.num_labelled),
            "item_id": items[events],
            "timestamp": batch.timestamps[events],
        }
        for task in range(scores.shape[1]):
            suffix = f"_task{task}" if task else ""
            part[f"label{suffix}"] = labels[:, task]
            part[f"score{suffix}"] = scores[:, task]
        self._parts.append({name: values.cpu().numpy() for name, values in part.items()})

    def gathered(self, ranks: Ranks, *, item_vocabulary: np.ndarray | None) -> polars.DataFrame:
        """All ranks' rows, ordered by user, time and item. All ranks call alike.

        item_vocabulary: original id of each dense item id; None keeps the dense ids, as it keeps those beyond it, which
        a dynamic table may have.
        """
        # Every rank has at least one batch, if only an empty one, so every part has all columns.
        parts = [part for rank_parts in ranks.gather(self._parts) for part in rank_parts]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if item_vocabulary is not None:
            known = columns["item_id"] < len(item_vocabulary)
            columns["item_id"][known] = item_vocabulary[columns["item_id"][known]]
        return polars.DataFrame(columns).sort("user_id", "timestamp", "item_id", maintain_order=True)


def write_table(table: polars.DataFrame, path: Path) -> None:
    """Write ``table`` as parquet beside ``path`` and rename it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    table.write_parquet(beside)
    beside.replace(path)


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
    return Evaluation(split, protocol, metrics.compute(), int(ranks.sum(num_targets)))


def labelled_events(batch: Batch) -> Tensor:
    """(N,) positions, among the batch's events, of those that carry a label: each user's last num_labelled."""
    ends = batch.features[batch.item_feature_name].offsets()[1:].to(torch.int64)
    labels_before = batch.num_labelled.cumsum(0) - batch.num_labelled
    shift = (ends - batch.num_labelled - labels_before).repeat_interleave(batch.num_labelled)
    return shift + torch.arange(len(shift), device=shift.device)


def read_item_vocabulary(directory: Path) -> np.ndarray:
    """Original id of each dense item id of a prepared dataset. Raises DataError where its vocabulary can't be read."""
    path = directory / "vocabulary" / "item.parquet"
    try:
        return polars.read_parquet(path, columns=["original_id"])["original_id"].to_numpy()
    except (OSError, polars.exceptions.PolarsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path}, which has the items' original ids, cannot be read ({reason}): prepare the dataset again"
        ) from error


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
