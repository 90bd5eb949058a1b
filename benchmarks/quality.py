"""What a preset learns: trains it with several seeds and writes the final metrics, their mean and spread.

    python benchmarks/quality.py [--gin-config-file movielens_100k_ranking.gin] [--seeds 1 2 3] [--output FILE]

Each seed is a run of examples/pretrain_gr_ranking.py in a folder of its own, with its final evaluation
on valid and test. The seconds are those of the whole run: start, training, all evaluations, report.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
METRICS = ("auc", "gauc", "ne", "logloss")


def run_seed(gin_file: str, seed: int, *, bindings: list[str], folder: Path) -> dict[str, Any]:
    """Train one seed; returns {"seed", "seconds", "<split>_<protocol>": {metric: value}}. Raises on a failed run."""
    output = folder / f"seed{seed}"
    command = [sys.executable, str(ROOT / "examples" / "pretrain_gr_ranking.py"), "--gin-config-file", gin_file]
    for binding in (f"TrainerArgs.seed = {seed}", f"TrainerArgs.output_dir = '{output}'", *bindings):
        command += ["--gin-bindings", binding]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = {"seed": seed, "seconds": round(time.perf_counter() - start, 1)}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # later evaluations of valid replace earlier ones
        if line["event"] in ("valid", "test"):
            result[f"{line['event']}_{line['protocol']}"] = {name: line["metrics"][name] for name in METRICS}
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard deviation over seeds of every metric."""
    groups = [name for name in runs[0] if "_" in name]
    return {
        group: {
            metric: {
                "mean": statistics.mean(run[group][metric] for run in runs),
                "std": statistics.stdev(run[group][metric] for run in runs) if len(runs) > 1 else 0.0,
            }
            for metric in METRICS
        }
        for group in groups
    }


def main() -> int:
    """Train, print and write the result."""
    parser = argparse.ArgumentParser(description="Train a preset with several seeds.")
    parser.add_argument("--gin-config-file", default="movielens_100k_ranking.gin")
    parser.add_argument("--gin-bindings", action="append", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            run_seed(args.gin_config_file, seed, bindings=args.gin_bindings, folder=Path(folder)) for seed in args.seeds
        ]
    name = Path(args.gin_config_file).stem
    report = {
        "benchmark": "quality",
        "gin_file": args.gin_config_file,
        # Where the data lies is no part of the result.
        "gin_bindings": [text for text in args.gin_bindings if not text.startswith("DatasetArgs.dataset_path")],
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU, {os.environ.get('OMP_NUM_THREADS', torch.get_num_threads())} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "summary": summary(runs),
        "runs": runs,
    }
    output = args.output or Path(__file__).parent / "results" / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
