"""What ends a run on several ranks, a signal or a full disk, leaves whole checkpoints that it continues from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch

from genrec.training.checkpoint import newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines

SAVES = "TrainerArgs.ckpt_save_interval = 2"


def assert_equal_checkpoints(one, other):
    tensors = [read_tensors(newest_checkpoint(path / "checkpoints"), prefixes=("",)) for path in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


TERMINATED = """
import os, signal
from genrec.training.loop import Loop
record = Loop._record

def record_and_signal(self, result):
    record(self, result)
    if self.step == 3 and os.environ["RANK"] == "1" and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os.kill(os.getpid(), signal.SIGTERM)

Loop._record = record_and_signal
"""


def test_sigterm_to_one_rank_stops_both_and_both_continue(tmp_path, arguments, on_forked_ranks):
    """Rank 1 is asked after step 3; both save step 4 and end with 0; the next command continues there."""
    setup = TERMINATED.replace("sys.argv[2]", repr(str(tmp_path / "sent")))
    parts, whole = (arguments(tmp_path / name, "TrainerArgs.train_batch_size = 2") for name in ("parts", "whole"))
    finished = on_forked_ranks(2, [("train", parts), ("train", parts), ("train", whole)], setup=setup)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("stopped by SIGTERM after step 4, which is saved") == 1
    assert "continues from" in finished.stderr
    assert_equal_checkpoints(tmp_path / "parts", tmp_path / "whole")


def test_sigterm_to_torchrun_saves_within_its_patience(tmp_path, arguments):
    """torchrun passes the signal on and waits 30 s (--shutdown-timeout); it alone returns 1, with its own traceback."""
    run, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text("import sys; from genrec.training.train import main; sys.exit(main('ranking', sys.argv[1:]))")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    command = [*torchrun, *arguments(run, "TrainerArgs.max_train_iters = 1000000")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            log, started = run / "metrics.jsonl", time.monotonic()
            while not log.exists() or len(read_lines(log)) < 3:
                assert process.poll() is None and time.monotonic() < started + 120
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    last = [line["step"] for line in read_lines(log)][-1]
    assert err.count(f"stopped by SIGTERM after step {last}, which is saved") == 1, err
    assert newest_checkpoint(run / "checkpoints").name == f"step_{last:08d}"


# The disk refuses rank 1's share of the tensors of step 4, after some of it has been written.
FULL_DISK = """
import os
from torch.distributed.checkpoint import FileSystemWriter
write_data = FileSystemWriter.write_data

def refuse(self, plan, planner):
    if "step_00000004" in str(self.path) and os.environ["RANK"] == "1":
        (self.path / "__1_0.distcp").write_bytes(b"half")
        raise OSError(28, "No space left on device", str(self.path))
    return write_data(self, plan, planner)

FileSystemWriter.write_data = refuse
"""


def test_full_disk_on_one_rank_is_one_sentence_and_leaves_the_previous(tmp_path, arguments, on_forked_ranks):
    command = ("train", arguments(tmp_path / "run", SAVES))
    finished = on_forked_ranks(2, [command], timeout_s=60, setup=FULL_DISK)
    assert finished.returncode != 0
    (told,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert "cannot write a checkpoint: " in told and "No space left on device" in told
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir() if path.name != ".lock"] == ["step_00000002"]
    assert newest_checkpoint(checkpoints) == checkpoints / "step_00000002"
