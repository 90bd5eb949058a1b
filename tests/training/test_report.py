from __future__ import annotations

import errno
import io
import json
import logging
import math
import os

import pytest
from rich.console import Console

from genrec.configs.schema import UserError
from genrec.training import final_report
from genrec.training.evaluation import Evaluation
from genrec.training.final_report import result_rows, write_report
from genrec.training.meter import Meter
from genrec.training.metrics_log import append_lines, keep_lines, read_lines
from genrec.training.report import RunLog, evaluation_line
from genrec.training.step import StepResult, TrainStep
from genrec.training.train import train


def result(loss_sum, num_targets, *, finite=True):
    return StepResult(
        loss_sum=loss_sum,
        num_targets=num_targets,
        num_tokens=10,
        num_users=2,
        learning_rate=0.1,
        applied=finite,
        finite=finite,
    )


def test_lines_are_json_and_nan_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [evaluation_line(3, Evaluation("test", "frozen", {"auc": math.nan, "ne": math.inf}, 0))])
    append_lines(path, [{"event": "train", "step": 4, "loss": 0.5}])
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert first == {"event": "test", "step": 3, "protocol": "frozen", "metrics": {"auc": None, "ne": None}}
    assert second == {"event": "train", "step": 4, "loss": 0.5}


def test_torn_and_later_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": step} for step in (1, 2, 3)])
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    keep_lines(path, lambda line: line["step"] <= 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_meter_averages_over_targets_and_leaves_out_what_is_not_finite():
    meter = Meter()
    meter.add(result(6.0, 3))
    meter.add(result(1.0, 1))
    meter.add(result(math.nan, 100, finite=False))
    line = meter.line(5, 0.1)
    assert (line["event"], line["step"], line["loss"], line["learning_rate"]) == ("train", 5, 7 / 4, 0.1)
    assert line["tokens_per_s"] == pytest.approx(5 * line["users_per_s"])
    meter.reset()
    assert meter.line(6, 0.1)["loss"] == 0.0


def test_meter_leaves_out_the_pause(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("genrec.training.meter.time.perf_counter", lambda: now[0])
    meter = Meter()
    meter.add(result(1.0, 1))
    now[0] = 2.0
    meter.pause()
    now[0] = 100.0
    meter.resume()
    now[0] = 103.0
    assert meter.line(1, 0.1)["tokens_per_s"] == 10 / 5


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("genrec.training.report.CONSOLE", console)
    log = RunLog(tmp_path, is_main=True, total_steps=100, first_step=0)
    line = {
        "event": "train",
        "step": 7,
        "loss": 0.5,
        "learning_rate": 0.1,
        "tokens_per_s": 65432.1,
        "users_per_s": 1234.5,
    }
    log.progress(7, line)
    log.close()
    shown = console.file.getvalue()
    assert all(words in shown for words in ("7/100", "loss 0.5000, 1,234 users/s, 65,432 tokens/s"))


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path, is_main=False, total_steps=3, first_step=0)
    log.train({"event": "train", "step": 1, "loss": 1.0})
    log.evaluations(1, [Evaluation("valid", "frozen", {"auc": 0.5}, 10)])
    log.other({"event": "skipped", "step": 1})
    log.close()
    assert not list(tmp_path.iterdir())


def test_rows_of_several_tasks():
    line = evaluation_line(3, Evaluation("valid", "frozen", {"auc": 0.5, "auc_task1": 0.75}, 10))
    assert [(row.task, row.metrics) for row in result_rows([line])] == [("0", {"auc": 0.5}), ("1", {"auc": 0.75})]


def test_report_of_a_run_without_figures(tmp_path):
    lines = [evaluation_line(1, Evaluation("test", "frozen", {"auc": math.nan}, 0))]
    page, picture = write_report(lines, lines, output_dir=tmp_path, config_text="a < b")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "undefined" in page.read_text()
    assert "a &lt; b" in page.read_text()


def test_run_leaves_its_outputs(tmp_path, tiny_config, capsys):
    train(tiny_config(tmp_path / "run", "TrainerArgs.eval_interval = 3", "TrainerArgs.log_interval = 2"))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"config.gin", "operative_config.gin", "metrics.jsonl", "tensorboard", "report.html", "report.png"}
    assert names == {*expected, "checkpoints", ".lock"}
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000006"
    assert (checkpoint / "config.gin").read_text() == (tmp_path / "run" / "config.gin").read_text()
    assert "OptimizerArgs.adam_beta1" in (checkpoint / "operative_config.gin").read_text()

    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [n["step"] for n in lines if n["event"] == "train"] == [2, 4, 6]
    train_keys = {"event", "step", "loss", "learning_rate", "tokens_per_s", "users_per_s"}
    assert all(n.keys() == train_keys for n in lines if n["event"] == "train")
    evaluations = [(n["event"], n["step"], n["protocol"]) for n in lines if n["event"] != "train"]
    both = ("sequential", "frozen")
    splits = [("valid", 3), ("valid", 6), ("test", 6)]
    assert evaluations == [(split, step, protocol) for split, step in splits for protocol in both]
    assert all(n["metrics"].keys() == {"auc", "gauc", "ne", "logloss"} for n in lines if n["event"] != "train")

    out = capsys.readouterr().out
    assert all(word in out for word in ("validation", "test", "sequential", "frozen", "AUC", "GAUC", "NE", "log loss"))
    assert str(tmp_path / "run" / "report.html") in out


