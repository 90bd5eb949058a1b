from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from genrec.configs.schema import UserError
from genrec.hstu.attention.tuning import HALF_PRECISION_TILES
from genrec.training.preflight import check_places, require_available


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
