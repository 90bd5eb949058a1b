"""One optimizer step over one or more micro-batches: loss, gradients, the finiteness check, then the weights.

A step waits for the device once, after the backward, where the ranks agree on the loss and whether all is finite. The
counts by which the loss is divided are summed on the host when batches are read (feed.py). Sums of gradients (and of
their norm, where ranks share the dense weights), delayed scaling's maxima of amaxes and the ids of dynamic tables (two
more questions) come on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from genrec.configs.schema import TrainerArgs, UserError
from genrec.data.batch import Batch
from genrec.hstu.linear import is_fp8
from genrec.hstu.precision.region import FINITE_WATCH
from genrec.hstu.precision.state import precision_tensors
from genrec.model.row_map import row_maps
from genrec.training.average import WeightAverage
from genrec.training.dense_parallel import (
    average_gradients,
    clip_gradients,
    left_to_average,
    loss_scale,
    no_gradient_sync,
    own_part,
    total_norm,
    unwrap,
)
from genrec.training.dynamic_tables import DynamicTables
from genrec.training.feed import Lookahead, StepInput
from genrec.training.locate import locate
from genrec.training.ranks import Attempt, Ranks
from genrec.training.step_start import StepStart
from genrec.training.tables import ShardedTables
from genrec.training.tensor_parallel import TensorParallelWeights


class NonFiniteError(UserError):
    """A loss or gradient became NaN or infinite, and TrainerArgs.nonfinite is "stop" or "locate"."""


@dataclass(frozen=True)
class StepResult:
    """What a step saw, over all ranks and micro-batches.

    ``loss_sum`` is over targets. ``applied``: weights changed.
    """

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
    losses and gradients are found before the weights change, and the state of delayed scaling is put back: "stop"
    raises NonFiniteError, "locate" too after looking for the module that made them, "skip" leaves the step out. So are
    the rows that dynamic tables gave to the step's ids.
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
        tables: ShardedTables | None = None,
        lookahead: Lookahead | None = None,
        tensor_parallel: TensorParallelWeights | None = None,
        dynamic: DynamicTables | None = None,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.trainer = trainer
        self.ranks = ranks
        self.average = average
        self.tables = tables
        self.lookahead = lookahead or Lookahead()
        self.tensor_parallel = tensor_parallel
        self.dynamic = dynamic
        self.set_learning_rates = set_learning_rates
        self._bare = unwrap(model)
        assert (dynamic is None) == (not row_maps(self._bare)), "dynamic tables are to be told the ids of each step"
        self._parameters = [p for p in self._bare.parameters() if p.requires_grad]
        self._fp8_weights = [module.weight for module in self._bare.modules() if is_fp8(module)]
        self._left_to_average = left_to_average(self._bare)
        self._has_fp8_state = bool(precision_tensors(self._bare))

    def __call__(self, batches: Sequence[Batch], *, step: int) -> StepResult:
        """Train on ``batches`` as optimizer step ``step`` (1, 2, ...)."""
        return self.attempt(StepInput.of(Attempt(value=batches), ranks=self.ranks), step=step)

    def attempt(self, step_input: StepInput, *, step: int) -> StepResult:
        """The step where reading the batches may have failed on a rank: then all stop, as in ``Ranks.together``."""
        counts = step_input.counts
        micro_batches = self.ranks.settle(step_input.batches, num_failed=counts.num_failed)
        learning_rate = self.set_learning_rates(step)
        loss_sum, finite = 0.0, True
        if counts.num_targets:
            loss_sum, finite = self._train(micro_batches, counts.num_targets, step=step)
        else:
            self.lookahead.leave_out()
        return StepResult(
            loss_sum=loss_sum,
            num_targets=counts.num_targets,
            num_tokens=counts.num_tokens,
            num_users=counts.num_users,
            learning_rate=learning_rate,
            applied=finite and counts.num_targets > 0,
            finite=finite,
        )

    def _train(self, batches: Sequence[Batch], num_targets: int, *, step: int) -> tuple[float, bool]:
        """The sum of losses over ranks, and whether all was finite and the weights have changed."""
        if self.dynamic is not None:
            self.dynamic.admit(batches, step=step)
        FINITE_WATCH.take(self.ranks.device)  # what forwards outside of steps left there
        if self.tables is not None:
            self.tables.begin_step()
        replays = self.trainer.nonfinite == "locate"
        start = StepStart.of(
            self._bare, device=self.ranks.device, with_precision=self._has_fp8_state, with_random=replays
        )
        loss_sum, finite = self._agree(self._backward(batches, num_targets), self._clip())
        if finite:
            self.ranks.progress.enter("optimizer")
            self._update(step)
        self._drop_gradients()  # those of sharded tables among them, where they have not been used
        if not finite:
            start.put_back(self._bare)
            origin = self._locate(batches, num_targets, start) if replays else None
            if self.dynamic is not None:
                self.dynamic.undo()
            if self.trainer.nonfinite != "skip":
                raise NonFiniteError(_sentence(step, loss_sum / num_targets, origin))
        return loss_sum, finite

    def _backward(self, batches: Sequence[Batch], num_targets: int) -> Tensor:
        """Gradients of the mean loss, summed over ranks; returns this rank's sum of losses, ()."""
        scale = loss_scale(self.ranks, num_targets)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        with no_gradient_sync(self.model):
            for batch in batches[:-1]:
                loss_sum += self._backward_one(self._forward_one(batch), scale)
        loss_sum += self._backward_one(self._forward_one(batches[-1]), scale)
        average_gradients(self._left_to_average, self.ranks)
        if self.tensor_parallel is not None:
            self.tensor_parallel.broadcast_gradients(self._bare)
        self.lookahead.backward_is_queued()
        return loss_sum if self.ranks.is_first_peer else torch.zeros_like(loss_sum)

    def _forward_one(self, batch: Batch) -> Tensor:
        self.ranks.progress.enter("forward")
        loss: Tensor = self.model(batch.to(self.ranks.device, non_blocking=True)).loss_per_target.sum()
        return loss

    def _backward_one(self, loss: Tensor, scale: float) -> Tensor:
        self.ranks.progress.enter("backward")
        (loss * scale).backward()
        return loss.detach().double()

    def _clip(self) -> Tensor:
        """Clip the gradients; returns their global norm before, ()."""
        norm = self._gradient_norm()
        if self.trainer.grad_clip_norm is not None:
            clip_gradients(self._parameters, self.trainer.grad_clip_norm, norm)
        return norm

    def _gradient_norm(self) -> Tensor:
        # Sharded tables allow no clipping, but their gradients may not be finite where all others are.
        of_tables = [] if self.tables is None else self.tables.gate.gradients()
        if self.tensor_parallel is not None:
            norm = self.tensor_parallel.gradient_norm(self._bare)
            return torch.linalg.vector_norm(torch.stack([norm, total_norm(of_tables, norm.device)]))
        dense = [p.grad for p in self._parameters if p.grad is not None]
        return total_norm([*dense, *of_tables], self.ranks.device)

    def _agree(self, loss_sum: Tensor, norm: Tensor) -> tuple[float, bool]:
        """The loss summed over ranks, and whether loss, gradients and what entered FP8 products is finite on all."""
        bad = norm.isfinite().logical_not()
        watched = FINITE_WATCH.take(self.ranks.device)
        if watched is not None:
            bad = bad | watched.isfinite().logical_not()
        weights = [part for part in map(own_part, self._fp8_weights) if part.numel()]
        if weights:  # a cast to FP8 hides infinite weights as it does inputs
            amaxes = torch._foreach_norm(weights, float("inf"))
            bad = bad | torch.stack(amaxes).isfinite().logical_not().any()
        with self.ranks.progress.collective("all-reduce", "loss and finiteness"):
            total, num_bad = self.ranks.sum(torch.stack([loss_sum, bad.double()])).tolist()
        return total, math.isfinite(total) and not num_bad

    def _update(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.tables is not None:
            self.ranks.progress.enter("optimizer of shared tables")  # whose backward waits for the other ranks
            self.tables.step()
        if self.average is not None:
            self.average.update(step)

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.tables is not None:
            self.tables.gate.drop()

    def _locate(self, batches: Sequence[Batch], num_targets: int, start: StepStart) -> str:
        device = self.ranks.device
        self.lookahead.let_go()
        start.rewind_random(device)
        self.ranks.progress.enter("replay of the step")
        try:
            return locate(
                self._bare,
                [batch.to(device) for batch in batches],
                loss_scale=loss_scale(self.ranks, num_targets),
                ranks=self.ranks,
            )
        finally:
            self._drop_gradients()
            start.put_back(self._bare)


def _sentence(step: int, mean_loss: float, origin: str | None) -> str:
    stopped = f"the loss or a gradient is not finite at step {step} (mean loss {mean_loss}): stopped before the weights"
    if origin is not None:
        return f"{stopped} changed; {origin}"
    return (
        f'{stopped} changed; TrainerArgs.nonfinite = "skip" leaves such steps out, "locate" looks for the module that '
        "made it"
    )
