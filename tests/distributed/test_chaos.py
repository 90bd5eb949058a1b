"""kill -9 at random moments, saves among them: the run that is left equals one that nothing happened to.

Long form: ``make nightly PYTEST_ARGS="tests/distributed/test_chaos.py -s"`` kills each of the runs a hundred times.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
import time

import pytest
import torch

from genrec.training.checkpoint import WRITING_PREFIX, newest_checkpoint, read_tensors
from genrec.training.metrics_log import read_lines

# Trains; before each step, what it is about to read is noted: its events, by user and time, a line of JSON a step.
TRAIN = """
import json, os, sys, time
from genrec.training import train
from genrec.training.step import TrainStep

arguments, notes, pause_s = json.loads(sys.argv[1])
attempt = TrainStep.attempt

def noted(self, step_input, *, step, **options):
    events = []
    for batch in step_input.batches.value:
        users = batch.user_ids.repeat_interleave(batch.features["item"].lengths())
        events += zip(users.tolist(), batch.timestamps.tolist())
    with open(f"{notes}_{os.environ['RANK']}", "a") as file:
        file.write(json.dumps([step, events]) + "\\n")
    result = attempt(self, step_input, step=step, **options)
    time.sleep(pause_s)
    return result

TrainStep.attempt = noted
sys.exit(train.main("ranking", arguments))
"""

SHARDED = (
    "DatasetArgs.sharding_types = {'item': 'row_wise', 'action': 'table_wise'}",
    "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "TrainerArgs.enable_balanced_shuffler = True",
)
RUNS = {
    "one rank, a worker, best checkpoint": (
        1,
        ("DatasetArgs.num_workers = 1", "TrainerArgs.eval_interval = 7", "TrainerArgs.best_metric = 'AUC'"),
    ),
    "two ranks, sharded tables": (2, SHARDED),
    "two ranks, sharded tables, saves in the background": (2, (*SHARDED, "TrainerArgs.async_save = True")),
}
STEPS_BETWEEN_KILLS = 6  # at most, so that a run has a known number of steps to be killed in
SAVE_INTERVAL = 3


def notes_of(directory, rank):
    """(step, events) of every attempt at a step, in order; a line that a kill cut short is left out."""
    path = directory / f"notes_{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            step, events = json.loads(line)
        except ValueError:
            continue
        yield step, [tuple(event) for event in events]


class Chaos:
    """Starts a run again and again, and kills it."""

    def __init__(self, start, rng):
        self.start = start  # () -> StartedRanks
        self.rng = rng
        self.num_kills = self.num_kills_in_saves = 0

    def kill_once(self, directory):
        """One start and its end. ``directory``: the run's. Whether the run was done before it could be killed."""
        ranks = self.start()
        checkpoints = directory / "checkpoints"
        begun = sum(1 for _ in notes_of(directory, 0))
        in_save = self.rng.random() < 0.4
        steps, delay_s = self.rng.randrange(STEPS_BETWEEN_KILLS), self.rng.random() * 0.03
        at_start_s = time.monotonic() + self.rng.random() * 2 if self.rng.random() < 0.1 else float("inf")
        left = {path.name for path in checkpoints.glob(f"{WRITING_PREFIX}*")}
        while time.monotonic() < at_start_s:
            if any(process.exitcode is not None for process in ranks.processes):
                break
            new = {path.name for path in checkpoints.glob(f"{WRITING_PREFIX}step_*")} - left
            done = sum(1 for _ in notes_of(directory, 0)) - begun
            if (in_save and new) or (not in_save and done > steps) or done > 2 * STEPS_BETWEEN_KILLS:
                break
            time.sleep(0.001)
        time.sleep(delay_s)
        finished = all(process.exitcode == 0 for process in ranks.processes)
        failed = [process.exitcode for process in ranks.processes if process.exitcode]
        ranks.kill()
        assert not failed, ranks.log.read_text()
        if not finished:
            self.num_kills += 1
            self.num_kills_in_saves += any(checkpoints.glob(f"{WRITING_PREFIX}*"))
        return finished


