"""Training throughput on one rank and on several, with each pipeline type (TrainerArgs.pipeline_type).

    python benchmarks/scaling.py [--gin-config-file benchmark_ranking.gin] [--ranks 1 2] [--output FILE]

Starts torchrun with each number of ranks. There the trainer's own steps run, on synthetic batches; the pipeline types
take turns in every round, each on the same batches. On N ranks an epoch has 1/N of the steps, so that all numbers of
ranks train on the same users. A step's time is that between the ends of two steps; rounds begin with steps that are not
counted. "prefetch" differs from "native" where a table is cached on the device.

Weak scaling: each rank has the same batch size whatever their number; the efficiency of N ranks is their tokens/s over
N times those of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genrec.configs.loading import load_experiment
from genrec.configs.schema import BenchmarkDatasetArgs, ExperimentConfig, UserError
from genrec.training.command_line import add_gin_arguments
from genrec.training.feed import Feed
from genrec.training.loop import grouped
from genrec.training.overlap import has_cached_tables, make_feed
from genrec.training.process_group import process_group
from genrec.training.ranks import Ranks
from genrec.training.run import Run
from reporting import RESULTS, cpu, header, spread, write

TYPES = ("none", "native", "prefetch")
RESULT = RESULTS / "scaling.json"


@dataclass(frozen=True)
class Round:
    """Steps of one pipeline type. seconds: of each. num_tokens: of all, over all ranks."""

    seconds: list[float]
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, over all ranks."""
        return self.num_tokens / sum(self.seconds)


class Trainer:
    """A run's model and steps, ready for any pipeline type."""

    def __init__(self, config: ExperimentConfig, ranks: Ranks) -> None:
        self.run = Run(config, ranks=ranks)
        self.run.place()
        self.run.model.train()
        self.ranks = ranks
        self.step = self.run.train_step(total_steps=10**6)
        self.num_steps = 0
        self._first_batches = self.run.loader.state_dict()

    def feed(self, kind: str) -> Feed:
        """A feed of a pipeline type."""
        trainer = dataclasses.replace(self.run.config.trainer, pipeline_type=kind)
        return make_feed(trainer, self.run.model.embeddings, loader=self.run.loader, ranks=self.ranks)

    def round(self, feed: Feed, *, steps: int, warmup: int) -> Round:
        """Train ``warmup`` and then ``steps`` steps, on the first batches of the data."""
        self.run.loader.load_state_dict(self._first_batches)
        batches = grouped(self.run.loader, self.run.config.trainer.accumulate_steps)
        self.step.lookahead = feed
        feed.begin(lambda: next(batches), warmup + steps)
        seconds, num_tokens = [], 0
        last = time.perf_counter()
        for number in range(warmup + steps):
            step_input = feed.next()
            self.num_steps += 1
            result = self.step.attempt(step_input, step=self.num_steps)
            feed.done()
            last, start = time.perf_counter(), last
            if number >= warmup:
                seconds.append(last - start)
                num_tokens += result.num_tokens
        return Round(seconds, num_tokens)


