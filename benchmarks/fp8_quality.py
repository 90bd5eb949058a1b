"""Does FP8 cost accuracy? Trains one gin file in bfloat16 and with parts of it in FP8, several seeds of each.

    python benchmarks/fp8_quality.py --dataset-path prepared/ml-100k [--gin-config-file movielens_ranking_fp8.gin]
        [--iters 2000] [--seeds 1 2 3] [--variants bf16 delayed tensorwise blockwise] [--jobs 4] [--output FILE]
    python benchmarks/fp8_quality.py --dataset-path prepared/ml-100k --iters 5000 --eval-interval 500
        --variants bf16 tensorwise attention tensorwise_attention --attention-mode per-head
        --output benchmarks/results/fp8_attention_quality.json

A variant is a recipe of the linears, "attention" in FP8 alone, or both; without a GPU, --gin-bindings
"MixedPrecisionArgs.backend = 'emulated'". Every run is examples/pretrain_gr_ranking.py in a process of its own; --jobs
of them share the device, so their speed says nothing. Writes the test AUC of every run, each variant's mean with its
standard error and its difference from bfloat16's with that of the difference, whether every loss and metric was finite,
and the curves, as JSON and as a picture. What an interrupted call has written is given back by --done: its runs count,
and are not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from genrec.configs.schema import ATTENTION_QUANTIZATIONS, LINEAR_RECIPES
from preset_runs import train_preset
from reporting import RESULTS, header, write

BASE = "bf16"
# How far a recipe's mean test AUC may lie from bfloat16's, or two standard errors of that difference, if more.
BOUND = 0.002
VARIANTS = {
    BASE: ["MixedPrecisionArgs.mixed_precision_dtype = None"],
    **{recipe: [f"MixedPrecisionArgs.linear_recipe = '{recipe}'"] for recipe in LINEAR_RECIPES},
    # The weights are those of "tensorwise"; evaluation is in FP8 too, as training is.
    "tensorwise_fp8_eval": [
        "MixedPrecisionArgs.linear_recipe = 'tensorwise'",
        "MixedPrecisionArgs.fp8_during_eval = True",
    ],
    "attention": ["MixedPrecisionArgs.linear_recipe = None"],
    **{f"{recipe}_attention": [f"MixedPrecisionArgs.linear_recipe = '{recipe}'"] for recipe in LINEAR_RECIPES},
}


def train(variant: str, seed: int, *, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run: variant, seed, whether all was finite, test metrics by protocol, [step, loss] and [step, valid AUC]."""
    attention = args.attention_mode if variant.endswith("attention") else "bf16"
    bindings = [
        f"TrainerArgs.seed = {seed}",
        f"TrainerArgs.max_train_iters = {args.iters}",
        f"TrainerArgs.eval_interval = {args.eval_interval}",
        "TrainerArgs.profile = False",
        "DatasetArgs.dataset_name = 'ml-100k'",
        f"DatasetArgs.dataset_path = '{args.dataset_path.resolve()}'",
        *VARIANTS[variant],
        f"MixedPrecisionArgs.hstu_attn_quantization_mode = '{attention}'",
        *args.gin_bindings,
    ]
    lines = train_preset(args.gin_config_file, bindings=bindings, output_dir=folder / f"{variant}_seed{seed}")
    curve = [[line["step"], line["loss"]] for line in lines if line["event"] == "train"]
    valid = [[n["step"], n["metrics"]["auc"]] for n in lines if n["event"] == "valid" and n["protocol"] == "sequential"]
    tests = {line["protocol"]: line["metrics"] for line in lines if line["event"] == "test"}
    numbers = [loss for _, loss in curve] + [metrics["auc"] for metrics in tests.values()]
    return {
        "variant": variant,
        "seed": seed,
        # What is not finite is null in metrics.jsonl; a skipped step has a line of its own.
        "finite": all(n is not None and math.isfinite(n) for n in numbers)
        and not any(line["event"] == "skipped" for line in lines),
        "test": tests,
        "curve": curve,
        "valid_curve": valid,
    }


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per variant and protocol: mean, its standard error, difference from bfloat16 and the error of that."""
    result: dict[str, Any] = {}
    variants = list(dict.fromkeys(run["variant"] for run in runs))
    for protocol in runs[0]["test"]:
        aucs = {v: [r["test"][protocol]["auc"] for r in runs if r["variant"] == v] for v in variants}
        base = aucs.get(BASE)
        for variant, values in aucs.items():
            row = {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}
            row["mean_error"] = row["std"] / math.sqrt(len(values))
            if base is not None and variant != BASE and len(values) > 1:
                error = math.sqrt(statistics.variance(values) / len(values) + statistics.variance(base) / len(base))
                difference = row["mean"] - statistics.mean(base)
                within = abs(difference) <= BOUND or abs(difference) <= 2 * error
                row |= {"minus_bf16": difference, "standard_error": error, "within": within}
            result.setdefault(variant, {})[protocol] = row
    for variant in variants:
        steps, aucs_of_steps = mean_curve(runs, variant, "valid_curve")
        best = max(range(len(steps)), key=lambda index: aucs_of_steps[index])
        result[variant]["best_valid"] = {"step": steps[best], "auc_sequential": aucs_of_steps[best]}
        result[variant]["all_finite"] = all(run["finite"] for run in runs if run["variant"] == variant)
    return result


def mean_curve(runs: list[dict[str, Any]], variant: str, name: str) -> tuple[list[int], list[float]]:
    """Steps, and the mean over seeds of ``name`` ("curve", "valid_curve")."""
    curves = [run[name] for run in runs if run["variant"] == variant]
    means = [statistics.mean(values) for values in zip(*([y for _, y in c] for c in curves), strict=True)]
    return [step for step, _ in curves[0]], means


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Mean training loss and validation AUC of each variant against the step."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("curve", "valid_curve"), ("training loss", "validation AUC, sequential"), strict=True
    ):
        for variant in dict.fromkeys(run["variant"] for run in runs):
            axes.plot(*mean_curve(runs, variant, name), label=variant)
        axes.set(xlabel="step", title=f"{label}, mean of seeds")
        axes.legend()
    figure.savefig(path, dpi=100)


def main() -> int:
    """Train all, write, print; 1 if a run failed or was not finite, or a variant lies outside the bound."""
    args = _parser().parse_args()
    report = {
        **header("accuracy of FP8", "transformer_engine", "triton", "fbgemm_gpu", "torchrec"),
        "gin_file": args.gin_config_file,
        "gin_bindings": args.gin_bindings,
        "attention_mode": args.attention_mode,
        "iters": args.iters,
        "summary": {},
        "failed": [],
        "runs": [],
    }
    runs: list[dict[str, Any]] = report["runs"]
    if args.done is not None:
        runs += [run for run in finished(args.done, report) if run["variant"] in args.variants]
    train_missing(report, args)
    if not runs:
        return 1
    runs.sort(key=lambda run: (args.variants.index(run["variant"]), run["seed"]))
    report["summary"] = compare(runs)
    write(report, args.output)
    plot(runs, args.output.with_suffix(".png"))
    print(json.dumps(report["summary"], indent=1))
    rows = [row for variant in report["summary"].values() for row in variant.values() if isinstance(row, dict)]
    good = all(run["finite"] for run in runs) and all(row.get("within", True) for row in rows)
    return 0 if good and not report["failed"] else 1


def train_missing(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Train what ``report`` has no run of, several at a time, and write it after each of them."""
    done = {(run["variant"], run["seed"]) for run in report["runs"]}
    wanted = [(variant, seed) for seed in args.seeds for variant in args.variants if (variant, seed) not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        jobs = {
            pool.submit(train, variant, seed, args=args, folder=Path(folder)): (variant, seed)
            for variant, seed in wanted
        }
        for job in as_completed(jobs):
            try:
                report["runs"].append(job.result())
            except SystemExit as error:  # the run failed, and this is its log
                variant, seed = jobs[job]
                report["failed"].append({"variant": variant, "seed": seed, "log": str(error)})
                print(error, file=sys.stderr)
            write(report, args.output)


def finished(path: Path, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of an earlier output; exits where it was made otherwise."""
    earlier: dict[str, Any] = json.loads(path.read_text())
    for name in ("gin_file", "gin_bindings", "attention_mode", "iters", "device"):
        if earlier[name] != report[name]:
            raise SystemExit(f"{path} has {name} {earlier[name]!r}, and this call {report[name]!r}")
    runs: list[dict[str, Any]] = earlier["runs"]
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Accuracy of FP8 against bfloat16.")
    parser.add_argument("--gin-config-file", default="movielens_ranking_fp8.gin")
    parser.add_argument("--gin-bindings", action="append", default=[])
    parser.add_argument("--dataset-path", type=Path, required=True)
    parser.add_argument("--iters", type=int, default=2000)
    parser.add_argument("--eval-interval", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[BASE, "delayed", "tensorwise", "blockwise"])
    parser.add_argument("--attention-mode", choices=ATTENTION_QUANTIZATIONS[1:], default="per-head")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--done", type=Path, help="an earlier output, whose runs are kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "fp8_linear_quality.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
