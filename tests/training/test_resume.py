"""Stopping and continuing must equal not stopping, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from genrec.configs.loading import load_experiment
from genrec.configs.schema import UserError
from genrec.training.checkpoint import CheckpointError
from genrec.training.loop import Loop
from genrec.training.metrics_log import read_lines
from genrec.training.train import train


class Killed(Exception):
    pass


@pytest.fixture
def kill_after(monkeypatch):
    """``kill_after(n)``: the next run dies after step n, before anything of that step is saved."""

    def arrange(step):
        original = Loop._between_steps

        def between_steps(self):
            if self.step == step:
                raise Killed
            original(self)

        monkeypatch.setattr(Loop, "_between_steps", between_steps)
        return lambda: monkeypatch.setattr(Loop, "_between_steps", original)

    return arrange


def assert_equal_tensors(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


DELAYED = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.backend = 'emulated'",
    "MixedPrecisionArgs.linear_recipe = 'delayed'",
    "MixedPrecisionArgs.amax_history_len = 6",
    "MixedPrecisionArgs.fp8_during_eval = True",
)

VARIANTS = {
    "plain": (),
    "workers": ("DatasetArgs.num_workers = 2",),
    "accumulation": ("TrainerArgs.accumulate_steps = 3", "TrainerArgs.train_batch_size = 2"),
    "average, event dropout, item features, schedule": (
        "DatasetArgs.item_features = ['genres']",
        "TrainerArgs.ema_decay = 0.9",
        "DatasetArgs.event_dropout = 0.3",
        "TrainerArgs.lr_schedule = 'cosine'",
        "TrainerArgs.warmup_steps = 4",
        "TrainerArgs.grad_clip_norm = 1.0",
    ),
    "other optimizers": (
        "OptimizerArgs.optimizer_str = 'sgd'",
        "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'",
    ),
    "delayed scaling, accumulation, evaluation between": (
        *DELAYED,
        "NetworkArgs.dtype_str = 'bfloat16'",
        "TrainerArgs.accumulate_steps = 2",
        "TrainerArgs.train_batch_size = 2",
        "TrainerArgs.eval_interval = 5",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_equals_no_interruption(tmp_path, tiny_config, last_tensors, kill_after, variant):
    bindings = ("TrainerArgs.max_train_iters = 20", "TrainerArgs.ckpt_save_interval = 10", *VARIANTS[variant])
    train(tiny_config(tmp_path / "whole", *bindings))
    restore = kill_after(13)
    with pytest.raises(Killed):
        train(tiny_config(tmp_path / "parts", *bindings))
    restore()
    assert [line["step"] for line in read_lines(tmp_path / "parts" / "metrics.jsonl")][-1] == 13
    train(tiny_config(tmp_path / "parts", *bindings))

    assert_equal_tensors(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "parts"))
    curves = [
        [(line["step"], line["loss"]) for line in read_lines(path / "metrics.jsonl") if line["event"] == "train"]
        for path in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == list(range(1, 21))


def test_log_between_checkpoints_continues(tmp_path, tiny_config, kill_after):
    """The mean loss of a log line that spans the interruption is that of the uninterrupted run."""
    bindings = ("TrainerArgs.max_train_iters = 6", "TrainerArgs.ckpt_save_interval = 2", "TrainerArgs.log_interval = 3")
    train(tiny_config(tmp_path / "whole", *bindings))
    restore = kill_after(3)
    with pytest.raises(Killed):
        train(tiny_config(tmp_path / "parts", *bindings))
    restore()
    train(tiny_config(tmp_path / "parts", *bindings))
    losses = [
        [line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl") if line["event"] == "train"]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


@pytest.mark.parametrize("bindings", [(), DELAYED], ids=["float32", "delayed scaling"])
def test_evaluation_does_not_touch_training(tmp_path, tiny_config, last_tensors, bindings):
    train(tiny_config(tmp_path / "with", "TrainerArgs.eval_interval = 2", *bindings))
    train(tiny_config(tmp_path / "without", "TrainerArgs.eval_interval = 0", *bindings))
    assert_equal_tensors(last_tensors(tmp_path / "with"), last_tensors(tmp_path / "without"))
    evaluated = [n["step"] for n in read_lines(tmp_path / "with" / "metrics.jsonl") if n["event"] == "valid"]
    assert evaluated == [2, 2, 4, 4, 6, 6]


def test_finished_run_shows_its_results(tmp_path, tiny_config, capsys):
    first = train(tiny_config(tmp_path / "run"))
    capsys.readouterr()
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(tiny_config(tmp_path / "run")) == first
    assert "results after step 6" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == log


def test_run_continues_where_max_train_iters_grew(tmp_path, tiny_config, last_tensors):
    train(tiny_config(tmp_path / "whole", "TrainerArgs.max_train_iters = 9"))
    train(tiny_config(tmp_path / "parts", "TrainerArgs.max_train_iters = 5"))
    train(tiny_config(tmp_path / "parts", "TrainerArgs.max_train_iters = 9"))
    assert_equal_tensors(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "parts"))


def test_lost_final_evaluation_is_made_up_for(tmp_path, tiny_config):
    results = train(tiny_config(tmp_path / "run"))
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-2]) + '\n{"event": "te')  # torn in the middle of its lines
    assert train(tiny_config(tmp_path / "run")) == results
    assert path.read_text().splitlines() == lines


def test_start_from_another_runs_checkpoint(tmp_path, tiny_config, last_tensors):
    train(tiny_config(tmp_path / "first"))
    binding = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}"
    train(
        tiny_config(
            tmp_path / "second", binding, "TrainerArgs.max_train_iters = 1", "OptimizerArgs.learning_rate = 1e-9"
        )
    )
    first, second = last_tensors(tmp_path / "first"), last_tensors(tmp_path / "second")
    name = "model.head.layers.0.weight"
    name = name if name in first else next(n for n in first if n.startswith("model.head") and first[n].dim() == 2)
    torch.testing.assert_close(first[name], second[name])


def test_one_epoch_is_the_default(tmp_path, tiny_gin):
    text = tiny_gin.read_text().replace("TrainerArgs.max_train_iters = 6\n", "")
    tiny_gin.write_text(text)
    train(load_experiment("ranking", gin_files=[str(tiny_gin)], gin_bindings=["TrainerArgs.train_batch_size = 3"]))
    # Users of 1, 5, 8, 9, 20, 30 and 3 events make 1 + 1 + 1 + 2 + 3 + 4 + 1 = 13 windows of at most 8.
    assert max(line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")) == 5


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_longer_run_needs_a_constant_rate(tiny_config, tmp_path, schedule):
    rate = f"TrainerArgs.lr_schedule = {schedule!r}"
    train(tiny_config(tmp_path, rate, "TrainerArgs.max_train_iters = 2"))
    longer = tiny_config(tmp_path, rate, "TrainerArgs.max_train_iters = 3")
    if schedule == "constant":
        train(longer)
    else:
        with pytest.raises(CheckpointError, match="max_train_iters was 2 and is 3"):
            train(longer)


def test_data_prepared_anew_from_another_source_is_refused(tiny_config, tiny_dataset, tmp_path):
    train(tiny_config(tmp_path / "out", "TrainerArgs.max_train_iters = 2"))
    other = tmp_path / "other"
    shutil.copytree(tiny_dataset, other)
    metadata = json.loads((other / "metadata.json").read_text())
    (other / "metadata.json").write_text(json.dumps({**metadata, "source_hash": "another"}))
    moved = f"DatasetArgs.dataset_path = {str(other)!r}"
    with pytest.raises(CheckpointError, match=r"source_hash was .* and is 'another'"):
        train(tiny_config(tmp_path / "out", "TrainerArgs.max_train_iters = 3", moved))


HOLDER = """
import sys, time
from pathlib import Path
from genrec.data.files import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("field", ["output_dir", "ckpt_save_dir"])
def test_two_runs_do_not_write_into_one_folder(tiny_config, tmp_path, field):
    place = tmp_path / field
    place.mkdir()
    folders = (tmp_path / "output_dir", f"TrainerArgs.ckpt_save_dir = {str(tmp_path / 'ckpt_save_dir')!r}")
    config = tiny_config(*folders, "TrainerArgs.max_train_iters = 1")
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(place / ".lock")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"^another run writes into TrainerArgs\.{field} = .*: wait for its end"):
            train(config)
        assert not list(tmp_path.glob("*/metrics.jsonl"))
    finally:
        other.kill()
        other.communicate()
    train(config)


def test_a_run_that_saves_into_the_checkpoints_of_another_is_refused(tiny_config, tmp_path):
    """Of one that runs with this output_dir and no ckpt_save_dir."""
    first = tiny_config(tmp_path / "first", "TrainerArgs.max_train_iters = 1")
    checkpoints = tmp_path / "first" / "checkpoints"
    second = tiny_config(
        tmp_path / "second", "TrainerArgs.max_train_iters = 1", f"TrainerArgs.ckpt_save_dir = {str(checkpoints)!r}"
    )
    checkpoints.mkdir(parents=True)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(checkpoints / ".lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        for config, field in ((first, "output_dir"), (second, "ckpt_save_dir")):
            with pytest.raises(UserError, match=rf"^another run writes into TrainerArgs\.{field} = "):
                train(config)
    finally:
        other.kill()
        other.communicate()
