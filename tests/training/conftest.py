from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ExperimentConfig
from genrec.data.batch import Batch
from genrec.model.ranking import RankingModel
from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.datasets import read_run_metadata
from genrec.training.optim import LearningRateSchedule, build_optimizers
from genrec.training.ranks import Ranks
from genrec.training.step import TrainStep


@pytest.fixture
def tiny_config(tiny_gin: Path) -> Callable[..., ExperimentConfig]:
    """``tiny_config(output_dir, "TrainerArgs.seed = 1", ...)``."""

    def build(output_dir: Path, *bindings: str) -> ExperimentConfig:
        places = f"TrainerArgs.output_dir = {str(output_dir)!r}"
        return load_experiment("ranking", gin_files=[str(tiny_gin)], gin_bindings=[places, *bindings])

    return build


@pytest.fixture
def last_tensors() -> Callable[[Path], dict[str, torch.Tensor]]:
    """All tensors of the newest checkpoint of an output folder."""

    def read(output_dir: Path) -> dict[str, torch.Tensor]:
        newest = newest_checkpoint(output_dir / "checkpoints")
        assert newest is not None
        return read_tensors(newest, prefixes=("",))

    return read


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """``make_batch([3, 0, 1])``: users with so many events, all of them labelled, or the last ``num_candidates``."""

    def make(lengths: Sequence[int], *, num_candidates: Sequence[int] | None = None, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        num_events, num_users = sum(lengths), len(lengths)

        def draw(high: int, size: int) -> torch.Tensor:
            return torch.randint(high, (size,), generator=generator)

        labelled = torch.tensor(lengths if num_candidates is None else num_candidates, dtype=torch.int64)
        values = [draw(4, num_users), draw(20, num_events), draw(5, num_events)]  # age, item, action
        per_user = torch.tensor(lengths, dtype=torch.int64)
        return Batch(
            features=KeyedJaggedTensor(
                keys=["age", "item", "action"],
                values=torch.cat(values),
                lengths=torch.cat([torch.ones_like(per_user), per_user, per_user]),
                stride=num_users,
            ),
            timestamps=60 * torch.arange(num_events),
            num_candidates=torch.zeros_like(labelled) if num_candidates is None else labelled,
            num_labelled=labelled,
            labels=draw(2, int(labelled.sum())),
            user_ids=torch.arange(num_users),
            batch_size=num_users,
            max_num_events=max(lengths, default=0),
            item_feature_name="item",
            action_feature_name="action",
            contextual_feature_names=("age",),
        )

    return make


@pytest.fixture
def make_step(tmp_path: Path, tiny_config: Callable[..., ExperimentConfig]) -> Callable[..., TrainStep]:
    """``make_step("TrainerArgs.nonfinite = 'skip'", ...)``: a train step of a new tiny model, always the same one."""

    def make(*bindings: str) -> TrainStep:
        config = tiny_config(tmp_path / "unused", *bindings)
        torch.manual_seed(0)
        model = RankingModel(config, metadata=read_run_metadata(config))
        optimizers = build_optimizers(model, config.optimizer)
        return TrainStep(
            model,
            optimizers,
            trainer=config.trainer,
            ranks=Ranks(rank=0, world_size=1, device=torch.device("cpu")),
            set_learning_rates=LearningRateSchedule(optimizers, config.trainer, total_steps=10),
        )

    return make
