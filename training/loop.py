"""The training loop: steps, and between them log lines, evaluation and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from genrec.configs.schema import TrainerArgs
from genrec.data.batch import Batch
from genrec.training.feed import Feed
from genrec.training.report import RunLog
from genrec.training.run import Run
from genrec.training.step import StepResult, TrainStep
from genrec.training.stopping import Stopped

LOG = logging.getLogger(__name__)


class TrainLoader(Protocol):
    """What the loop asks of a loader: an iteration is an epoch, from the cursor on; the next is the next epoch."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...


class Loop:
    """Trains ``run`` from ``first_step`` on. Evaluating and saving change nothing of what training computes.

    train_step, feed: of the run. Where saves go on in the background, what one has met is raised with the next batch.
    """

    def __init__(self, run: Run, *, train_step: TrainStep, feed: Feed, log: RunLog, first_step: int) -> None:
        self.run = run
        self.trainer = run.config.trainer
        self.ranks = run.ranks
        self.meter = run.meter
        self.checkpoints = run.checkpoints
        self.train_step = train_step
        self.feed = feed
        self.log = log
        self.step = first_step
        self.total_steps = total_steps(self.trainer, run.loader)

    def train(self) -> None:
        """Train; ends with a checkpoint of the last step, without the final evaluation.

        Raises Stopped, with a checkpoint of the step, where a rank has been asked to stop.
        """
        self._make_up_evaluation()
        micro_batches = grouped(self.run.loader, self.trainer.accumulate_steps)
        self.train_step.model.train()
        with profiled(self.trainer, rank=self.ranks.rank, num_steps=self.total_steps - self.step) as profile_step:
            while self.step < self.total_steps:
                if not self.feed.num_left:
                    self.feed.begin(lambda: self._next(micro_batches), self._steps_to_pause())
                self.ranks.progress.enter("reading a batch", step=self.step + 1)
                step_input = self.feed.next()
                self.step += 1
                result = self.train_step.attempt(step_input, step=self.step)
                self.feed.done()
                self._record(result)
                profile_step()
                if self.feed.stop_asked:
                    self.feed.give_back()
                    self._stop()
                self._between_steps()
        self.ranks.together(self.log.raise_failure)

    def _next(self, micro_batches: Iterator[list[Batch]]) -> Sequence[Batch]:
        """The next step's batches. Raises what went wrong with them, or with the log or a save since the step before.

        Told with the loader's errors, a failure that a rank alone knows of costs no collective of its own.
        """
        self.log.raise_failure()
        self.checkpoints.store.check()
        return next(micro_batches)

    def _record(self, result: StepResult) -> None:
        self.ranks.progress.enter("writing the log")
        self.meter.add(result)
        line = self.meter.line(self.step, result.learning_rate)
        self.log.progress(self.step, line)
        if not result.finite:
            LOG.warning("step %d was left out: its loss or a gradient is not finite", self.step)
            self.log.other({"event": "skipped", "step": self.step, "loss": None})
        if self._due(self.trainer.log_interval) or self.step == self.total_steps:
            self.log.train(line)
            self.meter.reset()

    def _steps_to_pause(self) -> int:
        """Steps until one that is evaluated or saved."""
        intervals = [n for n in (self.trainer.eval_interval, self.trainer.ckpt_save_interval) if n > 0]
        return min([self.total_steps - self.step, *(n - self.step % n for n in intervals)])

    def _between_steps(self) -> None:
        last = self.step == self.total_steps  # the final evaluation follows the loop
        self.meter.pause()
        best = self._due(self.trainer.eval_interval) and not last and self._evaluate()
        if self._due(self.trainer.ckpt_save_interval) or last or best:
            self.checkpoints.save(self.step)
        self.meter.resume()

    def _evaluate(self) -> bool:
        """Evaluate the validation split; whether this step is the best so far."""
        try:
            evaluations = self.run.evaluate_splits(("valid",))
        except Stopped:
            self._stop()
        self.log.evaluations(self.step, evaluations)
        return self.checkpoints.is_best(self.step, evaluations)

    def _make_up_evaluation(self) -> None:
        """Evaluate the step that a run continues from, where it was stopped before it had."""
        due = self.step > 0 and self._due(self.trainer.eval_interval) and self.step < self.total_steps
        if due and not self.ranks.gather(self.log.has_evaluation(self.step))[0]:
            self.meter.pause()
            if self._evaluate():
                self.checkpoints.save(self.step)
            self.meter.resume()

    def _stop(self) -> NoReturn:
        """Save this step, whose evaluation is made up for by the run that continues, and end."""
        self.checkpoints.save(self.step)
        self.checkpoints.store.finish()
        self.ranks.together(self.log.raise_failure)
        raise Stopped(self.step, saved=self.checkpoints.is_on)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0


def total_steps(trainer: TrainerArgs, loader: TrainLoader) -> int:
    """max_train_iters, or the optimizer steps of one epoch."""
    if trainer.max_train_iters is not None:
        return trainer.max_train_iters
    return math.ceil(len(loader) / trainer.accumulate_steps)


def grouped(loader: TrainLoader, size: int) -> Iterator[list[Batch]]:
    """Micro-batches in groups of ``size``, epoch after epoch without end; an epoch's last group may be smaller."""
    assert len(loader) > 0, "a loader without batches is refused before training"
    while True:
        epoch = iter(loader)
        while group := list(itertools.islice(epoch, size)):
            yield group


@contextlib.contextmanager
def profiled(trainer: TrainerArgs, *, rank: int, num_steps: int) -> Iterator[Callable[[], Any]]:
    """With TrainerArgs.profile, a Chrome trace of steps profile_step_start to profile_step_end into output_dir/profile.

    Yields what to call after each step; steps are counted from the start of this process, which has ``num_steps``.
    """
    is_too_short = num_steps < trainer.profile_step_start
    if trainer.profile and is_too_short:
        LOG.warning("nothing is profiled: only %d steps are left, below profile_step_start", num_steps)
    if not trainer.profile or is_too_short:
        yield lambda: None
        return
    folder = Path(trainer.output_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    start, end = trainer.profile_step_start, trainer.profile_step_end
    schedule = torch.profiler.schedule(wait=max(start - 1, 0), warmup=min(start, 1), active=end - start, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    trace = folder / f"trace_rank{rank}.json"
    LOG.info("profiles steps %d to %d into %s", start, end, trace)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=lambda p: p.export_chrome_trace(str(trace))
    ) as profiler:
        yield profiler.step
