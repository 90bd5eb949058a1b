"""Saves in the background: the same checkpoints, while training goes on; what ends a run waits for them."""

from __future__ import annotations

import json
import re

import pytest
import torch

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines

# Tensors are written only once training has gone on by a step beyond the one that they are of, or has ended.
LATE = """
import os, time
from torch.distributed.checkpoint import FileSystemWriter
from genrec.training.step import TrainStep

reached = [0]
attempt, write_data = TrainStep.attempt, FileSystemWriter.write_data

def noted(self, batches, *, step, **options):
    result = attempt(self, batches, step=step, **options)
    reached[0] = step
    return result

def late(self, plan, planner):
    step, end = int(self.path.name.rpartition("_")[2]), time.monotonic() + 45
    while reached[0] <= step < {last} and time.monotonic() < end:
        time.sleep(0.002)
    os.write(1, f"overtaken:  {{reached[0] > step}}\\n".encode())  # at once: the other rank writes into the same file
    return write_data(self, plan, planner)

TrainStep.attempt, FileSystemWriter.write_data = noted, late
"""
ASYNC = "TrainerArgs.async_save = True"
SAVES = ("TrainerArgs.ckpt_save_interval = 2", "TrainerArgs.keep_checkpoints = 9", "TrainerArgs.train_batch_size = 2")
SHARDED = (
    "DatasetArgs.sharding_types = {'item': 'row_wise', 'action': 'table_wise'}",
    "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'",
    "OptimizerArgs.embedding_weight_decay = 0.0",
)
DELAYED = (
    "TrainerArgs.ema_decay = 0.9",
    "TrainerArgs.eval_interval = 3",
    "TrainerArgs.best_metric = 'AUC'",
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.backend = 'emulated'",
    "MixedPrecisionArgs.linear_recipe = 'delayed'",
)


def assert_equal_checkpoints(one, other, *, num_ranks):
    """All of them, tensors and what ranks hold on the host, byte for byte."""
    names = [
        sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != ".lock") for run in (one, other)
    ]
    assert names[0] == names[1] and len(names[0]) >= 3
    for name in names[0]:
        pair = [run / "checkpoints" / name for run in (one, other)]
        first, second = (read_tensors(path, prefixes=("",)) for path in pair)
        assert first.keys() == second.keys()
        assert not [key for key in first if not torch.equal(first[key], second[key])]
        for rank in range(num_ranks):
            hosts = [json.loads((path / f"rank_{rank:05d}.json").read_text()) for path in pair]
            assert hosts[0] == hosts[1] and hosts[0]["world_size"] == num_ranks


@pytest.mark.parametrize(("num_ranks", "bindings"), [(1, DELAYED), (2, SHARDED)])
def test_equal_to_saves_that_training_waits_for(tmp_path, arguments, on_forked_ranks, num_ranks, bindings):
    """Weights, moments, average and FP8 state are those of the step, whatever training does to them meanwhile."""
    for run, setup, more in (("sync", "", ()), ("async", LATE.format(last=6), (ASYNC,))):
        command = ("train", arguments(tmp_path / run, *SAVES, *bindings, *more))
        finished = on_forked_ranks(num_ranks, [command], setup=setup)
        assert finished.returncode == 0, finished.stderr
    assert_equal_checkpoints(tmp_path / "sync", tmp_path / "async", num_ranks=num_ranks)
    # Wherever on a line: what a rank logs may not have ended yet.
    overtaken = [found == "True" for found in re.findall(r"overtaken:  (True|False)", finished.stderr)]
    assert overtaken == [True] * (len(overtaken) - num_ranks) + [False] * num_ranks and len(overtaken) >= 3 * num_ranks


