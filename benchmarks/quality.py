"""What a preset learns: trains it with several seeds and writes the final metrics, their mean and spread.

    python benchmarks/quality.py [--gin-config-file movielens_100k_ranking.gin] [--seeds 1 2 3] [--output FILE]

Each seed is a run of examples/pretrain_gr_ranking.py in a folder of its own, with its final evaluation
on valid and test. The seconds are those of the whole run: start, training, all evaluations, report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from preset_runs import train_preset
from reporting import RESULTS, header, write

METRICS = ("auc", "gauc", "ne", "logloss")


def run_seed(gin_file: str, seed: int, *, bindings: list[str], folder: Path) -> dict[str, Any]:
    """Train one seed; returns {"seed", "seconds", "<split>_<protocol>": {metric: value}}."""
    start = time.perf_counter()
    lines = train_preset(
        gin_file, bindings=[f"TrainerArgs.seed = {seed}", *bindings], output_dir=folder / f"seed{seed}"
    )
    result: dict[str, Any] = {"seed": seed, "seconds": round(time.perf_counter() - start, 1)}
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
    report = {
        **header("quality"),
        "gin_file": args.gin_config_file,
        # Where the data lies is no part of the result.
        "gin_bindings": [text for text in args.gin_bindings if not text.startswith("DatasetArgs.dataset_path")],
        "summary": summary(runs),
        "runs": runs,
    }
    write(report, args.output or RESULTS / f"{Path(args.gin_config_file).stem}.json")
    print(json.dumps(report["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