def work(args: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes the rounds."""
    config = load_experiment("ranking", gin_files=args.gin_config_file, gin_bindings=args.gin_bindings)
    with process_group(config.trainer.device) as ranks:
        config = same_users(config, ranks.world_size)
        # Caches must be made for prefetching before any of it; the other types don't mind.
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, pipeline_type="prefetch"))
        trainer = Trainer(config, ranks)
        feeds = {kind: trainer.feed(kind) for kind in TYPES}
        trainer.round(feeds["none"], steps=len(trainer.run.loader), warmup=0)  # compiles, and draws all batches
        rounds: dict[str, list[Round]] = {kind: [] for kind in TYPES}
        for _ in range(args.rounds):
            for kind, feed in feeds.items():
                rounds[kind].append(trainer.round(feed, steps=args.steps, warmup=args.warmup))
        if ranks.is_main:
            result = {
                "setting": setting(config, trainer),
                "rounds": {kind: [dataclasses.asdict(entry) for entry in own] for kind, own in rounds.items()},
            }
            args.worker.write_text(json.dumps(result))


def same_users(config: ExperimentConfig, num_ranks: int) -> ExperimentConfig:
    """``config`` with an epoch of the users that one rank would have."""
    dataset = config.dataset
    if not isinstance(dataset, BenchmarkDatasetArgs):
        raise UserError("this benchmark needs BenchmarkDatasetArgs, as in benchmark_ranking.gin")
    num_batches, rest = divmod(dataset.num_generated_batches, num_ranks)
    if rest:
        raise UserError(
            f"BenchmarkDatasetArgs.num_generated_batches = {dataset.num_generated_batches} must be a multiple of"
            f" {num_ranks} ranks"
        )
    return dataclasses.replace(config, dataset=dataclasses.replace(dataset, num_generated_batches=num_batches))


def setting(config: ExperimentConfig, trainer: Trainer) -> dict[str, Any]:
    """What ran."""
    network = config.network
    return {
        "users_per_rank": config.trainer.train_batch_size,
        "num_layers": network.num_layers,
        "hidden_size": network.hidden_size,
        "num_attention_heads": network.num_attention_heads,
        "kv_channels": network.kv_channels,
        "dtype": network.dtype_str,
        "precision": config.mixed_precision.mixed_precision_dtype,
        "balanced": config.trainer.enable_balanced_shuffler,
        "tables": {p.table: f"{p.sharding}, {p.kernel}" for p in trainer.run.placements},
        "prefetch_is_native": not has_cached_tables(trainer.run.model.embeddings),
    }


def on_ranks(num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Start ``num_ranks`` ranks of this script; returns what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rounds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        command += [__file__, "--worker", str(result)]
        for name in ("rounds", "steps", "warmup"):
            command += [f"--{name}", str(getattr(args, name))]
        for file in args.gin_config_file:
            command += ["--gin-config-file", file]
        for binding in [*args.gin_bindings, f"TrainerArgs.output_dir = {folder!r}"]:
            command += ["--gin-bindings", binding]
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ})
        if done.returncode:
            raise SystemExit(f"{num_ranks} ranks ended with {done.returncode}")
        return json.loads(result.read_text())


def summary(measured: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """By number of ranks and pipeline type: medians over rounds, with the extremes; ratios are of the same round."""
    rounds = {
        ranks: {kind: [Round(**entry) for entry in own] for kind, own in result["rounds"].items()}
        for ranks, result in measured.items()
    }
    fewest = min(rounds)
    report: dict[str, Any] = {}
    for ranks, by_type in rounds.items():
        own: dict[str, Any] = {}
        for kind, entries in by_type.items():
            speeds = [entry.tokens_per_s for entry in entries]
            step_ms = [1e3 * statistics.median(entry.seconds) for entry in entries]
            alone = statistics.median(entry.tokens_per_s for entry in rounds[fewest][kind])
            own[kind] = {
                "step_ms": spread(step_ms),
                "tokens_per_s": spread(speeds),
                "tokens_per_s_over_none": statistics.median(
                    mine.tokens_per_s / none.tokens_per_s for mine, none in zip(entries, by_type["none"], strict=True)
                ),
                "weak_scaling_efficiency": statistics.median(speeds) / alone * fewest / ranks,
            }
        report[f"{ranks} ranks" if ranks > 1 else "1 rank"] = own
    return report


def main() -> int:
    """Time, print and write the result."""
    args = _parser().parse_args()
    args.gin_config_file = args.gin_config_file or ["benchmark_ranking.gin"]
    if args.worker is not None:
        work(args)
        return 0
    measured = {ranks: on_ranks(ranks, args) for ranks in args.ranks}
    settings = {str(ranks): result["setting"] for ranks, result in measured.items()}
    report = {
        **header(
            "training on several ranks", "torchrec", "fbgemm-gpu", "triton", "transformer-engine", device=device(args)
        ),
        "gin_config_file": args.gin_config_file,
        "gin_bindings": args.gin_bindings,
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "setting_by_ranks": settings,
        "results": summary(measured),
    }
    print(json.dumps(report["results"], indent=1))
    write(report, args.output)
    return 0


def device(args: argparse.Namespace) -> str:
    """The processor's name where the configuration asks for it; "" for the GPU, if there is one."""
    config = load_experiment("ranking", gin_files=args.gin_config_file, gin_bindings=args.gin_bindings)
    return cpu() if config.trainer.device == "cpu" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time training steps on several ranks.")
    parser.add_argument("--gin-config-file", action="append", metavar="FILE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="steps of a pipeline type in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps at the start of a round that are not counted")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    add_gin_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
