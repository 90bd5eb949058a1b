"""A run: its data, model, optimizers and checkpoints, built from the configuration and saved and restored together."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import platform
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer
from torchrec.distributed.types import ShardingPlan

from genrec.configs.loading import operative_text
from genrec.configs.schema import RANKING_METRICS, ExperimentConfig, UserError
from genrec.data.files import write_atomically
from genrec.data.format import SPLIT_NAMES
from genrec.model.features import feature_layout
from genrec.model.ranking import RankingModel
from genrec.model.table_specs import embedding_tables
from genrec.training import restore, same_run, warm_start
from genrec.training.average import WeightAverage
from genrec.training.best import BestCheckpoint
from genrec.training.checkpoint import read_host, resolve_checkpoint
from genrec.training.checkpoint_store import CheckpointStore
from genrec.training.datasets import RunData
from genrec.training.dense_parallel import replicate, shard_dense
from genrec.training.dynamic_tables import DynamicTables
from genrec.training.evaluation import Evaluation, ScoreTable, evaluate
from genrec.training.feed import Lookahead
from genrec.training.metrics import RankingMetrics
from genrec.training.metrics_log import Line
from genrec.training.optim import LearningRateSchedule, Scheduled, build_optimizers
from genrec.training.report import Meter
from genrec.training.sharding import Ranks
from genrec.training.state import (
    TrainingState,
    collect_tensors,
    first_not_finite,
    random_state,
    set_random_state,
)
from genrec.training.step import NonFiniteError, TrainStep
from genrec.training.table_budget import TableBudget, table_budget
from genrec.training.table_placement import TablePlacement, placements
from genrec.training.table_plan import plan_tables
from genrec.training.table_types import sharded_tables
from genrec.training.tables import ShardedTables
from genrec.training.tensor_parallel import WeightParts, check_tables

LOG = logging.getLogger(__name__)

STANDARD_METRICS = ("AUC", "GAUC", "NE", "LogLoss")  # of every run; RankingArgs.eval_metrics can add to them


class Evaluator:
    """The data and model that evaluation needs, built without anything of training."""

    def __init__(self, config: ExperimentConfig, *, ranks: Ranks, splits: Sequence[str]) -> None:
        assert config.ranking is not None, "a ranking run has RankingArgs"
        self.config = config
        self.ranks = ranks
        self.data = RunData(
            config,
            splits=splits,
            rank=ranks.data_rank,
            world_size=ranks.data_size,
            pin_memory=ranks.device.type == "cuda",
        )
        self.table_specs = embedding_tables(config, self.data.metadata)
        self._sharded = sharded_tables(
            self.table_specs, self._table_config, device_type=ranks.device.type, world_size=ranks.world_size
        )
        check_tables(self._sharded, ranks.tensor)
        seed_everything(config.trainer.seed)  # equal on all ranks, for equal first weights
        self.model = RankingModel(config, metadata=self.data.metadata, sharded=self._sharded)
        self.tables: ShardedTables | None = None
        self.parts: WeightParts | None = None
        wanted = {*STANDARD_METRICS, *config.ranking.eval_metrics}
        self.metric_names = tuple(name for name in RANKING_METRICS if name in wanted)

    def place(self) -> None:
        """Put the model on its device, and of sharded tables this rank's part; what the constructor does not, since it
        takes all ranks.
        """
        if self._sharded:
            budgets = self.ranks.gather(self.ranks.together(self._budget))
            least = min(budgets, key=lambda budget: budget.device_bytes)
            plan = self.ranks.together(lambda: self._plan(least) if self.ranks.is_main else None)
            plan = self.ranks.gather(plan)[0]
            self.tables = ShardedTables(self.model, plan, config=self._table_config, ranks=self.ranks)
        if self.ranks.tensor.size > 1:
            self.parts = WeightParts(self.model, self.ranks.tensor)
        self._place_dense()

    def _place_dense(self) -> None:
        self.model.to(self.ranks.device)

    @property
    def placements(self) -> list[TablePlacement]:
        """Where each table lies."""
        plan = None if self.tables is None else self.tables.plan
        return placements(self.table_specs, plan, self._table_config, world_size=self.ranks.world_size)

    def restore_for_evaluation(self, path: Path) -> None:
        """Put the weights of a checkpoint, or their average, into the model."""
        state = TrainingState(model=self.model, tables=self.tables, parts=self.parts)
        restore.restore_for_evaluation(path, state)

    @property
    def _table_config(self) -> ExperimentConfig:
        """The configuration with tables that have no moments, and nothing that only training could not have of them."""
        optimizer = dataclasses.replace(
            self.config.optimizer, embedding_optimizer_str="sgd", embedding_weight_decay=0.0
        )
        trainer = dataclasses.replace(
            self.config.trainer, accumulate_steps=1, grad_clip_norm=None, ema_decay=None, pipeline_type="none"
        )
        return dataclasses.replace(self.config, optimizer=optimizer, trainer=trainer)

    def _budget(self) -> TableBudget:
        tokens = feature_layout(self.config, self.data.metadata).max_num_tokens
        return table_budget(self._table_config, self.model, device=self.ranks.device, max_num_tokens=tokens)

    def _plan(self, budget: TableBudget) -> ShardingPlan:
        return plan_tables(
            self.model,
            self.table_specs,
            self._sharded,
            config=self._table_config,
            budget=budget,
            device_type=self.ranks.device.type,
            world_size=self.ranks.world_size,
        )

    def evaluate(self, split: str, protocol: str, *, table: ScoreTable | None = None) -> Evaluation:
        """Evaluate the model's present weights; ``table`` collects the scores."""
        loader = self.ranks.together(lambda: self.data.evaluation_loader(split, protocol))
        return evaluate(
            self.model,
            loader,
            split=split,
            protocol=protocol,
            ranks=self.ranks,
            make_metrics=lambda: RankingMetrics(self.model.num_tasks, self.metric_names),
            max_iters=self.config.trainer.max_eval_iters,
            table=table,
        )


