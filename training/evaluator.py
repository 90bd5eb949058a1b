"""The data and the model of a run, and their evaluation: all that evaluate.py needs, and what a run trains."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torchrec.distributed.types import ShardingPlan

from genrec.configs.schema import RANKING_METRICS, ExperimentConfig
from genrec.model.features import feature_layout
from genrec.model.ranking import RankingModel
from genrec.model.table_specs import embedding_tables
from genrec.training import restore
from genrec.training.datasets import RunData
from genrec.training.evaluation import Evaluation, evaluate
from genrec.training.memory import enough_memory
from genrec.training.metrics import RankingMetrics
from genrec.training.ranks import Ranks
from genrec.training.score_table import ScoreTable
from genrec.training.state import TrainingState
from genrec.training.table_budget import TableBudget, table_budget
from genrec.training.table_placement import TablePlacement, placements
from genrec.training.table_plan import plan_tables
from genrec.training.table_types import sharded_tables
from genrec.training.tables import ShardedTables
from genrec.training.tensor_parallel import TensorParallelWeights

STANDARD_METRICS = ("AUC", "GAUC", "NE", "LogLoss")  # of every run; RankingArgs.eval_metrics can add to them


class Evaluator:
    """The data and model that evaluation needs, built without anything of training.

    table_config: the configuration by which tables are shared; None: of tables that are not trained.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        ranks: Ranks,
        splits: Sequence[str],
        table_config: ExperimentConfig | None = None,
    ) -> None:
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
        self._table_config = without_training(config) if table_config is None else table_config
        self._sharded = sharded_tables(
            self.table_specs, self._table_config, device_type=ranks.device.type, world_size=ranks.world_size
        )
        seed_everything(config.trainer.seed)  # equal on all ranks, for equal first weights
        with enough_memory():
            self.model = RankingModel(config, metadata=self.data.metadata, sharded=self._sharded)
        self.tables: ShardedTables | None = None
        self.tensor_parallel: TensorParallelWeights | None = None
        wanted = {*STANDARD_METRICS, *config.ranking.eval_metrics}
        self.metric_names = tuple(name for name in RANKING_METRICS if name in wanted)

    def place(self) -> None:
        """Put the model on its device, and of sharded tables this rank's part; what the constructor does not, since it
        takes all ranks.
        """
        if self._sharded:
            self.tables = ShardedTables(self.model, self._plan(), config=self._table_config, ranks=self.ranks)
        if self.ranks.tensor.size > 1:
            self.tensor_parallel = TensorParallelWeights(self.model, self.ranks.tensor)
        self.place_dense()

    def place_dense(self) -> None:
        """Put the dense weights on the device, once tables are placed."""
        self.model.to(self.ranks.device)

    def _plan(self) -> ShardingPlan:
        """The same on all ranks, within the least of their budgets."""
        budgets = self.ranks.gather(self.ranks.together(self._budget))
        least = min(budgets, key=lambda budget: budget.device_bytes)
        plan = self.ranks.together(lambda: self._plan_within(least) if self.ranks.is_main else None)
        return self.ranks.gather(plan)[0]

    def _budget(self) -> TableBudget:
        tokens = feature_layout(self.config, self.data.metadata).max_num_tokens
        return table_budget(self._table_config, self.model, device=self.ranks.device, max_num_tokens=tokens)

    def _plan_within(self, budget: TableBudget) -> ShardingPlan:
        return plan_tables(
            self.model,
            self.table_specs,
            self._sharded,
            config=self._table_config,
            budget=budget,
            device_type=self.ranks.device.type,
            world_size=self.ranks.world_size,
        )

    @property
    def placements(self) -> list[TablePlacement]:
        """Where each table lies."""
        plan = None if self.tables is None else self.tables.plan
        return placements(self.table_specs, plan, self._table_config, world_size=self.ranks.world_size)

    def restore_for_evaluation(self, path: Path) -> None:
        """Put the weights of a checkpoint, or their average, into the model."""
        state = TrainingState(model=self.model, tables=self.tables, tensor_parallel=self.tensor_parallel)
        restore.restore_for_evaluation(path, state)

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


def without_training(config: ExperimentConfig) -> ExperimentConfig:
    """``config`` with tables that have no moments, and nothing that only training could not have of them."""
    optimizer = dataclasses.replace(config.optimizer, embedding_optimizer_str="sgd", embedding_weight_decay=0.0)
    trainer = dataclasses.replace(
        config.trainer, accumulate_steps=1, grad_clip_norm=None, ema_decay=None, pipeline_type="none"
    )
    return dataclasses.replace(config, optimizer=optimizer, trainer=trainer)


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, numpy and python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
