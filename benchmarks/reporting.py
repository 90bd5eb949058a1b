"""What every benchmark's JSON file begins with, and how it is written.

Benchmarks run as scripts, which lets them import their neighbours in this folder by name.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def header(benchmark: str, *packages: str, device: str = "") -> dict[str, Any]:
    """What was measured, when, where and with what: the keys benchmark, date, device and versions.

    packages: what the numbers depend on beside Python, torch and its CUDA; one that is not installed has null.
    device: where that is not this machine's GPU or, without one, its processor.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "device": device or (torch.cuda.get_device_name() if torch.cuda.is_available() else cpu()),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{package: _version(package) for package in packages},
        },
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Write ``report`` to ``path``, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of what was measured several times, and the extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def cpu() -> str:
    """The processor's name, where the system tells it, and the threads that torch takes of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
