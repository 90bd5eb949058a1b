"""The table of scores: a row for every target of an evaluation, gathered from all ranks and written as parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars
import torch
from torch import Tensor

from genrec.data.batch import Batch
from genrec.data.files import replacing
from genrec.training.ranks import Ranks


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
    """Write ``table`` as parquet beside ``path`` and rename it there; where that fails nothing is left.

    Raises OSError and polars' own errors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        table.write_parquet(beside)


def labelled_events(batch: Batch) -> Tensor:
    """(N,) positions, among the batch's events, of those that carry a label: each user's last num_labelled."""
    ends = batch.features[batch.item_feature_name].offsets()[1:].to(torch.int64)
    labels_before = batch.num_labelled.cumsum(0) - batch.num_labelled
    shift = (ends - batch.num_labelled - labels_before).repeat_interleave(batch.num_labelled)
    return shift + torch.arange(len(shift), device=shift.device)
