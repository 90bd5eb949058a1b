from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ExperimentConfig
from genrec.training.checkpoint import newest_checkpoint, read_tensors


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
