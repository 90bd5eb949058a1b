"""What a step changes before its weights change: to undo it, and to replay it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from genrec.hstu.precision.state import restore, snapshot


@dataclass(frozen=True)
class StepStart:
    """What forward and backward change beside gradients, as it was before: to undo a step, and to replay it.

    precision: state of delayed scaling. random: of PyTorch's generators on the CPU and on the model's device, empty
    where no replay is wanted; only dropout draws from them.
    """

    precision: dict[str, Tensor]
    random: tuple[Tensor, ...]

    @staticmethod
    def of(model: nn.Module, *, device: torch.device, with_precision: bool, with_random: bool) -> StepStart:
        """The present state. with_precision: whether there is a state of delayed scaling, which takes a search."""
        random = [torch.get_rng_state()] if with_random else []
        if with_random and device.type == "cuda":
            random.append(torch.cuda.get_rng_state(device))
        return StepStart(precision=snapshot(model) if with_precision else {}, random=tuple(random))

    def put_back(self, model: nn.Module) -> None:
        """Undo what a forward and backward did to the state of delayed scaling."""
        restore(model, self.precision)

    def rewind_random(self, device: torch.device) -> None:
        """Let the next forward draw the random numbers of the step again."""
        torch.set_rng_state(self.random[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.random[1], device)
