"""Dense weights whole on every rank (DDP) or in parts (FSDP2): the losses of both, and memory and time of a step.

    torchrun --nproc_per_node 2 benchmarks/dense_parallel.py [--gin-bindings "NetworkArgs.hidden_size = 2048"]

Both train the same model on the same synthetic batches through the trainer's own step, one after the other in the same
processes, in float32, bfloat16 and with FP8 linears. A rank's share of a sum of gradients is rounded otherwise under
FSDP2, which float32 shows in its last digits and the others in theirs. Exits with 1 where losses differ by more than
that, so that it is a test too: on GPUs (NCCL), and on a CPU (gloo, FP8 emulated) with ``--gin-bindings`` for smaller
dimensions.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ExperimentConfig
from genrec.training.console import setup_logging
from genrec.training.loop import grouped
from genrec.training.process_group import is_main_process, process_group
from genrec.training.ranks import Ranks
from genrec.training.run import Run
from reporting import RESULTS, header, write

KINDS = ("ddp", "fsdp2")
FP8 = ("MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",)
PRECISIONS = {
    "float32": ("NetworkArgs.dtype_str = 'float32'",),
    "bfloat16": (),
    "fp8 tensorwise": (*FP8, "MixedPrecisionArgs.linear_recipe = 'tensorwise'"),
    "fp8 delayed": (*FP8, "MixedPrecisionArgs.linear_recipe = 'delayed'", "MixedPrecisionArgs.amax_history_len = 16"),
}
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "fp8 tensorwise": 2e-2, "fp8 delayed": 2e-2}  # of a loss, relative
SETTING = (
    "TrainerArgs.train_batch_size = 16",
    "TrainerArgs.max_train_iters = 1000000",
    "NetworkArgs.num_layers = 8",
    "NetworkArgs.hidden_size = 1024",
    "NetworkArgs.num_attention_heads = 4",
    "NetworkArgs.kv_channels = 256",
    "NetworkArgs.dtype_str = 'bfloat16'",
    "NetworkArgs.hidden_dropout = 0.0",
)
WARMUP = 5  # steps that are not timed


@dataclass(frozen=True)
class Outcome:
    """What one kind did in one precision. peak_gib: the largest of the ranks, None on a CPU."""

    losses: list[float]
    step_ms: float
    peak_gib: float | None


def main() -> int:
    """Train, print, write; 1 where the losses of the two kinds differ."""
    args = _parser().parse_args()
    setup_logging(is_main=False)
    outcomes: dict[str, dict[str, Outcome]] = {}
    with process_group("auto") as ranks:
        backend = () if ranks.device.type == "cuda" else ("MixedPrecisionArgs.backend = 'emulated'",)
        for precision in args.precisions:
            outcomes[precision] = {}
            for kind in KINDS:
                kinds = (f"TrainerArgs.dense_parallel = {kind!r}", *PRECISIONS[precision], *backend)
                config = load_experiment(
                    "ranking", gin_files=["debug_synthetic.gin"], gin_bindings=(*SETTING, *kinds, *args.gin_bindings)
                )
                outcomes[precision][kind] = train(config, ranks, num_steps=args.steps)
    differences = {name: _difference(own) for name, own in outcomes.items()}
    if is_main_process():
        results = {
            name: {"difference": differences[name], **{kind: asdict(o) for kind, o in own.items()}}
            for name, own in outcomes.items()
        }
        print(_table(outcomes, differences))
        setting = {"ranks": ranks.world_size, "bindings": [*SETTING, *args.gin_bindings]}
        write(
            {**header("dense parallelism", "transformer-engine"), "setting": setting, "results": results}, args.output
        )
    wrong = [name for name, difference in differences.items() if not difference <= TOLERANCES[name]]
    if wrong:
        print(f"error: the losses of DDP and FSDP2 differ in {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def train(config: ExperimentConfig, ranks: Ranks, *, num_steps: int) -> Outcome:
    """Train ``num_steps`` steps from the first weights."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = Run(config, ranks=ranks)
    run.place()
    step = run.train_step(total_steps=num_steps)
    run.model.train()
    losses, seconds = [], []
    for number, batches in zip(range(1, num_steps + 1), grouped(run.loader, 1), strict=False):
        start = time.perf_counter()
        result = step(batches, step=number)  # ends when the device has: its loss is read
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss_sum / max(result.num_targets, 1))
    peak = torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else None
    peaks = [value for value in ranks.gather(peak) if value is not None]
    return Outcome(losses, 1e3 * statistics.median(seconds[WARMUP:]), max(peaks, default=None))


def _difference(own: dict[str, Outcome]) -> float:
    pairs = zip(*(own[kind].losses for kind in KINDS), strict=True)
    differences = [abs(fsdp2 / ddp - 1) for ddp, fsdp2 in pairs]
    return max(differences) if all(difference == difference for difference in differences) else float("nan")


def _table(outcomes: dict[str, dict[str, Outcome]], differences: dict[str, float]) -> str:
    rows = [f"{'precision':16}{'kind':8}{'last loss':>12}{'ms a step':>12}{'peak GiB':>10}{'losses differ by':>18}"]
    for name, own in outcomes.items():
        for kind, outcome in own.items():
            peak = "" if outcome.peak_gib is None else f"{outcome.peak_gib:.2f}"
            last = f"{differences[name]:.1e}" if kind == KINDS[-1] else ""
            rows.append(f"{name:16}{kind:8}{outcome.losses[-1]:12.6f}{outcome.step_ms:12.2f}{peak:>10}{last:>18}")
    return "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="DDP beside FSDP2, on the ranks of torchrun.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=tuple(PRECISIONS))
    parser.add_argument("--gin-bindings", action="append", default=[], metavar="BINDING")
    parser.add_argument("--output", type=Path, default=RESULTS / "dense_parallel.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
