"""The FP8 state of a model: what delayed scaling remembers, as plain tensors by name, for checkpoints and replays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from genrec.hstu.linear import Linear


def precision_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors of every linear: "encoder.block.layers.0.uvqk.amax_history.input", ...

    Empty for recipes without state. Equal on all ranks, since amaxes are reduced over them. The same names and shapes
    for Transformer Engine and the emulation.
    """
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules()
        if isinstance(module, Linear)
        for key, tensor in module.fp8_tensors().items()
    }


@torch.no_grad()
def load_precision_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into the model's.

    What they lack, or have in another length, starts anew: histories at 0, scales at 1.
    """
    for name, own in precision_tensors(model).items():
        saved = tensors.get(name)
        if saved is not None and saved.shape == own.shape:
            own.copy_(saved)
        else:
            own.fill_(0.0 if ".amax_history." in name else 1.0)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of ``precision_tensors``."""
    return {name: tensor.detach().clone() for name, tensor in precision_tensors(model).items()}


def restore(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a ``snapshot`` of the same model back."""
    assert tensors.keys() == precision_tensors(model).keys(), "a snapshot of another model"
    load_precision_tensors(model, tensors)