class Run(Evaluator):
    """An Evaluator that trains: with a train loader, optimizers, an average of the weights and checkpoints."""

    def __init__(self, config: ExperimentConfig, *, ranks: Ranks) -> None:
        super().__init__(config, ranks=ranks, splits=SPLIT_NAMES)
        trainer = config.trainer
        self.loader = self.data.train_loader()
        self.vocabulary = self.data.vocabulary()
        self.optimizers: tuple[Optimizer, ...] = ()
        self.average: WeightAverage | None = None
        self.dynamic: DynamicTables | None = None
        self.output_dir = Path(trainer.output_dir)
        directory = Path(trainer.ckpt_save_dir) if trainer.ckpt_save_dir else self.output_dir / "checkpoints"
        self.store = CheckpointStore(
            directory, keep=trainer.keep_checkpoints, ranks=ranks, in_background=trainer.async_save
        )
        metric = trainer.best_metric
        self.best = None if metric is None else BestCheckpoint(metric, protocols=self.data.protocols)
        self.meter = Meter()
        self._saved_step: int | None = None
        self._texts = {
            "config.gin": config.text,
            "operative_config.gin": operative_text(),
            "config.json": json.dumps(same_run.config_values(config), indent=1),
            "versions.json": json.dumps(versions(), indent=1),
        }

    @property
    def _table_config(self) -> ExperimentConfig:
        return self.config

    def _place_dense(self) -> None:
        if self.config.trainer.dense_parallel == "fsdp2" and self.ranks.world_size > 1:
            shard_dense(self.model, self.ranks)
        elif self.config.trainer.dense_parallel == "fsdp2":
            LOG.info("dense_parallel 'fsdp2' has no effect on one rank, which holds all weights whole")
        super()._place_dense()

    def place(self) -> None:
        """As of an Evaluator, and make what trains the model."""
        super().place()
        trainer = self.config.trainer
        self.store.open()
        self.optimizers = build_optimizers(self.model, self.config.optimizer)
        if trainer.ema_decay is not None:
            self.average = WeightAverage(self.model, decay=trainer.ema_decay)
        if any(spec.is_dynamic for spec in self.table_specs):
            self.dynamic = DynamicTables(
                self.model,
                self.table_specs,
                self.optimizers,
                config=self.config,
                ranks=self.ranks,
                tables=self.tables,
                average=self.average,
            )
        seed_everything(trainer.seed + self.ranks.data_rank)  # each part of the data has its own dropout

    def train_step(self, *, total_steps: int, lookahead: Lookahead | None = None) -> TrainStep:
        """The steps of this run, once it is placed: its model under DDP where that is how ranks share it. Ranks call
        alike. total_steps: of the schedule of learning rates; lookahead: see TrainStep.
        """
        scheduled: list[Scheduled] = [*self.optimizers, *([] if self.tables is None else [self.tables])]
        return TrainStep(
            replicate(self.model, self.ranks),
            self.optimizers,
            trainer=self.config.trainer,
            ranks=self.ranks,
            set_learning_rates=LearningRateSchedule(scheduled, self.config.trainer, total_steps=total_steps),
            average=self.average,
            tables=self.tables,
            lookahead=lookahead,
            parts=self.parts,
            dynamic=self.dynamic,
        )

    @property
    def state(self) -> TrainingState:
        """What training changes."""
        return TrainingState(
            model=self.model,
            optimizers=self.optimizers,
            average=self.average,
            tables=self.tables,
            vocabulary=self.vocabulary,
            parts=self.parts,
        )

    def write_config(self) -> None:
        """Put the configuration into the output folder. Raises UserError where that cannot be written."""
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            for name in ("config.gin", "operative_config.gin"):
                write_atomically(self.output_dir / name, self._texts[name])
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            raise UserError(f"TrainerArgs.output_dir = {str(self.output_dir)!r} cannot be written: {reason}") from error

    def start(self) -> int:
        """Continue the newest whole checkpoint, else start from ckpt_load_dir or anew; returns the steps done."""
        newest = self.store.newest()
        return self.ranks.together(lambda: self._start_from(newest))

    def _start_from(self, newest: Path | None) -> int:
        trainer = self.config.trainer
        if newest is not None and trainer.resume == "never":
            raise UserError(
                f"{self.store.directory} already holds {newest.name} of a run, and TrainerArgs.resume = 'never': "
                "choose another TrainerArgs.output_dir, or resume = 'auto' to continue it"
            )
        if newest is not None:
            return self._restore(newest)
        if trainer.ckpt_load_dir:
            path = resolve_checkpoint(Path(trainer.ckpt_load_dir))
            self._start_from_other(path)
        return 0

    def save(self, step: int) -> None:
        """Write a checkpoint of everything that training computes from, where ``step`` has none yet; none at all with
        TrainerArgs.ckpt_save_interval = 0.

        With TrainerArgs.async_save it is being written as this returns.
        """
        if self.config.trainer.ckpt_save_interval == 0:
            return
        self.ranks.progress.enter("saving")
        if step == self._saved_step:  # saved before it was evaluated
            if self.best is not None and self.best.step == step:
                self.store.mark_best(step)
            return
        host = {
            "step": step,
            "world_size": self.ranks.data_size,
            "tensor_parallel_size": self.ranks.tensor.size,
            "loader": self.loader.state_dict(),
            "data": self.data.identity,
            "meter": self.meter.values,
            "random": random_state(),
        }
        tensors = collect_tensors(self.state)
        self.ranks.together(lambda: self._check_finite(step))
        best_step = None if self.best is None else self.best.step
        self.store.save(step, tensors=tensors, host=host, texts=self._texts, best_step=best_step)
        self._saved_step = step

    def _check_finite(self, step: int) -> None:
        unsound = first_not_finite(self.model)
        if unsound is not None:
            raise NonFiniteError(
                f"{unsound} is not finite after step {step}, which is not saved: a smaller "
                "OptimizerArgs.learning_rate may keep it so"
            )

    def resume_best(self, lines: Sequence[Line]) -> None:
        """Learn from rank 0's lines of metrics.jsonl which checkpoint is the best."""
        if self.best is not None:
            steps = self.ranks.gather(self.store.steps())[0]
            self.best.resume(self.ranks.gather(list(lines))[0], steps=steps)

    def is_best(self, step: int, evaluations: Sequence[Evaluation]) -> bool:
        """Whether checkpoint ``step`` is to be kept as the best, by what TrainerArgs.best_metric says of it."""
        if self.best is None or not self.ranks.gather(self.best.take(step, evaluations))[0]:
            return False
        LOG.info("step %d is the best so far: %s %.4f", step, self.best.metric, self.best.value)
        return True

    def evaluate_splits(self, splits: Sequence[str]) -> list[Evaluation]:
        """Evaluate ``splits`` in both protocols, with the averaged weights where the run keeps them."""
        if self.average is None:
            return [self.evaluate(split, protocol) for split in splits for protocol in self.data.protocols]
        with self.average.applied():
            return [self.evaluate(split, protocol) for split in splits for protocol in self.data.protocols]

    def _start_from_other(self, path: Path) -> None:
        same = same_run.same_optimizers(path, self.config)
        parts = self.config.trainer.ckpt_load_parts
        state = self.state if same else dataclasses.replace(self.state, optimizers=())
        warm_start.start_from(path, state, parts=parts, data=self.data.identity)
        what = {"all": "weights", "embedding": "embedding tables", "dense": "weights outside of embedding tables"}[
            parts
        ]
        optimizers = "and their optimizer state" if same else "alone, its optimizers being others,"
        LOG.info("starts from the %s %s of %s", what, optimizers, path)

    def _restore(self, path: Path) -> int:
        same_run.check_same_run(path, self.config)
        host = read_host(path, rank=0)
        same_run.check_same_data(path, saved=host["data"], current=self.data.identity)
        restore.restore_tensors(path, self.state)
        self.loader.load_state_dict(host["loader"])
        self.meter.values = host["meter"]
        if host["world_size"] == self.ranks.data_size:
            # Peers have the same random state.
            place = self.ranks.data_rank * host.get("tensor_parallel_size", 1)
            set_random_state(read_host(path, rank=place)["random"])
            LOG.info("continues from %s", path)
        else:
            LOG.warning(
                "continues from %s of %d ranks with %d: with other global batches and random numbers than there",
                path,
                host["world_size"],
                self.ranks.data_size,
            )
        self._saved_step = int(host["step"])
        return self._saved_step


def versions() -> dict[str, str]:
    """What wrote a checkpoint, for who reads it later."""
    packages = ("genrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "transformer-engine", "triton")
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, numpy and python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
