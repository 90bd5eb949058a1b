"""Reads a checkpoint into a run: all of it to continue, the weights to evaluate, or parts of it to start from.

Checkpoints hold whole tensors under names that don't depend on the ranks (state.py), so each rank reads what it needs:
whole tensors, its part of dense weights, or into its shards of tables, by torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.linear import is_fp8
from genrec.hstu.precision.recipes import linear_recipe
from genrec.hstu.precision.state import load_precision_tensors, precision_tensors
from genrec.model.row_map import row_maps
from genrec.training.checkpoint import CheckpointError, read_into, read_shapes, read_tensors
from genrec.training.checkpoint_names import AVERAGE, MODEL, OPTIMIZER, PRECISION, ROW_MAP, checkpoint_name, weight_of
from genrec.training.state import TrainingState, fsdp_weights, row_map_tensors, sharded_moments

LOG = logging.getLogger(__name__)


def restore_tensors(path: Path, state: TrainingState) -> None:
    """Put a checkpoint's weights, optimizer state, average and FP8 state back; CheckpointError if of another model.

    Without optimizers in ``state`` those of the checkpoint are left alone. FP8 state is of no model: what the
    checkpoint lacks of it starts anew, what it has too much is left alone.
    """
    put_back(read_unsharded(path, state), path, state)
    read_into(path, sharded_targets(state))


def restore_for_evaluation(path: Path, state: TrainingState) -> None:
    """Put what training evaluates into the model: weights, or their average where the run kept one, and FP8 state."""
    restore_tensors(path, TrainingState(model=state.model, tables=state.tables, tensor_parallel=state.tensor_parallel))
    own, sharded = state.weights, state.sharded_weights
    averaged = [name.removeprefix(AVERAGE) for name in read_shapes(path) if name.startswith(AVERAGE)]
    whole = read_for(path, state, prefixes=(AVERAGE,), without=[f"{AVERAGE}{name}" for name in sharded])
    for name, tensor in below(whole, AVERAGE).items():
        own[name].copy_(tensor)
    read_into(path, {f"{AVERAGE}{name}": sharded[name] for name in averaged if name in sharded})


def read_unsharded(path: Path, state: TrainingState) -> dict[str, Tensor]:
    """All tensors of a checkpoint that ``state`` has a place for, but those of ``sharded_targets``."""
    prefixes = (MODEL, *([OPTIMIZER] if state.optimizers else []), AVERAGE, PRECISION, ROW_MAP)
    return read_for(path, state, prefixes=prefixes, without=list(sharded_targets(state)))


def read_for(
    path: Path, state: TrainingState, *, prefixes: tuple[str, ...], without: Sequence[str] = ()
) -> dict[str, Tensor]:
    """``read_tensors``; of dense weights that ranks share, of their moments and averages too, this rank's part."""
    in_parts = fsdp_weights(state.model)
    tensors = read_tensors(path, prefixes=prefixes, without=without, like=lambda name: in_parts.get(weight_of(name)))
    return tensors if state.tensor_parallel is None else state.tensor_parallel.cut(tensors)


def put_back(tensors: Mapping[str, Tensor], path: Path, state: TrainingState) -> None:
    """What ``restore_tensors`` does, of tensors that ``read_unsharded`` has read."""
    sharded = state.sharded_weights
    weights = below(tensors, MODEL)
    _restore_precision(path, state.model, below(tensors, PRECISION))
    _restore_weights(path, state, weights)
    _restore_row_maps(path, state.model, below(tensors, ROW_MAP))
    saved = below(tensors, OPTIMIZER)
    _restore_optimizers(path, state, {name: value for name, value in saved.items() if not _is_of(name, sharded)})
    if state.tables is not None:
        steps = [value for name, value in saved.items() if _is_of(name, sharded) and name.endswith(".step")]
        state.tables.set_num_steps(int(steps[0]) if steps else 0)
    if state.average is not None:
        averaged = {**weights, **below(tensors, AVERAGE)}  # where the checkpoint has none, it starts at the weights
        for name, tensor in state.average.tensors.items():
            tensor.copy_(averaged[name])


