"""SIGTERM: the step in progress is saved, the exit code is 0, and the run that continues equals one never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from genrec.training import evaluation
from genrec.training.checkpoint import newest_checkpoint
from genrec.training.loop import Loop
from genrec.training.metrics_log import read_lines
from genrec.training.stopping import Stopped, listening, stop_asked
from genrec.training.train import main, train


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def events(run):
    """(event, step, protocol) of metrics.jsonl and what was measured, without times."""
    wanted = ("loss", "metrics")
    lines = read_lines(run / "metrics.jsonl")
    return [(n["event"], n["step"], n.get("protocol"), *(n.get(name) for name in wanted)) for n in lines]


def assert_equal_runs(one, other, last_tensors):
    first, second = last_tensors(one), last_tensors(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert events(one) == events(other)


BINDINGS = ("TrainerArgs.eval_interval = 3",)


@pytest.fixture
def at_step(monkeypatch):
    """``at_step(n)``: SIGTERM arrives while step n is recorded."""

    def arrange(step):
        original = Loop._record

        def record(self, result):
            original(self, result)
            if self.step == step:
                send()

        monkeypatch.setattr(Loop, "_record", record)
        return lambda: monkeypatch.setattr(Loop, "_record", original)

    return arrange


@pytest.mark.parametrize(("arrives", "saved"), [(1, 2), (3, 3), (5, 6)])
def test_the_step_after_the_signal_is_saved(tmp_path, tiny_config, last_tensors, at_step, arrives, saved):
    """3: in the evaluation of that step. 5: the last step is saved, and what is left is the final evaluation."""
    restore = at_step(arrives)
    with pytest.raises(Stopped, match=f"after step {saved}"):
        train(tiny_config(tmp_path / "parts", *BINDINGS))
    restore()
    assert newest_checkpoint(tmp_path / "parts" / "checkpoints").name == f"step_{saved:08d}"
    train(tiny_config(tmp_path / "parts", *BINDINGS))
    train(tiny_config(tmp_path / "whole", *BINDINGS))
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts", last_tensors)


@pytest.mark.parametrize(("nth", "step"), [(2, 3), (8, 6)], ids=["validation", "final evaluation"])
def test_an_evaluation_is_left_and_made_up_for(tmp_path, tiny_config, last_tensors, monkeypatch, nth, step):
    """Four batches of two users in each protocol; so the 8th batch is of the second."""
    following, seen = evaluation._next, []

    def asked(batches, split):
        seen.append(split)
        if len(seen) == (nth if step == 3 else nth + 10):
            send()
        return following(batches, split)

    monkeypatch.setattr(evaluation, "_next", asked)
    with pytest.raises(Stopped):
        train(tiny_config(tmp_path / "parts", *BINDINGS))
    monkeypatch.setattr(evaluation, "_next", following)
    assert newest_checkpoint(tmp_path / "parts" / "checkpoints").name == f"step_{step:08d}"
    assert ("valid", step) not in [event[:2] for event in events(tmp_path / "parts")]
    train(tiny_config(tmp_path / "parts", *BINDINGS))
    train(tiny_config(tmp_path / "whole", *BINDINGS))
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts", last_tensors)


def test_a_best_step_that_was_saved_unevaluated_is_marked_later(tmp_path, tiny_config, monkeypatch):
    best = ("TrainerArgs.eval_interval = 3", "TrainerArgs.best_metric = 'AUC'")
    following = evaluation._next

    def asked(batches, split):
        send()
        return following(batches, split)

    monkeypatch.setattr(evaluation, "_next", asked)
    with pytest.raises(Stopped):
        train(tiny_config(tmp_path / "run", *best, "TrainerArgs.max_train_iters = 4"))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir() if path.name != ".lock"] == ["step_00000003"]
    monkeypatch.setattr(evaluation, "_next", following)
    train(tiny_config(tmp_path / "run", *best, "TrainerArgs.max_train_iters = 4"))
    aucs = {
        n["step"]: n["metrics"]["auc"]
        for n in read_lines(tmp_path / "run" / "metrics.jsonl")[::-1]
        if n["event"] == "valid" and n["protocol"] == "sequential"
    }
    assert os.readlink(checkpoints / "best") == f"step_{max(aucs, key=lambda step: (aucs[step], -step)):08d}"


def test_the_command_line_says_so_and_returns_0(tmp_path, tiny_gin, at_step, capsys):
    at_step(2)
    arguments = ["--gin-config-file", str(tiny_gin)]
    assert main("ranking", arguments) == 0
    assert "stopped by SIGTERM after step 3, which is saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_is_of_the_run_that_listens():
    with listening():
        assert not stop_asked()
        send()
        send()
        assert stop_asked()
    assert not stop_asked()

    def elsewhere():
        with listening():
            heard.append(stop_asked())

    heard = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert heard == [False]


BOUND_S = 30  # torchrun's patience; a step and a save of the tiny run take far less


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_process_group_with_workers_ends_within_the_bound(tmp_path, tiny_gin, last_tensors, num_workers):
    """A scheduler sends SIGTERM to all processes of the job, the loader's workers among them."""
    command = [
        sys.executable,
        "-c",
        "import sys; from genrec.training.train import main; sys.exit(main('ranking', sys.argv[1:]))",
        *("--gin-config-file", str(tiny_gin)),
        *("--gin-bindings", "TrainerArgs.max_train_iters = 1000000"),
        *("--gin-bindings", f"DatasetArgs.num_workers = {num_workers}"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            log = tmp_path / "run" / "metrics.jsonl"
            started = time.monotonic()
            while not log.exists() or len(read_lines(log)) < 3:
                assert process.poll() is None and time.monotonic() < started + 120
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGTERM)
            _, err = process.communicate(timeout=BOUND_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    last = [line["step"] for line in read_lines(log)][-1]
    assert f"stopped by SIGTERM after step {last}, which is saved" in err
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name == f"step_{last:08d}"
