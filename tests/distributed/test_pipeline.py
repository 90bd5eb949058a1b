"""The pipeline types compute the same, bit for bit, whatever happens on the way.

gloo: TorchRec's pipeline runs on CPUs too, where it overlaps nothing. "prefetch" then finds no cache to fill.
"""

from __future__ import annotations

import pytest
import torch

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines

# Seven users are seven windows: with six sequences a step every second step has one, and all ranks but one have none.
RUN = (
    "DatasetArgs.max_history_seqlen = 40",
    "DatasetArgs.shuffle = True",
    "OptimizerArgs.embedding_optimizer_str = 'sgd'",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "TrainerArgs.eval_batch_size = 4",
    "TrainerArgs.max_train_iters = 8",
    "TrainerArgs.eval_interval = 5",
)
TYPES = ("none", "native", "prefetch")
SHARDED = "DatasetArgs.sharding_types = {'item': 'row_wise', 'action': 'table_wise'}"
ON_CPU = """
import os, signal
import numpy as np
import torch
from genrec.data.batches_by_place import BatchesByPlace
from genrec.training import overlap, pipeline, train
from genrec.training.loop import Loop
from genrec.training.step import TrainStep

overlap.OVERLAPPING_DEVICES = ("cpu",)
overlap.has_cached_tables = lambda embeddings: True
train.write_report = lambda *args, **kwargs: []
second = os.environ["RANK"] == "1" or os.environ["WORLD_SIZE"] == "1"

def every_call(owner, name, action):  # action(number of the call, what it would return, arguments)
    calls, method = [], getattr(owner, name)
    def changed(self, *args, **kwargs):
        calls.append(None)
        return action(len(calls), lambda: method(self, *args, **kwargs), *args, **kwargs)
    setattr(owner, name, changed)

# The batches of the pipeline's steps are read ahead, but where it pauses and at the ends.
every_call(pipeline.StepPipeline, "ahead", lambda n, ahead, source: (ahead(), print("AHEAD")))
"""


def commands(tmp_path, arguments, *bindings, types=TYPES):
    return [
        ("train", arguments(tmp_path / name, *RUN, *bindings, f"TrainerArgs.pipeline_type = {name!r}"))
        for name in types
    ]


def lines(output_dir):
    kept = read_lines(output_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in kept]


def tensors(output_dir):
    return read_tensors(newest_checkpoint(output_dir / "checkpoints"), prefixes=("",))


