"""The checkpoints of a run: where it starts from, what it saves when, and which one is the best."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from genrec.configs.schema import ExperimentConfig, UserError
from genrec.data.loader import SequenceLoader
from genrec.data.synthetic import SyntheticLoader
from genrec.training import restore, same_run, warm_start
from genrec.training.best import BestCheckpoint
from genrec.training.checkpoint import read_host, resolve_checkpoint
from genrec.training.checkpoint_store import CheckpointStore
from genrec.training.datasets import RunData
from genrec.training.evaluation import Evaluation
from genrec.training.meter import Meter
from genrec.training.metrics_log import Line
from genrec.training.ranks import Ranks
from genrec.training.state import TrainingState, collect_tensors, first_not_finite, random_state, set_random_state
from genrec.training.step import NonFiniteError

LOG = logging.getLogger(__name__)


class RunCheckpoints:
    """What a run continues from and saves: its ``state``, the cursor of its loader, its meter and random states.

    texts: file name to content, which each checkpoint gets. is_on: whether there are any, as
    TrainerArgs.ckpt_save_interval has it. Ranks call alike, from the constructor on.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        state: TrainingState,
        *,
        ranks: Ranks,
        data: RunData,
        loader: SequenceLoader | SyntheticLoader,
        meter: Meter,
        texts: Mapping[str, str],
    ) -> None:
        trainer = config.trainer
        self.is_on = trainer.ckpt_save_interval != 0
        folder = Path(trainer.ckpt_save_dir) if trainer.ckpt_save_dir else Path(trainer.output_dir) / "checkpoints"
        self.store = CheckpointStore(
            folder, keep=trainer.keep_checkpoints, ranks=ranks, in_background=trainer.async_save
        )
        metric = trainer.best_metric
        self.best = None if metric is None else BestCheckpoint(metric, protocols=data.protocols)
        self._config = config
        self._state = state
        self._ranks = ranks
        self._data = data
        self._loader = loader
        self._meter = meter
        self._texts = texts
        self._saved_step: int | None = None

    def start(self) -> int:
        """Continue the newest whole checkpoint, else start from ckpt_load_dir or anew; returns the steps done."""
        newest = self.store.newest()
        return self._ranks.together(lambda: self._start_from(newest))

    def save(self, step: int) -> None:
        """Write a checkpoint of everything that training computes from, where ``step`` has none yet.

        With TrainerArgs.async_save it is being written as this returns.
        """
        if not self.is_on:
            return
        self._ranks.progress.enter("saving")
        if step == self._saved_step:  # saved before it was evaluated
            if self.best is not None and self.best.step == step:
                self.store.mark_best(step)
            return
        host = {
            "step": step,
            "world_size": self._ranks.data_size,
            "tensor_parallel_size": self._ranks.tensor.size,
            "loader": self._loader.state_dict(),
            "data": self._data.identity,
            "meter": self._meter.values,
            "random": random_state(),
        }
        tensors = collect_tensors(self._state)
        self._ranks.together(lambda: self._check_finite(step))
        best_step = None if self.best is None else self.best.step
        self.store.save(step, tensors=tensors, host=host, texts=self._texts, best_step=best_step)
        self._saved_step = step

    def resume_best(self, lines: Sequence[Line]) -> None:
        """Learn from rank 0's lines of metrics.jsonl which checkpoint is the best."""
        if self.best is not None:
            steps = self._ranks.gather(self.store.steps())[0]
            self.best.resume(self._ranks.gather(list(lines))[0], steps=steps)

    def is_best(self, step: int, evaluations: Sequence[Evaluation]) -> bool:
        """Whether checkpoint ``step`` is to be kept as the best, by what TrainerArgs.best_metric says of it."""
        if self.best is None or not self._ranks.gather(self.best.take(step, evaluations))[0]:
            return False
        LOG.info("step %d is the best so far: %s %.4f", step, self.best.metric, self.best.value)
        return True

    def _check_finite(self, step: int) -> None:
        unsound = first_not_finite(self._state.model)
        if unsound is not None:
            raise NonFiniteError(
                f"{unsound} is not finite after step {step}, which is not saved: a smaller "
                "OptimizerArgs.learning_rate may keep it so"
            )

    def _start_from(self, newest: Path | None) -> int:
        trainer = self._config.trainer
        if newest is not None and trainer.resume == "never":
            raise UserError(
                f"{self.store.directory} already holds {newest.name} of a run, and TrainerArgs.resume = 'never': "
                "choose another TrainerArgs.output_dir, or resume = 'auto' to continue it"
            )
        if newest is not None:
            return self._continue_from(newest)
        if trainer.ckpt_load_dir:
            self._start_from_other(resolve_checkpoint(Path(trainer.ckpt_load_dir)))
        return 0

    def _start_from_other(self, path: Path) -> None:
        same = same_run.same_optimizers(path, self._config)
        parts = self._config.trainer.ckpt_load_parts
        state = self._state if same else dataclasses.replace(self._state, optimizers=())
        warm_start.start_from(path, state, parts=parts, data=self._data.identity)
        what = {"all": "weights", "embedding": "embedding tables", "dense": "weights outside of embedding tables"}[
            parts
        ]
        optimizers = "and their optimizer state" if same else "alone, its optimizers being others,"
        LOG.info("starts from the %s %s of %s", what, optimizers, path)

    def _continue_from(self, path: Path) -> int:
        host = read_host(path, rank=0)
        data_sizes = (int(host["world_size"]), self._ranks.data_size)
        same_run.check_same_run(path, self._config, data_sizes=data_sizes)
        same_run.check_same_data(path, saved=host["data"], current=self._data.identity)
        restore.restore_tensors(path, self._state)
        self._loader.load_state_dict(host["loader"])
        self._meter.values = host["meter"]
        self._continue_random(path, host, data_sizes=data_sizes)
        self._saved_step = int(host["step"])
        return self._saved_step

    def _continue_random(self, path: Path, host: Mapping[str, Any], *, data_sizes: tuple[int, int]) -> None:
        """Take the random state of this rank's part of the data, where the data has as many parts as then."""
        if data_sizes[0] == data_sizes[1]:
            # Peers have the same random state.
            place = self._ranks.data_rank * host.get("tensor_parallel_size", 1)
            set_random_state(read_host(path, rank=place)["random"])
            LOG.info("continues from %s", path)
        else:
            same = same_run.same_global_batches(path, self._config, data_sizes=data_sizes)
            other = "random numbers" if same else "global batches and random numbers"
            LOG.warning("continues from %s of %d ranks with %d: with other %s than there", path, *data_sizes, other)
