from __future__ import annotations

import json
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


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``on_ranks(2, [("train", [...]), ("evaluate", [...])])`` runs the commands under torchrun; a hang fails."""

    def run(
        num_ranks: int, commands: Sequence[tuple[str, Sequence[str]]], *, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        driver = tmp_path / "driver.py"
        driver.write_text(DRIVER)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        return subprocess.run(
            [*torchrun, str(driver), json.dumps(commands)], capture_output=True, text=True, timeout=timeout_s
        )

    return run


@pytest.fixture
def arguments(tiny_gin: Path) -> Callable[..., list[str]]:
    """``arguments(output_dir, "TrainerArgs.seed = 1", ...)``: the command line of a tiny run."""

    def build(output_dir: Path, *bindings: str) -> list[str]:
        all_bindings = [f"TrainerArgs.output_dir = {str(output_dir)!r}", *bindings]
        return ["--gin-config-file", str(tiny_gin), *(word for b in all_bindings for word in ("--gin-bindings", b))]

    return build