def assert_every_event_once(directory, num_ranks):
    """By its id, in each epoch; and every attempt at a step has read the same."""
    attempts = [collections.defaultdict(list) for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for step, events in notes_of(directory, rank):
            attempts[rank][step].append(events)
        assert all(again == lists[0] for lists in attempts[rank].values() for again in lists)
    num_epochs, counts = 0, collections.Counter()
    total = 1 + 5 + 8 + 9 + 20 + 30 + 3  # training events of the tiny dataset
    for step in range(1, max(attempts[0]) + 1):
        counts.update(event for rank in attempts for event in rank[step][0])
        assert max(counts.values()) == 1, f"step {step} repeats an event"
        if len(counts) == total:
            num_epochs, counts = num_epochs + 1, collections.Counter()
    assert num_epochs >= 3
    return sum(len(lists) for lists in attempts[0].values())


def chaos(tmp_path, arguments, start_ranks, *, name, num_kills, seed):
    num_ranks, bindings = RUNS[name]
    num_steps = num_kills * (2 * STEPS_BETWEEN_KILLS + 2)
    settings = (
        *bindings,
        f"TrainerArgs.max_train_iters = {num_steps}",
        f"TrainerArgs.ckpt_save_interval = {SAVE_INTERVAL}",
        "TrainerArgs.train_batch_size = 2",
    )

    def start(run, pause_s):
        value = [arguments(tmp_path / run, *settings), str(tmp_path / run / "notes"), pause_s]
        (tmp_path / run).mkdir(exist_ok=True)
        return start_ranks(num_ranks, TRAIN, value, log=tmp_path / f"{run}.log")

    started = time.monotonic()
    monkey = Chaos(lambda: start("killed", 0.005), random.Random(seed))
    while monkey.num_kills < num_kills:
        assert not monkey.kill_once(tmp_path / "killed"), "the run has too few steps for so many kills"
    for run in ("killed", "whole"):
        ranks = start(run, 0.0)
        assert ranks.wait(timeout_s=240) == [0] * num_ranks, ranks.log.read_text()

    whole, killed = (newest_checkpoint(tmp_path / run / "checkpoints") for run in ("whole", "killed"))
    assert whole.name == killed.name == f"step_{num_steps:08d}"
    one, other = read_tensors(whole, prefixes=("",)), read_tensors(killed, prefixes=("",))
    assert one.keys() == other.keys()
    assert not [key for key in one if not torch.equal(one[key], other[key])]
    logs = [
        [(n["event"], n["step"], n.get("loss"), n.get("metrics")) for n in read_lines(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "killed")
    ]
    # A start says how balanced its ranks are.
    assert logs[0] == [line for line in logs[1] if line[0] != "balance" or line[1] == 1]
    num_attempts = assert_every_event_once(tmp_path / "killed", num_ranks)
    kept = [sorted(p.name for p in (tmp_path / run / "checkpoints").iterdir()) for run in ("whole", "killed")]
    assert kept[0] == kept[1]  # nothing half written is left
    print(
        f"chaos, {name}: {monkey.num_kills} kills, {monkey.num_kills_in_saves} of them in saves, {num_steps} steps,"
        f" {num_attempts} attempts at them, {time.monotonic() - started:.0f} s"
    )
    return monkey


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments(tmp_path, arguments, start_ranks, name):
    monkey = chaos(tmp_path, arguments, start_ranks, name=name, num_kills=8, seed=1)
    assert monkey.num_kills_in_saves > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUNS)
def test_killed_a_hundred_times(tmp_path, arguments, start_ranks, name):
    monkey = chaos(tmp_path, arguments, start_ranks, name=name, num_kills=100, seed=2)
    assert monkey.num_kills_in_saves >= 10


# Rank 1 dies after its third step, once; torchrun starts both ranks again.
DIES = """
import os, signal, sys
from pathlib import Path
from genrec.training import train
from genrec.training.loop import Loop

record = Loop._record

def record_and_die(self, result):
    record(self, result)
    if self.step == 3 and os.environ["RANK"] == "1" and not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)

Loop._record = record_and_die
sys.exit(train.main("ranking", sys.argv[2:]))
"""


def test_torchrun_starts_a_killed_rank_again(tmp_path, arguments, start_ranks):
    script, died = tmp_path / "dies.py", tmp_path / "died"
    script.write_text(DIES)
    settings = ("TrainerArgs.train_batch_size = 2", "TrainerArgs.ckpt_save_interval = 2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--max-restarts", "1", str(script), str(died), *arguments(tmp_path / "killed", *settings)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    assert died.exists() and "continues from" in finished.stderr
    value = [arguments(tmp_path / "whole", *settings), str(tmp_path / "notes"), 0.0]
    assert start_ranks(2, TRAIN, value, log=tmp_path / "whole.log").wait(timeout_s=200) == [0, 0]
    one, other = (
        read_tensors(newest_checkpoint(tmp_path / r / "checkpoints"), prefixes=("",)) for r in ("whole", "killed")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
