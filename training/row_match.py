"""Which row of a checkpoint's table is which row of the run's, whose vocabulary may have grown since.

Rows are found by what they stand for (data/vocabulary.py)::

    checkpoint  item 10 12 15        run  item 10 11 12 15 20      rows 0 1 2 -> 0 2 3; rows 1 and 4 start anew
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrec.training.checkpoint import CheckpointError, read_host, read_shapes, read_tensors
from genrec.training.checkpoint_names import MODEL, ROW_MAP, VOCABULARY, table_of
from genrec.training.restore import below
from genrec.training.state import TrainingState, row_map_tensors

LOG = logging.getLogger(__name__)
HINT = 'TrainerArgs.ckpt_load_parts = "dense" takes the other weights alone'


@dataclass(frozen=True)
class RowMatch:
    """Row ``there[i]`` of the checkpoint's table is row ``here[i]`` of the run's; both (n,) int64."""

    there: Tensor
    here: Tensor


def match_rows(there: np.ndarray, here: np.ndarray) -> RowMatch:
    """Rows with the same key; keys are unique."""
    _, rows_there, rows_here = np.intersect1d(there, here, assume_unique=True, return_indices=True)
    return RowMatch(torch.from_numpy(rows_there), torch.from_numpy(rows_here))


def copy_rows(part: Tensor, whole: Tensor, match: RowMatch, *, offsets: Sequence[int] = (0, 0)) -> None:
    """Fill the matched rows of ``part``, which starts at ``offsets`` of the run's table, from the checkpoint's."""
    place = match.here - offsets[0]
    inside = (place >= 0) & (place < part.shape[0])
    rows = whole[match.there[inside]]
    if part.dim() > 1:
        rows = rows.narrow(1, offsets[1], part.shape[1])
    part[place[inside].to(part.device)] = rows.to(part)


def match_tables(path: Path, state: TrainingState, *, data: Mapping[str, Any] | None) -> dict[str, RowMatch]:
    """Of the tables whose rows are not those of the checkpoint, by name of their weight in it.

    data: ``RunData.identity``. Raises CheckpointError where rows of a table can't be found.
    """
    saved_keys = below(read_tensors(path, prefixes=(VOCABULARY,)), VOCABULARY)
    saved_data = read_host(path, rank=0)["data"]
    same_data = (saved_data or {}).get("name") == (data or {}).get("name")
    shapes = read_shapes(path)
    own_maps = row_map_tensors(state.model)
    matches = {}
    for name, weight in state.weights.items():
        table = table_of(name)
        shape = shapes.get(f"{MODEL}{name}")
        if table is None or shape is None:
            continue
        there = saved_keys[table].numpy() if table in saved_keys else None
        here = (state.vocabulary or {}).get(table)
        if f"{ROW_MAP}{table}.ids" in {*shapes, *own_maps}:
            _check_dynamic(path, table, there=there, here=here)
            continue
        num_rows = (shape[0], weight.size()[0])
        match = _match_table(path, table, there=there, here=here, num_rows=num_rows, same_data=same_data)
        if match is not None:
            matches[name] = match
    return matches


def _check_dynamic(path: Path, table: str, *, there: np.ndarray | None, here: np.ndarray | None) -> None:
    """Rows of a dynamic table go by its ids, so those must mean the same. Raises CheckpointError where they don't.

    That it is dynamic there and here, and as large, is checked where its map is read (restore.py).
    """
    same = there is here if there is None or here is None else np.array_equal(there, here)
    if not same:
        raise CheckpointError(
            f"{path} has another vocabulary of table {table!r}, which is dynamic, so that its ids stand for others:"
            f" {HINT}"
        )


def _match_table(
    path: Path,
    table: str,
    *,
    there: np.ndarray | None,
    here: np.ndarray | None,
    num_rows: tuple[int, int],
    same_data: bool,
) -> RowMatch | None:
    """None where rows are the same. there, here: the keys of rows, where they are known; num_rows: there and here.

    Raises CheckpointError where rows can't be told.
    """
    rows_there, rows_here = num_rows
    if there is not None and here is not None:
        if np.array_equal(there, here):
            return None
        if not same_data:
            raise CheckpointError(f"{path} is of another dataset, whose table {table!r} has other rows: {HINT}")
        match, how = match_rows(there, here), ""
    else:
        if rows_there == rows_here:
            return None
        if rows_there > rows_here:
            raise CheckpointError(
                f"{path} has {rows_there} rows of table {table!r}, of which nothing tells what they stand for, and the"
                f" run {rows_here}: {HINT}"
            )
        match, how = RowMatch(torch.arange(rows_there), torch.arange(rows_there)), " (by place)"
    found = len(match.here)
    LOG.info(
        "table %r: %d of its %d rows are in the checkpoint%s, %d start anew; %d rows of the checkpoint are left out",
        *(table, found, rows_here, how, rows_here - found, rows_there - found),
    )
    return match