def sharded_targets(state: TrainingState) -> dict[str, ShardedTensor]:
    """Sharded tables and, where ``state`` has optimizers, their moments, by name in a checkpoint, to read into."""
    if state.tables is None:
        return {}
    targets = {f"{MODEL}{name}": tensor for name, tensor in state.sharded_weights.items()}
    if state.optimizers:
        targets |= {f"{OPTIMIZER}{name}": tensor for name, tensor in sharded_moments(state.tables).items()}
    return targets


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _is_of(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether ``name`` is a moment of one of ``weights``."""
    return name.rpartition(".")[0] in weights


def _restore_weights(path: Path, state: TrainingState, saved: Mapping[str, Tensor]) -> None:
    own, sharded = state.weights, state.sharded_weights
    for name in sorted((own.keys() | saved.keys()) - sharded.keys()):
        there = tuple(saved[name].shape) if name in saved else "absent"
        here = tuple(own[name].shape) if name in own else "absent"
        if there != here:
            raise CheckpointError(f"{path} is of another model: {name} is {there} there and {here} here")
    # With sharded tables as they are, to be filled in place: load_state_dict takes all tensors or refuses.
    tensors = {**saved, **sharded}
    state.model.load_state_dict({name: tensors[checkpoint_name(name)] for name in state.model.state_dict()})


def _restore_row_maps(path: Path, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = below(row_map_tensors(model), ROW_MAP)
    for name in sorted(own.keys() | saved.keys()):
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            table = name.partition(".")[0]
            difference = f"table {table!r} is not dynamic in both, or of another capacity"
            raise CheckpointError(f"{path} is of another model: {difference}")
    for table, row_map in row_maps(model).items():
        row_map.load_state(below(saved, f"{table}."))


def _restore_optimizers(path: Path, state: TrainingState, saved: Mapping[str, Tensor]) -> None:
    names = {parameter: checkpoint_name(name) for name, parameter in state.model.named_parameters()}
    used: set[str] = set()
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values = below(saved, f"{names[parameter]}.")
                used |= {f"{names[parameter]}.{key}" for key in values}
                if values:
                    optimizer.state[parameter] = _placed(values, parameter, group)
    if used != saved.keys():
        raise CheckpointError(f"{path} has optimizer state of another model: {sorted(saved.keys() - used)[0]}")


def _placed(values: Mapping[str, Tensor], parameter: Tensor, group: Mapping[str, object]) -> dict[str, Tensor]:
    # Step counts are read on the host, unless the optimizer runs its step count on the device.
    on_device = group.get("fused") or group.get("capturable")
    moved = {k: v.to(parameter.device) if v.dim() or on_device else v for k, v in values.items()}
    if "sum" in moved:
        moved["sum"] = moved["sum"].view(-1, 1)  # as row-wise Adagrad has it; checkpoints have (rows,)
    return moved


def _restore_precision(path: Path, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = precision_tensors(model)
    saved = _rescaled(path, model, saved)
    fitting = {name: value for name, value in saved.items() if name in own and value.shape == own[name].shape}
    if len(fitting) < len(saved):
        LOG.info("ignored %d of %d tensors of FP8 state in %s", len(saved) - len(fitting), len(saved), path)
    if len(fitting) < len(own):
        LOG.warning("delayed scaling starts anew in %d of %d tensors of FP8 state", len(own) - len(fitting), len(own))
    load_precision_tensors(model, fitting)


def _rescaled(path: Path, model: nn.Module, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Saved scales for the formats and the margin of ``model``, where the checkpoint's run had others."""
    now = next((module.recipe for module in model.modules() if is_fp8(module)), None)
    if not saved or now is None:
        return saved
    values = json.loads((path / "config.json").read_text())["MixedPrecisionArgs"]
    before = linear_recipe(MixedPrecisionArgs(**values))
    if before is None:
        return saved
    margin = 2.0 ** (before.margin - now.margin)
    factors = {
        ".scale.input": margin,
        ".scale.weight": margin,
        ".scale.grad_output": margin * now.backward_format.max / before.backward_format.max,
    }
    return {
        name: value * next((factor for role, factor in factors.items() if name.endswith(role)), 1.0)
        for name, value in saved.items()
    }