def assert_same_runs(tmp_path, types=TYPES):
    """What was logged, the evaluations in it, and every tensor of the last checkpoint."""
    assert len([n for n in lines(tmp_path / "none") if n["event"] == "train"]) == 8
    for name in types[1:]:
        assert lines(tmp_path / name) == lines(tmp_path / "none")
        torch.testing.assert_close(tensors(tmp_path / name), tensors(tmp_path / "none"), rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_types_compute_the_same(tmp_path, arguments, on_forked_ranks, num_ranks):
    """With micro-batches, and dropout, on one rank; with sharded tables, and a rank without users, on two."""
    batch = f"TrainerArgs.train_batch_size = {6 // num_ranks}"
    bindings = {1: (batch, "TrainerArgs.accumulate_steps = 2"), 2: (batch, SHARDED)}[num_ranks]
    finished = on_forked_ranks(num_ranks, commands(tmp_path, arguments, *bindings), setup=ON_CPU)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("AHEAD") == 2 * 8 * num_ranks
    assert_same_runs(tmp_path)


# Step 3 has no user anywhere; on the second rank the gradients of step 6 are not finite.
ODD_STEPS = """
def no_users(number, windows, epoch, place):
    return windows()[: 0 if (epoch, place) == (1, 0) else None]

every_call(BatchesByPlace, "_windows", no_users)
backward = TrainStep._backward

def with_kernels(self, *args):
    assert self.tables.kernels and all(int(kernel.iter_cpu) == self.tables.num_steps for kernel in self.tables.kernels)
    return backward(self, *args)

TrainStep._backward = with_kernels
every_call(TrainStep, "_clip", lambda n, clip: clip() * (float("nan") if n % 7 == 5 and second else 1.0))
"""


def test_steps_without_targets_and_steps_left_out(tmp_path, arguments, on_forked_ranks):
    bindings = (
        SHARDED,
        "TrainerArgs.train_batch_size = 3",
        "TrainerArgs.nonfinite = 'skip'",
        "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'",
    )
    finished = on_forked_ranks(2, commands(tmp_path, arguments, *bindings), setup=ON_CPU + ODD_STEPS)
    assert finished.returncode == 0, finished.stderr
    assert_same_runs(tmp_path)
    logged = {line["step"]: line["loss"] for line in lines(tmp_path / "none") if line["event"] == "train"}
    assert logged[3] == 0.0
    assert [line["step"] for line in lines(tmp_path / "none") if line["event"] == "skipped"] == [6]


# Rank 1 is asked to stop while it records step 2; the first command of each pair ends soon after.
STOPPED = """
def record_and_signal(number, record, result):
    record()
    if number in (2, 10) and second:
        os.kill(os.getpid(), signal.SIGTERM)

every_call(Loop, "_record", record_and_signal)
"""


def test_a_stopped_run_continues_after_the_steps_that_it_trained(tmp_path, arguments, on_forked_ranks):
    """What was read ahead is read again."""
    bindings = (SHARDED, "TrainerArgs.train_batch_size = 3", "DatasetArgs.num_workers = 1")
    none, prefetch = commands(tmp_path, arguments, *bindings, types=("none", "prefetch"))
    finished = on_forked_ranks(2, [none, none, prefetch, prefetch], setup=ON_CPU + STOPPED)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("stopped by SIGTERM after step 3, which is saved") == 2
    assert finished.stderr.count("continues from") == 2
    assert_same_runs(tmp_path, types=("none", "prefetch"))
    alone = commands(tmp_path / "alone", arguments, *bindings, types=("none",))
    finished = on_forked_ranks(2, alone)
    assert finished.returncode == 0, finished.stderr
    torch.testing.assert_close(tensors(tmp_path / "alone" / "none"), tensors(tmp_path / "none"), rtol=0, atol=0)


DAMAGED = """
from genrec.data.format import DataError

def read(number, windows, epoch, place):
    if (epoch, place) == (2, 0) and second:
        raise DataError("row group 3 is damaged")
    return windows()

every_call(BatchesByPlace, "__getitem__", lambda n, item, key: read(n, item, *key))
"""
INFINITE = """
from genrec.model.heads import PredictionHead

steps = [0]

def spoil(number, forward, states):
    return forward() * (float("inf") if steps[-1] == 5 and second else 1)

every_call(TrainStep, "attempt", lambda n, attempt, step_input, step: (steps.append(step), attempt())[1])
every_call(PredictionHead, "forward", spoil)
"""


@pytest.mark.parametrize("setup", [DAMAGED, INFINITE], ids=["damaged", "infinite"])
def test_errors_come_with_their_step_and_on_all_ranks(tmp_path, arguments, on_forked_ranks, setup):
    """A batch that rank 1 can't read, of step 5; a value that isn't finite there, looked for in a replay."""
    told = {}
    for name in ("none", "prefetch"):
        bindings = (SHARDED, "TrainerArgs.train_batch_size = 3", "TrainerArgs.nonfinite = 'locate'")
        command = commands(tmp_path, arguments, *bindings, "TrainerArgs.eval_interval = 0", types=[name])
        finished = on_forked_ranks(2, command, setup=ON_CPU + setup, timeout_s=60)
        assert finished.returncode != 0
        (told[name],) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
        assert [line["step"] for line in lines(tmp_path / name) if line["event"] == "train"] == [1, 2, 3, 4]
    assert told["prefetch"] == told["none"]
    assert {DAMAGED: "rank 1: row group 3 is damaged", INFINITE: "head"}[setup] in told["none"]
