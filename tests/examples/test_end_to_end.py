"""The scripts as people run them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

import polars
import pytest

from genrec.training.metrics_log import read_lines
from genrec.training.train import main


def run_script(path, *arguments, cwd):
    return subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=200, cwd=cwd)


def figures_of_test(table):
    """The figures of the row "test, sequential"."""
    row = next(line for line in table.splitlines() if re.match(r"│ test +│ sequential", line))
    return [cell.strip() for cell in row.split("│")]


def test_train_then_evaluate(examples, train_command, tmp_path):
    trained = run_script(examples / "pretrain_gr_ranking.py", *train_command(), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    evaluated = run_script(
        examples / "evaluate.py", "--checkpoint", str(tmp_path / "run"), "--scores", "scores.parquet", cwd=tmp_path
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert len(polars.read_parquet(tmp_path / "scores.parquet")) == 21
    assert figures_of_test(trained.stdout) == figures_of_test(evaluated.stdout)
    assert "loss" in trained.stderr  # plain log lines where stderr is no terminal
    assert "Warning" not in trained.stderr


def test_shipped_synthetic_preset(train_command, tmp_path):
    output = f"TrainerArgs.output_dir = {str(tmp_path / 'run')!r}"
    assert main("ranking", train_command(output, gin_file="debug_synthetic.gin")) == 0
    assert max(line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")) == 20


def test_check_builds_and_stops(train_command, tmp_path, capsys):
    assert main("ranking", [*train_command("TrainerArgs.ema_decay = 0.9"), "--check"]) == 0
    out = capsys.readouterr().out
    assert "TrainerArgs.train_batch_size = 4" in out
    assert all(word in out for word in ("embeddings", "encoder", "head", "optimizer state", "average of the weights"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lengths", [(1,), (8,), (9, 30), (0, 1), (7,)])
def test_users_of_any_length(train_command, tmp_path, write_tiny_dataset, lengths):
    """One event, exactly as many as fit, more, and a user whose training part is empty."""
    data = write_tiny_dataset(tmp_path / "data", train_lengths=lengths)
    bindings = (f"DatasetArgs.dataset_path = {str(data)!r}", "TrainerArgs.max_train_iters = 2")
    assert main("ranking", train_command(*bindings)) == 0


@pytest.mark.parametrize(
    "bindings",
    [
        ("DatasetArgs.max_num_candidates = 3",),
        ("RankingArgs.prediction_head_arch = [8, 5]",),
        ("RankingArgs.num_tasks = 2", "RankingArgs.prediction_head_arch = [8, 2]"),
        ("NetworkArgs.dtype_str = 'bfloat16'",),
        ("TrainerArgs.deterministic = True",),
        ("TrainerArgs.enable_balanced_shuffler = True", "DatasetArgs.contextual_features = []"),
    ],
)
def test_variants(train_command, bindings):
    assert main("ranking", train_command(*bindings, "TrainerArgs.max_train_iters = 2")) == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_script_under_torchrun(examples, train_command, tmp_path, num_ranks):
    """A process group of one rank, and of two; every rank count ends with the same number of steps and evaluations."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command = [*torchrun, str(examples / "pretrain_gr_ranking.py"), *train_command("TrainerArgs.max_train_iters = 3")]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert out.count("results after step 3") == 1
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["event"], line["protocol"]) for line in lines if line["step"] == 3 and line["event"] != "train"] == [
        (split, protocol) for split in ("valid", "test") for protocol in ("sequential", "frozen")
    ]