# The disk refuses rank 1's tensors of step 4, after training has gone on; or the folder is gone.
REFUSES = """
import shutil
late_write = FileSystemWriter.write_data

def refuse(self, plan, planner):
    if "step_00000004" not in str(self.path) or os.environ["RANK"] != "1":
        return late_write(self, plan, planner)
    {action}
    return late_write(self, plan, planner)

FileSystemWriter.write_data = refuse
"""


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise OSError(28, 'No space left on device', str(self.path))", "No space left on device"),
        ("shutil.rmtree(self.path)", "step_00000004"),
    ],
)
def test_failure_is_told_at_the_next_step_and_leaves_the_previous(tmp_path, arguments, on_forked_ranks, action, reason):
    setup = LATE.format(last=100) + REFUSES.format(action=action)
    steps = "TrainerArgs.max_train_iters = 100"
    command = ("train", arguments(tmp_path / "run", *SAVES, ASYNC, steps))
    finished = on_forked_ranks(2, [command], timeout_s=60, setup=setup)
    assert finished.returncode == 2, finished.stderr
    (told,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert "cannot write a checkpoint: " in told and reason in told
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir() if path.name != ".lock"] == ["step_00000002"]
    assert newest_checkpoint(checkpoints) == checkpoints / "step_00000002"
    assert 4 < max(line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")) < 100


SIGTERM = """
import os, signal
def signalled(self, batches, *, step, **options):
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return noted(self, batches, step=step, **options)

TrainStep.attempt = signalled
"""


def test_sigterm_waits_for_the_save(tmp_path, arguments, on_forked_ranks):
    command = ("train", arguments(tmp_path / "run", *SAVES, ASYNC))
    # Training stops after step 3 or 4: nothing overtakes the last save, which is late by half a second.
    setup = LATE.format(last=0).replace("os.write", "time.sleep(0.5); os.write") + SIGTERM
    finished = on_forked_ranks(2, [command], setup=setup)
    assert finished.returncode == 0, finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if "stopped by SIGTERM after step" in line]
    step = int(line.split("after step ")[1].split(",")[0])
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name == f"step_{step:08d}"


# A tensor in parts, as FSDP2 has them, is copied before it changes, and is whole to who reads it.
PARTS = """
import json, sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from genrec.training.checkpoint_store import CheckpointStore
from genrec.training.process_group import process_group

with process_group("cpu") as ranks:
    store = CheckpointStore(Path(json.loads(sys.argv[1])), keep=9, ranks=ranks, in_background=True)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    tensor = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0)])
    for step in (1, 2):
        store.save(step, tensors={"weight": tensor}, host={}, texts={})
        tensor.add_(100)
    store.finish()
"""


def test_tensors_in_parts(tmp_path, script_on_ranks):
    finished = script_on_ranks(3, PARTS, str(tmp_path / "checkpoints"))
    assert finished.returncode == 0, finished.stderr
    for step in (1, 2):
        path = tmp_path / "checkpoints" / f"step_{step:08d}"
        expected = torch.arange(14.0).view(7, 2) + 100 * (step - 1)
        torch.testing.assert_close(read_tensors(path, prefixes=("",)), {"weight": expected})


# The ranks sum on the host in a group of their own, as on GPUs. Rank 0's job sums first, rank 1's once training has.
SUMS = """
import dataclasses, threading
import torch.distributed as dist
from genrec.training.background import Background
from genrec.training.process_group import process_group

with process_group("cpu") as ranks:
    ranks = dataclasses.replace(ranks, host_group=dist.new_group(backend="gloo"))
    background, may_sum, found = Background(ranks), threading.Event(), []

    def job(its_ranks):
        assert may_sum.wait(60)
        result = its_ranks.start_sum_counts([1])
        may_train.set()
        found.extend(result())

    may_train = threading.Event()
    background.start(job)
    if ranks.rank == 0:
        may_sum.set()
        assert may_train.wait(60)
    sums = ranks.start_sum_counts([10])
    may_sum.set()
    assert sums() == [20], sums()
    background.join()
    background.raise_failure()
    assert found == [2], found
"""


def test_sums_of_training_and_of_a_save_never_mix(script_on_ranks):
    finished = script_on_ranks(2, SUMS, None)
    assert finished.returncode == 0, finished.stderr
