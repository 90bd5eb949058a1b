from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

# One process group for all commands: PyTorch can't join a second one in the same processes reliably.
# Runs ["train" or "evaluate", [arguments]] one after the other in every rank, and stops at the first that fails.
# "{rank}" in an argument is the rank.
DRIVER = """
import json, os, sys
import torch
from genrec.training import scoring, train

commands = json.loads(sys.argv[1])
if len(commands) > 1:
    torch.distributed.init_process_group("gloo")
for name, arguments in commands:
    arguments = [argument.replace("{rank}", os.environ["RANK"]) for argument in arguments]
    code = train.main("ranking", arguments) if name == "train" else scoring.main(arguments)
    if code:
        sys.exit(code)
if len(commands) > 1:
    torch.distributed.destroy_process_group()
"""


def run_and_stop(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``command``, and stop whatever it started and left behind, in particular at a timeout."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            _stop_session(process.pid)
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def _stop_session(session: int) -> None:
    """Kill every process of ``session``; torchrun gives each rank a group, and at times a session, of its own."""
    stop = [session]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent, _group, own_session = stat.read_text().rpartition(")")[2].split()[1:4]
            if session in (int(parent), int(own_session)):
                stop.append(int(stat.parent.name))
    for pid in stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``on_ranks(2, [("train", [...]), ("evaluate", [...])])`` runs the commands under torchrun; a hang fails.

    ``setup`` is Python code that every rank runs before them.
    """

    def run(
        num_ranks: int, commands: Sequence[tuple[str, Sequence[str]]], *, timeout_s: float = 120, setup: str = ""
    ) -> subprocess.CompletedProcess[str]:
        driver = tmp_path / "driver.py"
        driver.write_text(_driver(setup))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        return run_and_stop([*torchrun, str(driver), json.dumps(commands)], timeout_s=timeout_s)

    return run


# What a rank does before its own code: its place, and its output into a file.
PRELUDE = """
import multiprocessing, os, sys
multiprocessing.set_start_method("fork", force=True)  # of the loader's workers, as in a process that nobody forked
os.environ.update({environment!r})
sys.argv = ["script", {argument!r}]
output = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(output, 1)
os.dup2(output, 2)
"""


@dataclass(frozen=True)
class StartedRanks:
    """Ranks that run; ``log``: where all that they print goes."""

    processes: list[BaseProcess]
    log: Path

    def kill(self) -> None:
        """As by kill -9."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait(self, timeout_s: float) -> list[int | None]:
        """Exit codes, None of a rank that is not done in time; the others are killed where one has failed."""
        end = time.monotonic() + timeout_s
        while any(process.exitcode is None for process in self.processes) and time.monotonic() < end:
            if any(process.exitcode for process in self.processes):
                break
            time.sleep(0.01)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., StartedRanks]]:
    """``start_ranks(2, code, value, log=path)`` runs ``code`` in so many ranks with the JSON of ``value`` as argument.

    They are forked from a process that has imported genrec, so starting costs next to nothing. None outlives the test.
    With a GPU each starts by itself, since CUDA can't be used in a forked process.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["genrec.training.train"])
    started = []

    def start(num_ranks: int, code: str, value: object, *, log: Path) -> StartedRanks:
        port = str(_free_port())
        processes = []
        for rank in range(num_ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            environment = {name: str(number) for name, number in place.items()}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            prelude = PRELUDE.format(environment=environment, argument=json.dumps(value), log=str(log))
            processes.append(context.Process(target=exec, args=(prelude + code, {"__name__": "script"})))
            processes[-1].start()
        started.append(StartedRanks(processes, log))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture
def script_on_ranks(
    tmp_path: Path, start_ranks: Callable[..., StartedRanks]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``script_on_ranks(2, code, value)`` runs ``code`` as ``start_ranks`` does, to its end."""

    def run(num_ranks: int, code: str, value: object, *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        log = tmp_path / "script.log"
        log.unlink(missing_ok=True)
        codes = start_ranks(num_ranks, code, value, log=log).wait(timeout_s)
        return subprocess.CompletedProcess([], max(1 if c is None else abs(c) for c in codes), "", log.read_text())

    return run


@pytest.fixture
def on_forked_ranks(
    script_on_ranks: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As ``on_ranks``, without torchrun, which takes most of the time of small runs; stdout goes with stderr."""

    def run(
        num_ranks: int, commands: Sequence[tuple[str, Sequence[str]]], *, timeout_s: float = 120, setup: str = ""
    ) -> subprocess.CompletedProcess[str]:
        return script_on_ranks(num_ranks, _driver(setup), commands, timeout_s=timeout_s)

    return run


def _driver(setup: str) -> str:
    return DRIVER.replace("commands = json", f"{setup}\ncommands = json", 1)


def _free_port() -> int:
    """One that no outgoing connection gets meanwhile: on Linux, unless told otherwise, those are from 32768 on."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", port))
            return port
    raise OSError("no port is free")


@pytest.fixture
def arguments(tiny_gin: Path) -> Callable[..., list[str]]:
    """``arguments(output_dir, "TrainerArgs.seed = 1", ...)``: the command line of a tiny run."""

    def build(output_dir: Path, *bindings: str) -> list[str]:
        all_bindings = [f"TrainerArgs.output_dir = {str(output_dir)!r}", *bindings]
        return ["--gin-config-file", str(tiny_gin), *(word for b in all_bindings for word in ("--gin-bindings", b))]

    return build
