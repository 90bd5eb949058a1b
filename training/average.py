"""Exponential moving average of the weights (TrainerArgs.ema_decay): evaluated in place of the last weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from genrec.training.dense_parallel import own_part


class WeightAverage:
    """``average <- d * average + (1 - d) * weight`` after each step, in float32.

    d is min(decay, (1 + step) / (10 + step)), so that a short run does not average over its random start
    (as TensorFlow's ExponentialMovingAverage with num_updates). Each rank averages what it holds of a weight.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {n: p.detach().float().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step ``step`` (1, 2, ...)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [own_part(p).float() for p in self._parameters.values()]
        torch._foreach_lerp_([own_part(tensor) for tensor in self.tensors.values()], weights, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model computes with the average; afterwards its own weights are back, bit for bit."""
        # FSDP2 gathers from memory of its own, so its parameters take other values there, not other memory.
        parts = {name: own_part(p) for name, p in self._parameters.items() if isinstance(p, DTensor)}
        kept = {name: part.clone() for name, part in parts.items()}
        own = {name: p.data for name, p in self._parameters.items() if name not in parts}
        try:
            for name, part in parts.items():
                part.copy_(own_part(self.tensors[name]))
            for name in own:
                self._parameters[name].data = self.tensors[name].to(self._parameters[name].dtype)
            yield
        finally:
            for name, part in parts.items():
                part.copy_(kept[name])
            for name in own:
                self._parameters[name].data = own[name]