def test_skipped_steps_are_counted_in_the_log(tmp_path, tiny_config, monkeypatch, caplog):
    original = TrainStep._backward_one

    def backward_one(self, batch, scale):
        loss = original(self, batch, scale)
        calls.append(batch)
        return loss * float("nan") if len(calls) == 2 else loss

    calls = []
    monkeypatch.setattr(TrainStep, "_backward_one", backward_one)
    train(tiny_config(tmp_path / "run", "TrainerArgs.nonfinite = 'skip'", "TrainerArgs.log_interval = 6"))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [n["step"] for n in lines if n["event"] == "skipped"] == [2]
    assert all(math.isfinite(n["loss"]) for n in lines if n["event"] == "train")
    assert "1 of 6 steps were left out: a loss or a gradient was not finite" in caplog.messages


def test_line_of_skipped_steps_alone_has_no_loss(tmp_path, tiny_config):
    """Not 0, which would be a perfect one."""
    bindings = ("TrainerArgs.nonfinite = 'skip'", "TrainerArgs.max_train_iters = 3")
    train(tiny_config(tmp_path / "run", *bindings, "OptimizerArgs.learning_rate = 1e30"))
    losses = [n["loss"] for n in read_lines(tmp_path / "run" / "metrics.jsonl") if n["event"] == "train"]
    assert losses[0] > 0 and losses[1:] == [None, None]


def test_what_is_too_short_to_profile_says_so_alone(tmp_path, tiny_config, caplog):
    with caplog.at_level(logging.INFO, logger="genrec"):
        train(
            tiny_config(
                tmp_path / "run",
                "TrainerArgs.profile = True",
                "TrainerArgs.profile_step_start = 1000",
                "TrainerArgs.profile_step_end = 1001",
            )
        )
    assert sum("profile" in message for message in caplog.messages) == 1
    assert not (tmp_path / "run" / "profile").exists()


def test_profile_writes_a_chrome_trace(tmp_path, tiny_config):
    steps = ("TrainerArgs.profile_step_start = 2", "TrainerArgs.profile_step_end = 4")
    train(tiny_config(tmp_path / "run", "TrainerArgs.profile = True", *steps))
    trace = json.loads((tmp_path / "run" / "profile" / "trace_rank0.json").read_text())
    assert trace["traceEvents"]


def test_pipeline_on_a_cpu_is_said_once(tmp_path, tiny_config, caplog):
    with caplog.at_level(logging.INFO, logger="genrec"):
        train(tiny_config(tmp_path / "run", "TrainerArgs.pipeline_type = 'prefetch'"))
    assert caplog.text.count("has no effect on a CPU") == 1


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "tensorboard").write_text("a file in the way")
    with pytest.raises(UserError, match=r"the log in .* cannot be written"):
        RunLog(tmp_path, is_main=True, total_steps=1, first_step=0)


def test_metrics_file_that_is_a_folder(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        RunLog(tmp_path, is_main=True, total_steps=1, first_step=0)


def test_lines_of_somebody_else_are_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n7\n{"event": "train", "step": 1}\n')
    RunLog(tmp_path, is_main=True, total_steps=2, first_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"event": "train", "step": 1}\n'


def test_a_log_that_fails_in_between_is_told_to_all_ranks_at_the_next_step(tmp_path, tiny_config):
    """By the flag that ranks exchange anyway; raised where it happens, rank 0 would leave the others waiting."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "nowhere" / "metrics.jsonl")
    log = RunLog(tmp_path / "run", is_main=True, total_steps=1, first_step=0)
    log.train({"event": "train", "step": 1, "loss": 0.0, "learning_rate": 0.0, "tokens_per_s": 0.0, "users_per_s": 0.0})
    log.other({"event": "skipped", "step": 2})
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: No such file"):
        log.raise_failure()
    log.raise_failure()  # told once
    log.close()
    for steps in (1, 3):  # after the last step, too
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written"):
            train(tiny_config(tmp_path / "run", f"TrainerArgs.max_train_iters = {steps}"))


def test_results_are_shown_where_their_report_cannot_be_written(tmp_path, tiny_config, monkeypatch, capsys):
    def refuse(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(final_report, "write_atomically", refuse)
    with pytest.raises(UserError, match=r"^the report in .* cannot be written: No space left on device$"):
        train(tiny_config(tmp_path / "run", "TrainerArgs.max_train_iters = 1"))
    assert "results after step 1" in capsys.readouterr().out
