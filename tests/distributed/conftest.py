from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

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
        driver.write_text(DRIVER.replace("commands = json", f"{setup}\ncommands = json", 1))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        return run_and_stop([*torchrun, str(driver), json.dumps(commands)], timeout_s=timeout_s)

    return run


@pytest.fixture
def arguments(tiny_gin: Path) -> Callable[..., list[str]]:
    """``arguments(output_dir, "TrainerArgs.seed = 1", ...)``: the command line of a tiny run."""

    def build(output_dir: Path, *bindings: str) -> list[str]:
        all_bindings = [f"TrainerArgs.output_dir = {str(output_dir)!r}", *bindings]
        return ["--gin-config-file", str(tiny_gin), *(word for b in all_bindings for word in ("--gin-bindings", b))]

    return build
