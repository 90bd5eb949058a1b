"""Saves in the background, and hangs, on GPUs: page-locked copies, NCCL beside gloo, waiting for a device."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.step import TrainStep
from genrec.training.train import main as train_main
from genrec.training.watchdog import EXIT_HANG

pytestmark = pytest.mark.gpu

ON_GPU = (
    "TrainerArgs.device = 'cuda'",
    "TrainerArgs.deterministic = True",
    "NetworkArgs.dtype_str = 'bfloat16'",
    "TrainerArgs.ckpt_save_interval = 2",
    "TrainerArgs.keep_checkpoints = 9",
)


def assert_close_checkpoints(one, other, *, exact):
    for step in (2, 4, 6):
        tensors = [read_tensors(run / "checkpoints" / f"step_{step:08d}", prefixes=("",)) for run in (one, other)]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            torch.testing.assert_close(
                tensors[1][name], tensor, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, msg=f"{step}: {name}"
            )


def test_one_gpu_equals_saves_that_training_waits_for(tmp_path, arguments, monkeypatch):
    """Bit for bit, though each is written only once training has gone on."""
    assert train_main("ranking", arguments(tmp_path / "sync", *ON_GPU)) == 0
    attempt, write_data, reached, overtaken = TrainStep.attempt, FileSystemWriter.write_data, [0], []

    def noted(self, batches, *, step, **options):
        result = attempt(self, batches, step=step, **options)
        reached[0] = step
        return result

    def late(self, plan, planner):
        step, end = int(self.path.name.rpartition("_")[2]), time.monotonic() + 20
        while reached[0] <= step < 6 and time.monotonic() < end:
            time.sleep(0.002)
        overtaken.append(reached[0] > step)
        return write_data(self, plan, planner)

    monkeypatch.setattr(TrainStep, "attempt", noted)
    monkeypatch.setattr(FileSystemWriter, "write_data", late)
    assert train_main("ranking", arguments(tmp_path / "async", *ON_GPU, "TrainerArgs.async_save = True")) == 0
    assert overtaken == [True, True, False]
    assert_close_checkpoints(tmp_path / "sync", tmp_path / "async", exact=True)


TRAIN = """
import json, sys
from genrec.training import train
sys.exit(train.main("ranking", json.loads(sys.argv[1])))
"""


def test_two_gpus_with_sharded_tables(tmp_path, arguments, start_ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    sharded = (
        "DatasetArgs.sharding_types = {'item': 'row_wise', 'action': 'table_wise'}",
        "OptimizerArgs.optimizer_str = 'adam'",
        "OptimizerArgs.weight_decay = 0.0",
        "OptimizerArgs.embedding_weight_decay = 0.0",
    )
    for name, mode in (("sync", False), ("async", True)):
        run = arguments(tmp_path / name, *ON_GPU, *sharded, f"TrainerArgs.async_save = {mode}")
        ranks = start_ranks(2, TRAIN, run, log=tmp_path / f"{name}.log")
        assert ranks.wait(timeout_s=200) == [0, 0], ranks.log.read_text()
    assert_close_checkpoints(tmp_path / "sync", tmp_path / "async", exact=False)


HANGS = """
import json, os, signal, sys, time
from genrec.training import train
from genrec.training.loop import Loop

arguments, happens = json.loads(sys.argv[1])
read = Loop._next

def hang(self, micro_batches):
    if self.step == 3 and os.environ["RANK"] == "1":
        exec(happens)
    return read(self, micro_batches)

Loop._next = hang
sys.exit(train.main("ranking", arguments))
"""


@pytest.mark.parametrize(
    ("happens", "ends", "said"),
    [
        ("time.sleep(1e6)", (0, 1), "rank 1 has not entered all-reduce 'counts' of step 4, in which rank 0 waits for "),
        ("os.kill(os.getpid(), signal.SIGSTOP)", (0,), "rank 1 gives no sign of life for "),
    ],
)
def test_a_rank_that_hangs_beside_nccl(tmp_path, arguments, start_ranks, happens, ends, said):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = arguments(tmp_path / "run", *ON_GPU, "TrainerArgs.hang_timeout_s = 40")
    ranks = start_ranks(2, HANGS, [command, happens], log=tmp_path / "log")
    end = time.monotonic() + 200
    for rank in ends:
        ranks.processes[rank].join(timeout=max(end - time.monotonic(), 0))
        assert ranks.processes[rank].exitcode == EXIT_HANG, ranks.log.read_text()
    (told,) = [line for line in ranks.log.read_text().splitlines() if line.startswith("error: ")]
    assert said in told
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_00000002"
