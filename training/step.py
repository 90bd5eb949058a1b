"""One optimizer step over one or more micro-batches: loss, gradients, the finiteness check, then the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from genrec.configs.schema import TrainerArgs, UserError
from genrec.data.batch import Batch
from genrec.training.average import WeightAverage
from genrec.training.sharding import Ranks, loss_scale, no_gradient_sync, unwrap


class NonFiniteError(UserError):
    """A loss or gradient became NaN or infinite, and TrainerArgs.nonfinite = "stop"."""


@dataclass(frozen=True)
class StepResult:
    """What a step saw, over all ranks and micro-batches. ``loss_sum`` is over targets; ``applied``: weights changed."""

    loss_sum: float
    num_targets: int
    num_tokens: int
    num_users: int
    learning_rate: float
    applied: bool
    finite: bool = True


class TrainStep:
    """Accumulates the micro-batches of a step so that they equal one big batch, at any number of ranks.

    The loss is the sum over targets divided by the global number of targets. A step without any target on any rank is
    legal: it counts, but weights and optimizer state stay as they are (no decay either), and its loss is 0. Non-finite
    losses and gradients are found before the weights change: "stop" raises NonFiniteError, "skip" leaves the step out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        trainer: TrainerArgs,
        ranks: Ranks,
        set_learning_rates: Callable[[int], float],
        average: WeightAverage | None = None,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.trainer = trainer
        self.ranks = ranks
        self.average = average
        self.set_learning_rates = set_learning_rates
        self._parameters = [p for p in unwrap(model).parameters() if p.requires_grad]

    def __call__(self, batches: Sequence[Batch], *, step: int) -> StepResult:
        """Train on ``batches`` as optimizer step ``step`` (1, 2, ...)."""
        num_targets, num_tokens, num_users = self._counts(batches)
        learning_rate = self.set_learning_rates(step)
        loss_sum, finite = 0.0, True
        if num_targets:
            loss_sum = self._backward(batches, num_targets)
            finite = math.isfinite(loss_sum) and math.isfinite(self._clip())
            if finite:
                self._update(step)
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        if not finite and self.trainer.nonfinite == "stop":
            raise NonFiniteError(
                f"the loss or a gradient is not finite at step {step} (mean loss {loss_sum / num_targets}): stopped "
                'before the weights changed; TrainerArgs.nonfinite = "skip" leaves such steps out'
            )
        return StepResult(
            loss_sum=loss_sum,
            num_targets=num_targets,
            num_tokens=num_tokens,
            num_users=num_users,
            learning_rate=learning_rate,
            applied=finite and num_targets > 0,
            finite=finite,
        )

    def _counts(self, batches: Sequence[Batch]) -> tuple[int, int, int]:
        """Targets, tokens and users of the step, over all ranks."""
        own = [(b.labels.shape[0], b.num_tokens, b.batch_size) for b in batches]
        counts = torch.tensor(own, dtype=torch.int64, device=self.ranks.device).sum(0)
        targets, tokens, users = self.ranks.sum(counts).tolist()
        return targets, tokens, users

    def _backward(self, batches: Sequence[Batch], num_targets: int) -> float:
        """Gradients of the mean loss, summed over ranks; returns the sum of losses over ranks."""
        scale = loss_scale(self.ranks, num_targets)
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        with no_gradient_sync(self.model):
            for batch in batches[:-1]:
                loss_sum += self._backward_one(batch, scale)
        loss_sum += self._backward_one(batches[-1], scale)
        return float(self.ranks.sum(loss_sum))

    def _backward_one(self, batch: Batch, scale: float) -> torch.Tensor:
        loss = self.model(batch.to(self.ranks.device, non_blocking=True)).loss_per_target.sum()
        (loss * scale).backward()
        return loss.detach().double()

    def _clip(self) -> float:
        """Clip the gradients; returns their global norm before."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.trainer.grad_clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.trainer.grad_clip_norm, norm)
        return float(norm)

    def _update(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.average is not None:
            self.average.update(step)
