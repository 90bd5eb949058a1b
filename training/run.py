"""A run: its data, model, optimizers and checkpoints, built from the configuration."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from torch.optim import Optimizer

from genrec.configs.schema import ExperimentConfig
from genrec.data.format import SPLIT_NAMES
from genrec.training.average import WeightAverage
from genrec.training.dense_parallel import replicate, shard_dense
from genrec.training.dynamic_tables import DynamicTables
from genrec.training.evaluation import Evaluation
from genrec.training.evaluator import Evaluator, seed_everything
from genrec.training.feed import Lookahead
from genrec.training.meter import Meter
from genrec.training.optim import LearningRateSchedule, Scheduled, build_optimizers
from genrec.training.ranks import Ranks
from genrec.training.run_checkpoints import RunCheckpoints
from genrec.training.run_texts import run_texts
from genrec.training.state import TrainingState
from genrec.training.step import TrainStep

LOG = logging.getLogger(__name__)


class Run(Evaluator):
    """An Evaluator that trains: with a train loader, and, once it is placed, optimizers, an average of the weights and
    checkpoints.
    """

    checkpoints: RunCheckpoints

    def __init__(self, config: ExperimentConfig, *, ranks: Ranks) -> None:
        super().__init__(config, ranks=ranks, splits=SPLIT_NAMES, table_config=config)
        self.loader = self.data.train_loader()
        self.vocabulary = self.data.vocabulary()
        self.optimizers: tuple[Optimizer, ...] = ()
        self.average: WeightAverage | None = None
        self.dynamic: DynamicTables | None = None
        self.output_dir = Path(config.trainer.output_dir)
        self.meter = Meter()
        self.texts = run_texts(config)

    def place_dense(self) -> None:
        """As of an Evaluator; with TrainerArgs.dense_parallel = "fsdp2" each rank keeps its part."""
        if self.config.trainer.dense_parallel == "fsdp2" and self.ranks.world_size > 1:
            shard_dense(self.model, self.ranks)
        elif self.config.trainer.dense_parallel == "fsdp2":
            LOG.info("dense_parallel 'fsdp2' has no effect on one rank, which holds all weights whole")
        super().place_dense()

    def place(self) -> None:
        """As of an Evaluator, and make what trains the model."""
        super().place()
        trainer = self.config.trainer
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
        self.checkpoints = RunCheckpoints(
            self.config,
            self.state,
            ranks=self.ranks,
            data=self.data,
            loader=self.loader,
            meter=self.meter,
            texts=self.texts,
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
            tensor_parallel=self.tensor_parallel,
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
            tensor_parallel=self.tensor_parallel,
        )

    def evaluate_splits(self, splits: Sequence[str]) -> list[Evaluation]:
        """Evaluate ``splits`` in all protocols, with the averaged weights where the run keeps them."""
        with contextlib.nullcontext() if self.average is None else self.average.applied():
            return [self.evaluate(split, protocol) for split in splits for protocol in self.data.protocols]
