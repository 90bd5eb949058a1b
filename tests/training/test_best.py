"""TrainerArgs.best_metric: the best step is saved, kept and found, also after a stop at any place."""

from __future__ import annotations

import json
import os

import pytest

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ConfigError
from genrec.training.best import BestCheckpoint
from genrec.training.checkpoint import BEST, resolve_checkpoint
from genrec.training.evaluation import Evaluation
from genrec.training.metrics_log import read_lines
from genrec.training.run import Run
from genrec.training.train import train

PROTOCOLS = ("sequential", "frozen")
NAN = float("nan")


def evaluated(**metrics):
    return [Evaluation("valid", protocol, metrics, num_targets=1) for protocol in PROTOCOLS]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [("AUC", [0.5, 0.7, 0.7, NAN, 0.6], 1), ("NE", [0.9, NAN, 0.8, 0.85, 0.8], 2), ("frozen/LogLoss", [NAN] * 5, None)],
)
def test_the_best_is_the_first_of_the_best_values(metric, values, best):
    name = metric.rpartition("/")[2].lower()
    tracker = BestCheckpoint(metric, protocols=PROTOCOLS)
    taken = [tracker.take(step, evaluated(**{name: value})) for step, value in enumerate(values)]
    assert tracker.step == best
    assert [step for step, new in enumerate(taken) if new][-1:] == ([] if best is None else [best])

    lines = [
        {"event": "valid", "protocol": p, "step": step, "metrics": {name: None if value != value else value}}
        for step, value in enumerate(values)
        for p in PROTOCOLS
    ]
    resumed = BestCheckpoint(metric, protocols=PROTOCOLS)
    resumed.resume(lines, steps=range(5))
    assert resumed.step == best


def test_only_steps_with_a_checkpoint_can_be_the_best():
    tracker = BestCheckpoint("AUC", protocols=PROTOCOLS)
    lines = [
        {"event": "valid", "protocol": "sequential", "step": step, "metrics": {"auc": auc}}
        for step, auc in ((1, 0.9), (2, 0.6), (3, 0.5))
    ]
    tracker.resume(lines, steps=(2, 3))
    assert (tracker.step, tracker.value) == (2, 0.6)


@pytest.fixture
def given_auc(monkeypatch):
    """``given_auc([0.5, ...])``: the validation AUC of the next evaluations."""
    original = Run.evaluate_splits

    def arrange(values):
        left = list(values)

        def evaluate_splits(self, splits):
            evaluations = original(self, splits)
            value = left.pop(0)
            return [
                Evaluation(e.split, e.protocol, {**e.metrics, "auc": value}, e.num_targets) if e.split == "valid" else e
                for e in evaluations
            ]

        monkeypatch.setattr(Run, "evaluate_splits", evaluate_splits)

    return arrange


BINDINGS = (
    "TrainerArgs.best_metric = 'AUC'",
    "TrainerArgs.eval_interval = 1",
    "TrainerArgs.keep_checkpoints = 1",
)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != ".lock")


def test_the_best_step_is_saved_and_kept(tmp_path, tiny_config, given_auc):
    given_auc([0.5, 0.8, 0.7, 0.6, 0.6, 0.7])
    train(tiny_config(tmp_path / "run", *BINDINGS))
    assert names(tmp_path / "run") == [BEST, "step_00000002", "step_00000006"]
    best = tmp_path / "run" / "checkpoints" / BEST
    assert os.readlink(best) == "step_00000002"
    assert resolve_checkpoint(best) == best  # so evaluate.py and ckpt_load_dir take it
    assert json.loads((best / "versions.json").read_text())["torch"]


def test_the_last_step_may_be_the_best(tmp_path, tiny_config, given_auc):
    given_auc([0.5, 0.8, 0.7, 0.6, 0.6, 0.9])
    train(tiny_config(tmp_path / "run", *BINDINGS))
    assert names(tmp_path / "run") == [BEST, "step_00000006"]
    assert os.readlink(tmp_path / "run" / "checkpoints" / BEST) == "step_00000006"


def test_a_run_that_continues_knows_the_best(tmp_path, tiny_config, given_auc):
    run = tmp_path / "run"
    given_auc([0.5, 0.8, 0.7])
    train(tiny_config(run, *BINDINGS, "TrainerArgs.max_train_iters = 3"))
    given_auc([0.75, 0.79, 0.78])
    train(tiny_config(run, *BINDINGS))
    assert names(run) == [BEST, "step_00000002", "step_00000006"]
    given_auc([0.81, 0.7])
    train(tiny_config(run, *BINDINGS, "TrainerArgs.max_train_iters = 8"))
    assert names(run) == [BEST, "step_00000007", "step_00000008"]
    assert [n["step"] for n in read_lines(run / "metrics.jsonl") if n["event"] == "train"] == list(range(1, 9))


@pytest.mark.parametrize(
    ("bindings", "told"),
    [
        (["TrainerArgs.best_metric = 'precision'", "TrainerArgs.eval_interval = 1"], "must be one of 'AUC', "),
        (["TrainerArgs.best_metric = 'AUC'"], "best_metric = 'AUC' needs evaluations to choose from"),
        (["TrainerArgs.best_metric = 'Accuracy'", "TrainerArgs.eval_interval = 1"], "must be in eval_metrics"),
    ],
)
def test_a_metric_that_cannot_choose_is_refused(tiny_gin, bindings, told):
    with pytest.raises(ConfigError, match=told):
        load_experiment("ranking", gin_files=[str(tiny_gin)], gin_bindings=bindings)
