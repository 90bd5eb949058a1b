"""What a checkpoint holds: model, optimizers, average and FP8 state as named tensors; random states as JSON values."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.linear import is_fp8
from genrec.hstu.precision.recipes import linear_recipe
from genrec.hstu.precision.state import load_precision_tensors, precision_tensors
from genrec.training.average import WeightAverage
from genrec.training.checkpoint import CheckpointError, read_tensors

LOG = logging.getLogger(__name__)

MODEL, OPTIMIZER, AVERAGE, PRECISION = "model.", "optimizer.", "average.", "precision."


def collect_tensors(
    model: nn.Module, optimizers: Sequence[Optimizer], average: WeightAverage | None
) -> dict[str, Tensor]:
    """Every tensor of the training state by name, for ``CheckpointStore.save``."""
    tensors = {f"{MODEL}{name}": value for name, value in model.state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if value is not None:  # plain SGD keeps an empty place for its momentum
                    tensors[f"{OPTIMIZER}{names[parameter]}.{key}"] = torch.as_tensor(value)
    if average is not None:
        tensors |= {f"{AVERAGE}{name}": value for name, value in average.tensors.items()}
    # Cloned, since Transformer Engine's are columns of what it works with, and a checkpoint wants whole memory.
    return tensors | {f"{PRECISION}{name}": value.clone() for name, value in precision_tensors(model).items()}


def restore_tensors(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], average: WeightAverage | None
) -> None:
    """Put a checkpoint's weights, optimizer state, average and FP8 state back; CheckpointError if of another model.

    Without ``optimizers`` the state of the checkpoint's own is left alone. FP8 state is of no model: what the
    checkpoint lacks of it starts anew, what it has too much is left alone.
    """
    tensors = read_tensors(path, prefixes=(MODEL, *([OPTIMIZER] if optimizers else []), AVERAGE, PRECISION))
    _restore_precision(path, model, _below(tensors, PRECISION))
    _restore_weights(path, model, _below(tensors, MODEL))
    _restore_optimizers(path, model, optimizers, _below(tensors, OPTIMIZER))
    if average is not None:
        saved = _below(tensors, AVERAGE) or _below(tensors, MODEL)  # a run without average: it starts at its weights
        for name, tensor in average.tensors.items():
            tensor.copy_(saved[name])


def restore_for_evaluation(path: Path, model: nn.Module) -> None:
    """Put what training evaluates into ``model``: weights, or their average where the run kept one, and FP8 state."""
    tensors = read_tensors(path, prefixes=(MODEL, AVERAGE, PRECISION))
    _restore_precision(path, model, _below(tensors, PRECISION))
    _restore_weights(path, model, _below(tensors, MODEL) | _below(tensors, AVERAGE))


def random_state() -> dict[str, Any]:
    """The states of the global random generators (torch, CUDA, numpy, python) as JSON values."""
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if _uses_cuda() else None,
        "numpy": numpy_state,
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Undo what was drawn since ``random_state``."""
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if state["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    numpy_state = {**state["numpy"], "state": dict(state["numpy"]["state"])}
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def _restore_weights(path: Path, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    for name in sorted(own.keys() | saved.keys()):
        there = tuple(saved[name].shape) if name in saved else "absent"
        here = tuple(own[name].shape) if name in own else "absent"
        if there != here:
            raise CheckpointError(f"{path} is of another model: {name} is {there} there and {here} here")
    model.load_state_dict(dict(saved))


def first_not_finite(model: nn.Module) -> str | None:
    """The first weight that is not finite, by name."""
    weights = dict(model.named_parameters())
    amaxes = torch._foreach_norm([weight.detach() for weight in weights.values()], float("inf"))
    finite = torch.stack([amax.float() for amax in amaxes]).isfinite().tolist()
    return next((name for name, sound in zip(weights, finite, strict=True) if not sound), None)


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


def _restore_optimizers(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], saved: Mapping[str, Tensor]
) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    used: set[str] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = _below(saved, f"{names[parameter]}.", leaves_only=True)
                used |= {f"{names[parameter]}.{key}" for key in state}
                # Step counts are read on the host, unless the optimizer runs its step count on the device.
                on_device = group.get("fused") or group.get("capturable")
                moved = {k: v.to(parameter.device) if v.dim() or on_device else v for k, v in state.items()}
                if moved:
                    optimizer.state[parameter] = moved
    if used != saved.keys():
        raise CheckpointError(f"{path} has optimizer state of another model: {sorted(saved.keys() - used)[0]}")


def _below(tensors: Mapping[str, Tensor], prefix: str, *, leaves_only: bool = False) -> dict[str, Tensor]:
    below = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return {name: value for name, value in below.items() if not (leaves_only and "." in name)}


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
