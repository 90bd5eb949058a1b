from __future__ import annotations

import errno
import logging
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from genrec.configs.schema import UserError
from genrec.training.checkpoint import (
    CheckpointError,
    newest_checkpoint,
    read_host,
    read_tensors,
    resolve_checkpoint,
)
from genrec.training.checkpoint_store import CheckpointStore
from genrec.training.ranks import Ranks
from genrec.training.state import random_state, set_random_state
from genrec.training.train import train


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path, keep=2, ranks=Ranks(rank=0, world_size=1, device=torch.device("cpu")))


def save(store, step):
    tensors = {"model.weight": torch.full((3, 2), float(step)), "optimizer.weight.step": torch.tensor(float(step))}
    return store.save(step, tensors=tensors, host={"step": step}, texts={"config.gin": "x = 1\n"})


def test_save_and_read(store):
    path = save(store, 7)
    assert path == store.newest() == resolve_checkpoint(store.directory) == resolve_checkpoint(path)
    tensors = read_tensors(path, prefixes=("model.",))
    torch.testing.assert_close(tensors, {"model.weight": torch.full((3, 2), 7.0)})
    assert read_host(path, rank=0) == {"step": 7}
    assert (path / "config.gin").read_text() == "x = 1\n"


def test_keeps_the_newest(store):
    for step in (1, 2, 10):
        save(store, step)
    assert sorted(path.name for path in store.directory.iterdir()) == ["step_00000002", "step_00000010"]


def test_damaged_ones_beyond_the_run_take_no_place(tmp_path):
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    store = CheckpointStore(tmp_path, keep=1, ranks=ranks)
    (save(store, 9) / "manifest.json").unlink()
    for step in (3, 6):
        assert save(store, step) == store.newest()


@pytest.mark.parametrize("damage", ["cut short", "missing file", "no manifest", "[]", "{}"])
def test_damaged_checkpoint_is_skipped_and_said(store, caplog, damage):
    whole, damaged = save(store, 1), save(store, 2)
    data = next(damaged.glob("*.distcp"))
    if damage == "cut short":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage in ("[]", "{}"):
        (damaged / "manifest.json").write_text(damage)
    else:
        (data if damage == "missing file" else damaged / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, logger="genrec"):
        assert store.newest() == whole
    assert "step_00000002" in caplog.text
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        resolve_checkpoint(damaged)
    save(store, 2)  # the run reaches that step again
    assert store.newest() == damaged


def test_where_nothing_is_whole_the_run_says_that_it_starts_anew(store, caplog):
    for step in (1, 2):
        (save(store, step) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, logger="genrec"):
        assert store.newest() is None
    reasons = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(": ")[-1] for text in reasons[:2]] == 2 * ["it has no readable manifest.json"]
    assert reasons[-1].endswith("is whole: starts anew")


def test_what_is_set_aside_is_not_overwritten(store, caplog):
    kept = []
    for _ in range(2):
        damaged = save(store, 1)
        (damaged / "manifest.json").unlink()
        kept.append({path.name: path.read_bytes() for path in damaged.iterdir()})
        with caplog.at_level(logging.WARNING, logger="genrec"):
            assert store.newest() is None
        assert not damaged.exists() and store.steps() == []
    save(store, 1)
    for number, files in enumerate(kept, start=1):
        aside = damaged.with_name(f"damaged_step_00000001_{number}")
        assert f"{damaged} is {aside.name} now" in caplog.messages
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == files


def test_interrupted_writing_is_ignored_and_cleared(store, caplog):
    whole = save(store, 1)
    (store.directory / ".writing_step_00000002").mkdir()
    with caplog.at_level(logging.WARNING, logger="genrec"):
        assert store.newest() == whole
    assert "interrupted" in caplog.text
    save(store, 3)
    assert not list(store.directory.glob(".writing*"))


