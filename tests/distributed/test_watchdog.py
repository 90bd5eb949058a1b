"""A rank that hangs is named, and every rank ends; a slow one is waited for."""

from __future__ import annotations

import os
import signal
import time

from genrec.training.checkpoint import newest_checkpoint
from genrec.training.watchdog import EXIT_HANG

# Trains; before, rank 1 is made to hang.
TRAIN = """
import json, os, sys, time
from torch.distributed.checkpoint import FileSystemWriter
from genrec.training import checkpoint_store, evaluation, train
from genrec.training.loop import Loop

def sleep_at(number, action):
    calls = []
    def sleeping(*arguments, **options):
        calls.append(None)
        if len(calls) == number:
            time.sleep(1e6)
        return action(*arguments, **options)
    return sleeping

arguments, hang = json.loads(sys.argv[1])
if os.environ["RANK"] == "1":
    exec(hang)
sys.exit(train.main("ranking", arguments))
"""
HANGS = {  # what makes rank 1 hang, bindings, and what is said of both ranks
    "reading a batch": (
        "Loop._next = sleep_at(3, Loop._next)",
        (),
        (
            "rank 1 has not entered all-reduce 'counts' of step 3, in which rank 0 waits for ",
            "rank 1 is in 'reading a batch' of step 3 for ",
        ),
        "sleeping",
    ),
    "before a collective in evaluation": (
        "evaluation._next = sleep_at(2, evaluation._next)",
        ("TrainerArgs.eval_interval = 2",),
        (
            "rank 1 has not entered all-reduce after 'reading a batch of the valid split' of step 2, in which rank 0",
            "rank 1 is in 'reading a batch of the valid split' of step 2 for ",
        ),
        "sleeping",
    ),
    "in the optimizer, beside shared tables": (
        "from torch.optim import Adam; Adam.step = sleep_at(3, Adam.step)",
        (
            "OptimizerArgs.optimizer_str = 'adam'",
            "OptimizerArgs.embedding_optimizer_str = 'sgd'",
            "OptimizerArgs.embedding_weight_decay = 0.0",
            "DatasetArgs.sharding_types = {'item': 'row_wise', 'action': 'row_wise', 'age': 'row_wise'}",
        ),
        (
            "rank 1 is behind; rank 1 is in 'optimizer' of step 3 for ",
            "rank 0 is in 'optimizer of shared tables' of step 3 for ",
        ),
        "sleeping",
    ),
    "in a save": (
        "checkpoint_store.write_host = sleep_at(2, checkpoint_store.write_host)",
        (),
        (
            "rank 1 has not entered all-reduce after 'writing the host state of a checkpoint' of step 4, in which rank",
            "rank 1 is in 'writing the host state of a checkpoint' of step 4 for ",
        ),
        "sleeping",
    ),
    "in the background of a save": (
        "FileSystemWriter.write_data = sleep_at(2, FileSystemWriter.write_data)",
        ("TrainerArgs.async_save = True",),
        (
            "rank 1 is behind; rank 1 is in 'writing the tensors of a checkpoint' of step 4 for ",
            "rank 0 is in 'agreeing on the tensors of a checkpoint' of step 4 for ",
        ),
        "write_data",
    ),
}


def ended(ranks, *, timeout_s, which):
    """Exit codes of the ranks in ``which`` once all of them have ended."""
    end = time.monotonic() + timeout_s
    for rank in which:
        ranks.processes[rank].join(timeout=max(end - time.monotonic(), 0))
    return [ranks.processes[rank].exitcode for rank in which]


def told(ranks):
    (line,) = [line for line in ranks.log.read_text().splitlines() if line.startswith("error: ")]
    return line


def test_a_rank_that_sleeps_in_a_run(tmp_path, arguments, start_ranks):
    """All at once, since they only wait; 4 s are much more than any phase takes that does not hang."""
    started = {}
    for number, (name, (hang, bindings, _, _)) in enumerate(HANGS.items()):
        saves = ("TrainerArgs.ckpt_save_interval = 2", "TrainerArgs.hang_timeout_s = 4")
        command = arguments(tmp_path / str(number), *saves, *bindings)
        started[name] = start_ranks(2, TRAIN, [command, hang], log=tmp_path / f"{number}.log")
    for number, (name, (_, _, said, frame)) in enumerate(HANGS.items()):
        ranks, run = started[name], tmp_path / str(number)
        assert ended(ranks, timeout_s=60, which=(0, 1)) == [EXIT_HANG, EXIT_HANG], ranks.log.read_text()
        assert all(words in told(ranks) for words in said), told(ranks)
        assert frame in (run / "hang" / "rank_00001.txt").read_text()
        assert "rank 0 " in (run / "hang" / "rank_00000.txt").read_text()
        whole = {"before a collective in evaluation": None}.get(name, "step_00000002")
        newest = newest_checkpoint(run / "checkpoints")
        assert (newest and newest.name) == whole


