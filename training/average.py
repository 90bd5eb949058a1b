"""Exponential moving average of the weights (TrainerArgs.ema_decay): evaluated in place of the last weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """``average <- d * average + (1 - d) * weight`` after each step, in float32.

    d is min(decay, (1 + step) / (10 + step)), so that a short run does not average over its random start
    (as TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {n: p.detach().float().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step ``step`` (1, 2, ...)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [p.detach().float() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.tensors.values()), weights, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model computes with the average; afterwards its own weights are back, bit for bit."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self.tensors[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]