def test_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        resolve_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize("refused", ["is_dir", "iterdir"])
def test_a_folder_that_cannot_be_read(store, monkeypatch, refused):
    """Root may read everywhere, so the answer of the system is given here."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(store, 1)
    monkeypatch.setattr(Path, refused, refuse)
    for find in (store.newest, lambda: resolve_checkpoint(store.directory)):
        with pytest.raises(CheckpointError, match=r"cannot be read: Permission denied$"):
            find()


@pytest.mark.parametrize("limit", [0, 200_000])
def test_full_disk_is_one_sentence_and_leaves_the_previous(store, limit):
    """A limit on the size of files stands for the full disk: of all files, or of the big one with the tensors."""
    whole = save(store, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write a checkpoint: ") as caught:
            store.save(2, tensors={"model.weight": torch.zeros(1_000_000)}, host={"step": 2}, texts={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(str(caught.value).splitlines()) == 1
    assert "File too large" in str(caught.value) or "is the disk full?" in str(caught.value)
    assert [path.name for path in store.directory.iterdir()] == [whole.name]  # what was written of it is gone
    assert store.newest() == whole
    assert save(store, 3) == store.newest()


def test_random_state_round_trip():
    def draw():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), np.random.randn(), random.random()

    np.random.randn()  # leaves a half-used pair behind
    state = random_state()
    first = draw()
    set_random_state(state)
    assert draw() == first


def test_continuing_another_configuration_names_the_difference(tmp_path, tiny_config):
    train(tiny_config(tmp_path / "run"))
    with pytest.raises(UserError, match=r"OptimizerArgs\.learning_rate was 0\.01 and is 0\.5"):
        train(tiny_config(tmp_path / "run", "OptimizerArgs.learning_rate = 0.5"))
    with pytest.raises(UserError, match="already holds step_00000006"):
        train(tiny_config(tmp_path / "run", "TrainerArgs.resume = 'never'"))


@pytest.mark.parametrize("below", ["file/checkpoints", "file"])
def test_a_place_for_checkpoints_that_cannot_be_is_told_before_training(tmp_path, tiny_config, below):
    (tmp_path / "file").write_text("")
    place = f"TrainerArgs.ckpt_save_dir = {str(tmp_path / below)!r}"
    with pytest.raises(UserError, match=r"^TrainerArgs\.ckpt_save_dir = .* cannot be written: .*file is not a folder"):
        train(tiny_config(tmp_path / "run", place))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"^TrainerArgs\.output_dir = .* cannot be written: .*run/checkpoints"):
        train(tiny_config(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_starting_from_another_model_names_the_tensor(tmp_path, tiny_config):
    train(tiny_config(tmp_path / "run"))
    start = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'run')!r}"
    with pytest.raises(CheckpointError, match=r"is of another model: .* there and .* here"):
        train(tiny_config(tmp_path / "other", start, "NetworkArgs.hidden_size = 32"))


# Dies as by kill -9 at the named moment of its second save (step 4 of 6).
DRIVER = """
import os, signal, sys
from pathlib import Path
from genrec.training import checkpoint_store, train

moment, saves = sys.argv[1], []
write_tensors, rename = checkpoint_store.write_tensors, Path.rename

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying_write(path, tensors, ranks):
    saves.append(path)
    write_tensors(path, tensors, ranks)
    if len(saves) == 2 and moment == "half a file":
        data = next(path.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:1000])
        die()

def dying_rename(self, target):
    final = len(saves) == 2 and Path(target).name.startswith("step_")
    if final and moment == "before the rename":
        die()
    result = rename(self, target)
    if final and moment == "after the rename":
        die()
    return result

checkpoint_store.write_tensors = dying_write
Path.rename = dying_rename
sys.exit(train.main("ranking", sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("moment", "survivor"),
    [("half a file", "step_00000002"), ("before the rename", "step_00000002"), ("after the rename", "step_00000004")],
)
def test_kill_9_in_a_save(tmp_path, tiny_gin, tiny_config, last_tensors, moment, survivor):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    interval = "TrainerArgs.ckpt_save_interval = 2"
    command = [sys.executable, str(driver), moment, "--gin-config-file", str(tiny_gin), "--gin-bindings", interval]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == survivor

    train(tiny_config(tmp_path / "run", interval))
    train(tiny_config(tmp_path / "whole", interval))
    whole, parts = last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "run")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing*"))


def test_a_flipped_bit_is_found_and_the_one_before_is_taken(store, caplog):
    whole, damaged = save(store, 1), save(store, 2)
    data = next(damaged.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="genrec"):
        logging.getLogger("genrec").propagate = True
        assert store.newest() == whole
    with pytest.raises(CheckpointError, match="is not what was written"):
        resolve_checkpoint(damaged)


@pytest.mark.parametrize("changed", ["OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'", None])
def test_loading_under_other_optimizers_takes_the_weights_alone(tiny_config, tmp_path, changed):
    train(tiny_config(tmp_path / "first", "TrainerArgs.max_train_iters = 2"))
    load = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}"
    bindings = [load, "TrainerArgs.max_train_iters = 1", *([changed] if changed else [])]
    train(tiny_config(tmp_path / "second", *bindings))
    newest = newest_checkpoint(tmp_path / "second" / "checkpoints")
    steps = {
        name: int(value)
        for name, value in read_tensors(newest, prefixes=("optimizer.",)).items()
        if name.endswith(".step")
    }
    dense = [value for name, value in steps.items() if ".table_" not in name]
    assert dense and set(dense) == {1 if changed else 3}
