"""Whole training runs of gin files, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "pretrain_gr_ranking.py"


def train_preset(gin_file: str, *, bindings: Sequence[str], output_dir: Path) -> list[dict[str, Any]]:
    """Train as the file and ``bindings`` say, return the lines of metrics.jsonl. Exits with the log of a failure."""
    command = [sys.executable, str(SCRIPT), "--gin-config-file", gin_file]
    for binding in (f"TrainerArgs.output_dir = {str(output_dir)!r}", *bindings):
        command += ["--gin-bindings", binding]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run of {output_dir.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
