"""Helpers for configuration tests: gin files on disk, and the sentence that a refused one ends with."""

from __future__ import annotations

import pytest

from genrec.configs.loading import load_experiment
from genrec.configs.schema import (
    ConfigError,
    DatasetArgs,
    ExperimentConfig,
    NetworkArgs,
    OptimizerArgs,
    RankingArgs,
    TrainerArgs,
    UserError,
)

MINIMAL = """
TrainerArgs.train_batch_size = 4
TrainerArgs.eval_batch_size = 4
DatasetArgs.dataset_name = 'ml-100k'
DatasetArgs.max_history_seqlen = 16
NetworkArgs.num_layers = 1
NetworkArgs.hidden_size = 16
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 8
RankingArgs.prediction_head_arch = [16, 1]
OptimizerArgs.optimizer_str = 'adam'
OptimizerArgs.learning_rate = 1e-3
"""


@pytest.fixture
def minimal_text():
    """The smallest ranking configuration as gin text."""
    return MINIMAL


@pytest.fixture
def load(tmp_path):
    """load(text, *bindings, task=...): the configuration of a gin file ``run.gin`` with ``text`` in it."""

    def load_text(text=MINIMAL, *bindings, task="ranking"):
        path = tmp_path / "run.gin"
        path.write_text(text)
        return load_experiment(task, gin_files=[str(path)], gin_bindings=bindings)

    return load_text


@pytest.fixture
def refused(load, tmp_path):
    """refused(text, *bindings): the error's text, one line, with the folder of ``run.gin`` left out."""

    def refuse(text=MINIMAL, *bindings, task="ranking"):
        with pytest.raises(UserError) as caught:
            load(text, *bindings, task=task)
        message = str(caught.value)
        assert type(caught.value) is ConfigError
        assert "\n" not in message
        return message.replace(f"{tmp_path}/", "")

    return refuse


@pytest.fixture
def experiment():
    """experiment(network={...}, ...): an ExperimentConfig built in Python, with fields of its parts replaced."""

    def build(*, trainer=None, dataset=None, network=None, optimizer=None, ranking=None, **parts):
        return ExperimentConfig(
            task="ranking",
            trainer=TrainerArgs(**{"train_batch_size": 4, "eval_batch_size": 4, **(trainer or {})}),
            dataset=DatasetArgs(**{"dataset_name": "ml-100k", "max_history_seqlen": 16, **(dataset or {})}),
            network=NetworkArgs(
                **{"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "kv_channels": 8, **(network or {})}
            ),
            optimizer=OptimizerArgs(**{"optimizer_str": "adam", "learning_rate": 1e-3, **(optimizer or {})}),
            ranking=RankingArgs(**{"prediction_head_arch": (16, 1), **(ranking or {})}),
            **parts,
        )

    return build