# Four steps of reading and a collective. What happens in step 2: a rank's process is stopped, or it is slow.
STEPS = """
import json, os, signal, sys, time
from pathlib import Path
from genrec.training.process_group import process_group
from genrec.training.watchdog import watching

folder, happens, timeout_s = json.loads(sys.argv[1])
with process_group("cpu") as ranks, watching(ranks, timeout_s=timeout_s, folder=Path(folder)):
    for step in range(1, 5):
        ranks.progress.enter("reading a batch", step=step)
        if step == 2:
            exec(happens)
        with ranks.progress.collective("all-reduce", "counts"):
            ranks.sum_counts([1])
"""
STOPPED = "if ranks.rank == {}: os.kill(os.getpid(), signal.SIGSTOP)"
# Each phase is shorter than the timeout, all of them longer: signs come from phases, and from what a long one measures.
SLOW = """
if ranks.rank == 1:
    for phase in range(3):
        ranks.progress.enter(f"phase {phase}")
        time.sleep(0.6)
    with ranks.progress.measuring(lambda: time.monotonic() // 0.5):
        time.sleep(2.0)
    for _ in range(3):
        ranks.progress.sign()
        time.sleep(0.6)
"""
# All are stopped for longer than the timeout, and go on: nobody's fault, though what they do takes a while yet.
PAUSED = """
for number in range(20):
    if number == 8:
        Path(folder + f"_{ranks.rank}").touch()
    time.sleep(0.1)
"""


def test_a_stopped_process_is_named_by_the_others_and_a_slow_rank_is_waited_for(tmp_path, start_ranks):
    num_ranks = 3
    happens = {"stopped_1": STOPPED.format(1), "stopped_0": STOPPED.format(0), "slow": SLOW, "paused": PAUSED}
    ranks = {}
    for name, code in happens.items():
        value = [str(tmp_path / name), code, 4.0 if name == "paused" else 1.5]
        ranks[name] = start_ranks(num_ranks, STEPS, value, log=tmp_path / f"{name}.log")
    pause_all(ranks["paused"], [tmp_path / f"paused_{rank}" for rank in range(num_ranks)], seconds=6.0)
    assert ended(ranks["slow"], timeout_s=30, which=(0, 1, 2)) == [0, 0, 0], ranks["slow"].log.read_text()
    assert ended(ranks["paused"], timeout_s=30, which=(0, 1, 2)) == [0, 0, 0], ranks["paused"].log.read_text()

    assert ended(ranks["stopped_1"], timeout_s=30, which=(0, 2)) == [EXIT_HANG] * 2
    sentence = told(ranks["stopped_1"])
    assert "rank 1 has not come through all-reduce 'counts' of step 2, in which ranks 0 and 2 wait for " in sentence
    assert "rank 1 gives no sign of life for " in sentence
    assert sorted(path.name for path in (tmp_path / "stopped_1").iterdir()) == ["rank_00000.txt", "rank_00002.txt"]

    # Rank 0 keeps the store where torchrun doesn't.
    assert ended(ranks["stopped_0"], timeout_s=30, which=(1, 2)) == [EXIT_HANG] * 2
    sentence = told(ranks["stopped_0"])
    assert "rank 0, which keeps what ranks tell each other, gives no sign of life for " in sentence
    assert "rank 1 waits in all-reduce 'counts' of step 2 for " in sentence


def pause_all(ranks, begun, *, seconds):
    """Stop every process of ``ranks`` once all files ``begun`` are there, and let them go on."""
    end = time.monotonic() + 30
    while not all(path.exists() for path in begun):
        assert time.monotonic() < end
        time.sleep(0.01)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in ranks.processes:
            os.kill(process.pid, number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)
