"""Starts a run from the weights of another (TrainerArgs.ckpt_load_dir): all of them, tables alone, or all but tables.

Rows of tables are found by what they stand for (data/vocabulary.py), so the vocabulary may have grown since: a new row
starts as it was initialised, without moments, and a row that is gone is left out. ::

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

from genrec.model.row_map import row_maps
from genrec.training.checkpoint import CheckpointError, read_host, read_into, read_shapes, read_tensors
from genrec.training.checkpoint_names import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    ROW_MAP,
    VOCABULARY,
    table_of,
    weight_of,
)
from genrec.training.restore import below, put_back, read_unsharded, sharded_targets
from genrec.training.state import TrainingState, row_map_tensors

LOG = logging.getLogger(__name__)
ALL, EMBEDDING, DENSE = "all", "embedding", "dense"


@dataclass(frozen=True)
class RowMatch:
    """Row ``there[i]`` of the checkpoint's table is row ``here[i]`` of the run's; both (n,) int64."""

    there: Tensor
    here: Tensor


def start_from(path: Path, state: TrainingState, *, parts: str, data: Mapping[str, Any] | None) -> None:
    """Put the ``parts`` ("all", "embedding", "dense") of a checkpoint into ``state``.

    data: ``RunData.identity``. Without optimizers in ``state`` weights are taken alone. Raises CheckpointError where
    they are of another model, or where rows of a table can't be found.
    """
    sharded = state.sharded_weights
    matches = {} if parts == DENSE else _match_tables(path, state, data=data)
    tensors = _wanted_tensors(path, state, parts)
    for name, match in matches.items():
        if name not in sharded:
            tensors |= _grown(tensors, name, match, state)
    if parts != ALL:
        tensors |= _own_tensors(state, parts)
    put_back(tensors, path, state)
    if parts != DENSE:
        _fill_sharded(path, state, matches)
        for row_map in row_maps(state.model).values():
            row_map.count_steps_anew()


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


def _match_tables(path: Path, state: TrainingState, *, data: Mapping[str, Any] | None) -> dict[str, RowMatch]:
    """Of the tables whose rows are not those of the checkpoint, by name of their weight in it."""
    there = below(read_tensors(path, prefixes=(VOCABULARY,)), VOCABULARY)
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
        if f"{ROW_MAP}{table}.ids" in {*shapes, *own_maps}:
            _check_dynamic(path, table, there=there.get(table), here=(state.vocabulary or {}).get(table))
            continue
        match = _match_table(
            path,
            table,
            there=there[table].numpy() if table in there else None,
            here=(state.vocabulary or {}).get(table),
            num_rows=(shape[0], weight.size()[0]),
            same_data=same_data,
        )
        if match is not None:
            matches[name] = match
    return matches


def _check_dynamic(path: Path, table: str, *, there: Tensor | None, here: np.ndarray | None) -> None:
    """Rows of a dynamic table go by its ids, so those must mean the same. Raises CheckpointError where they don't.

    That it is dynamic there and here, and as large, is checked where its map is read (restore.py).
    """
    same = there is None and here is None
    if there is not None and here is not None:
        same = np.array_equal(there.numpy(), here)
    if not same:
        raise CheckpointError(
            f"{path} has another vocabulary of table {table!r}, which is dynamic, so that its ids stand for others:"
            ' TrainerArgs.ckpt_load_parts = "dense" takes the other weights alone'
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
    """None where rows are the same. Raises CheckpointError where they can't be told."""
    rows_there, rows_here = num_rows
    known = there is not None and here is not None
    same = np.array_equal(there, here) if there is not None and here is not None else rows_there == rows_here
    if same:
        return None
    hint = 'TrainerArgs.ckpt_load_parts = "dense" takes the other weights alone'
    if known and not same_data:
        raise CheckpointError(f"{path} is of another dataset, whose table {table!r} has other rows: {hint}")
    if not known and rows_there > rows_here:
        raise CheckpointError(
            f"{path} has {rows_there} rows of table {table!r}, of which nothing tells what they stand for, and the run"
            f" {rows_here}: {hint}"
        )
    by_place = RowMatch(torch.arange(rows_there), torch.arange(rows_there))
    match = match_rows(there, here) if there is not None and here is not None else by_place
    found = len(match.here)
    LOG.info(
        "table %r: %d of its %d rows are in the checkpoint%s, %d start anew; %d rows of the checkpoint are left out",
        *(table, found, rows_here, "" if known else " (by place)", rows_here - found, rows_there - found),
    )
    return match


def _wanted_tensors(path: Path, state: TrainingState, parts: str) -> dict[str, Tensor]:
    tensors = read_unsharded(path, state)
    return {name: tensor for name, tensor in tensors.items() if parts == ALL or _part_of(name) == parts}


def _part_of(name: str) -> str:
    """Which part a tensor of a checkpoint belongs to."""
    if name.startswith(ROW_MAP):
        return EMBEDDING
    return DENSE if table_of(weight_of(name)) is None else EMBEDDING


def _own_tensors(state: TrainingState, parts: str) -> dict[str, Tensor]:
    """The run's own weights and averages of the other part, which then stays as it is."""
    sharded = state.sharded_weights
    own = {f"{MODEL}{name}": value for name, value in state.weights.items() if name not in sharded}
    if state.average is not None:
        own |= {f"{AVERAGE}{name}": value for name, value in state.average.tensors.items()}
    own |= row_map_tensors(state.model)
    return {name: value.clone() for name, value in own.items() if _part_of(name) != parts}


def _grown(tensors: Mapping[str, Tensor], name: str, match: RowMatch, state: TrainingState) -> dict[str, Tensor]:
    """Weight, moments and average of a table in the run's size."""
    weight = state.weights[name]
    grown = {}
    for key, saved in tensors.items():
        is_moment = key.startswith(f"{OPTIMIZER}{name}.") and saved.dim() > 0
        if key in (f"{MODEL}{name}", f"{AVERAGE}{name}"):
            grown[key] = weight.detach().cpu().clone()
        elif is_moment:
            grown[key] = saved.new_zeros(weight.shape[0], *saved.shape[1:])
        else:
            continue
        copy_rows(grown[key], saved, match)
    return grown


def _fill_sharded(path: Path, state: TrainingState, matches: Mapping[str, RowMatch]) -> None:
    targets = sharded_targets(state)
    found = {name: matches.get(weight_of(name)) for name in targets}
    read_into(path, {name: tensor for name, tensor in targets.items() if found[name] is None})
    for name, tensor in targets.items():
        match = found[name]
        if match is not None:  # one whole tensor at a time
            whole = read_tensors(path, prefixes=(name,))[name]
            for shard in tensor.local_shards():
                copy_rows(shard.tensor, whole, match, offsets=shard.metadata.shard_offsets)
