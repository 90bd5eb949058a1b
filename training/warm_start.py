"""Starts a run from the weights of another (TrainerArgs.ckpt_load_dir): all of them, tables alone, or all but tables.

Rows of tables are found by what they stand for (row_match.py): a new row starts as it was initialised, without moments,
and a row that is gone is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from genrec.model.row_map import row_maps
from genrec.training.checkpoint import read_into, read_tensors
from genrec.training.checkpoint_names import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    ROW_MAP,
    table_of,
    weight_of,
)
from genrec.training.restore import put_back, read_unsharded, sharded_targets
from genrec.training.row_match import RowMatch, copy_rows, match_tables
from genrec.training.state import TrainingState, row_map_tensors

ALL, EMBEDDING, DENSE = "all", "embedding", "dense"


def start_from(path: Path, state: TrainingState, *, parts: str, data: Mapping[str, Any] | None) -> None:
    """Put the ``parts`` ("all", "embedding", "dense") of a checkpoint into ``state``.

    data: ``RunData.identity``. Without optimizers in ``state`` weights are taken alone. Raises CheckpointError where
    they are of another model, or where rows of a table can't be found.
    """
    sharded = state.sharded_weights
    matches = {} if parts == DENSE else match_tables(path, state, data=data)
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
