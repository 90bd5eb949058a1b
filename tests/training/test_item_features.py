"""Item features along the whole path: prepared dataset, loaders, training, the checkpoint's evaluation."""

from __future__ import annotations

import pytest

from genrec.configs.schema import ConfigError
from genrec.training.metrics_log import read_lines
from genrec.training.scoring import load_checkpoint_config, score
from genrec.training.train import train

GENRES = "DatasetArgs.item_features = ['genres']"


@pytest.mark.parametrize("fusion", ["none", "add"])
def test_training_and_evaluating_the_checkpoint(tiny_config, tmp_path, last_tensors, fusion):
    train(tiny_config(tmp_path / "run", GENRES, f"NetworkArgs.action_fusion = {fusion!r}"))
    tables = [name for name in last_tensors(tmp_path / "run") if "table_item_genres" in name]
    assert any(name.startswith("model") for name in tables)
    assert any(name.startswith("optim") for name in tables)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    expected = next(x["metrics"] for x in lines if x["event"] == "test" and x["protocol"] == "frozen")
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    config = load_checkpoint_config(checkpoint, gin_bindings=())
    assert config.dataset.item_features == ("genres",)
    got = score(config, checkpoint, split="test", protocol="frozen", scores_path=tmp_path / "scores.parquet")
    assert got.metrics["auc"] == pytest.approx(expected["auc"], abs=1e-9)


def test_an_unknown_feature_lists_the_known(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="item_features names 'tags', which dataset 'ml-100k' lacks: it has 'genres'"):
        train(tiny_config(tmp_path / "run", "DatasetArgs.item_features = ['tags']"))
