from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from genrec.configs.schema import UserError
from genrec.hstu.attention.tuning import HALF_PRECISION_TILES
from genrec.model.ranking import RankingModel
from genrec.training.datasets import read_run_metadata
from genrec.training.memory import weight_memory
from genrec.training.preflight import check, check_places, require_available
from genrec.training.train import train


def test_places_that_can_be_written_are_left_alone(tmp_path, tiny_config):
    check_places(tiny_config(tmp_path / "not" / "there" / "yet"))
    assert list(tmp_path.glob("not*")) == []


@pytest.mark.parametrize("name", ["output_dir", "ckpt_save_dir"])
@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_file_in_the_way(tmp_path, tiny_config, name, below):
    (tmp_path / "file").write_text("")
    config = tiny_config(tmp_path / "run", f"TrainerArgs.{name} = {str(tmp_path / below)!r}")
    with pytest.raises(UserError, match=rf"^TrainerArgs\.{name} = .* cannot be written: .*file is not a folder$"):
        check_places(config)


def test_a_folder_of_somebody_else(tmp_path, tiny_config, monkeypatch):
    """Root may write everywhere, so the answer of the system is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match=r"Permission denied"):
        check_places(tiny_config(tmp_path / "run"))


def test_no_checkpoint_to_start_from(tmp_path, tiny_config):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no whole checkpoint in .*empty"):
        check_places(tiny_config(tmp_path / "run", f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'empty')!r}"))


def test_attention_tiles_are_read_before_anything_is_built(tmp_path, tiny_config, monkeypatch):
    path = tmp_path / "tiles.json"
    config = tiny_config(tmp_path / "run", f"TrainerArgs.attention_tiles = {str(path)!r}")
    assert config.digest == tiny_config(tmp_path / "run").digest
    with pytest.raises(UserError, match=r"the attention tiles .*tiles\.json.* can't be read"):
        require_available(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else its name would have to fit
    built_in = dataclasses.asdict(HALF_PRECISION_TILES[64])
    path.write_text(json.dumps({"tables": {"triton": {"64": built_in}}}))
    require_available(config)


def test_memory_of_dense_weights_in_parts(tmp_path, tiny_config):
    config = tiny_config(tmp_path, "TrainerArgs.dense_parallel = 'fsdp2'", "TrainerArgs.ema_decay = 0.9")
    model = RankingModel(config, metadata=read_run_metadata(config), device=torch.device("meta"))
    one, four = (weight_memory(config, model, world_size=n) for n in (1, 4))
    num_tables = 16 * (20 + 5 + 4)
    num_dense = sum(p.numel() for p in model.parameters()) - num_tables
    assert one["weights"] == 4 * (num_tables + num_dense)
    assert four["weights"] == four["gradients"] == four["average of the weights"]
    assert four["weights"] == 4 * (num_tables + -(-num_dense // 4)) == four["optimizer state"] / 2
    layer = 16 * 64 + 64 + 16 * 16 + 2 * 16 + 2 * 16  # W1, b1, W2 and two norms
    assert four.keys() - one.keys() == {"whole weights and gradients of two layers"}
    assert four["whole weights and gradients of two layers"] == 2 * 2 * 4 * layer


def test_ranks_that_share_the_layers_have_a_part_each(tmp_path, tiny_config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    tables = []
    for number in (1, 2):
        peers = f"TensorModelParallelArgs.tensor_model_parallel_size = {number}"
        check(tiny_config(tmp_path / "run", peers), num_ranks=number)
        tables.append(capsys.readouterr().out)
    assert "16 -> 64 " in tables[0] and "16 -> 64 / 2" in tables[1]
    assert "16 / 2 -> 16" in tables[1] and "2 / 2 heads of 8" in tables[1]
    # Of each of two layers 64 x 16 + 64 + 16 x 16 weights and 2 x 16 of a norm; of the head 8 x 16 + 8 + 8, not a bias.
    assert "│ encoder    │ 133,888" in tables[0] and f"│ encoder    │ {133_888 - 1_376:,}" in tables[1]
    assert "│ head       │ 145" in tables[0] and "│ head       │ 73" in tables[1]


def test_sharded_tables_lie_on_all_ranks_that_share_the_layers(tmp_path, tiny_config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = tiny_config(
        tmp_path / "run",
        "TensorModelParallelArgs.tensor_model_parallel_size = 2",
        "DatasetArgs.sharding_types = {'item': 'row_wise'}",
        "OptimizerArgs.embedding_optimizer_str = 'sgd'",
        "OptimizerArgs.embedding_weight_decay = 0.0",
    )
    check(config, num_ranks=2)
    assert (
        "│ item   │ 20   │ 16  │ row_wise      │ row_wise      │ fused  │ 5.96e-07    │ 5.96e-07 "
        in capsys.readouterr().out
    )


def test_what_peers_refuse_is_refused(tmp_path, tiny_config):
    """The sentences are those of a run."""
    peers = ("TensorModelParallelArgs.tensor_model_parallel_size = 2",)
    with pytest.raises(UserError, match=r"needs a multiple of 2 ranks, and this run has 3: "):
        check(tiny_config(tmp_path, *peers), num_ranks=3)


@pytest.mark.parametrize(("action", "num_rows"), [(check, 2**62), (train, 10**13)], ids=["--check", "run"])
def test_a_model_beyond_all_memory(tmp_path, tiny_config, action, num_rows):
    """2**62 rows can't be counted in bytes; 10**13, on the meta device, can."""
    config = tiny_config(tmp_path / "run", f"DatasetArgs.dynamic_tables = {{'item': {num_rows}}}")
    with pytest.raises(UserError, match=r"^the model does not fit into memory, --check shows .* \(PyTorch: .*\)$"):
        action(config)
