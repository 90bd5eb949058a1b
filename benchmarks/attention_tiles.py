"""Which tiles are the fastest on this GPU: a file for TrainerArgs.attention_tiles, and what tuning.py is filled from.

    python benchmarks/attention_tiles.py [--dims 64 128 256] [--kernels forward key_grad query_grad] [--output FILE]
    python benchmarks/attention_tiles.py --length 230 --batch-size 512 ...    tiles for users with few tokens

Of the Triton kernels alone. On Hopper GPUs those in Gluon serve widths of 64 to 256 where they can; a file can have
their tables too (``hopper_forward`` and others), but this doesn't look for the best.

Every candidate of the three attention kernels is compiled by a pool of processes, which fill Triton's cache, and then
timed here: full causal bfloat16 sequences, random numbers, medians. Candidates that don't fit are left out with their
error. The file's tables have the best of each kernel, all three of a width with one way to compute tanh and to load;
"fused" is timed and left out of them, since no two runs with it are the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genrec.hstu.attention import hopper_backward, hopper_forward, launch
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.request import SHORT, Request
from genrec.hstu.attention.tuning import HALF_PRECISION_TILES, KernelTile, Tiles
from reporting import RESULTS, header, write
from timing import time_ms

# "fused": key_grad's kernel doing query_grad's work too.
KERNELS = ("forward", "key_grad", "query_grad", "fused")
# Ways to compute tanh, and whether tiles are loaded by TMA.
VARIANTS = (("approx", False), ("approx", True), ("approx_pair", True))
RESULT = RESULTS / "attention_tiles.json"
# Of the norm: bfloat16, summed in another order.
TOLERANCE = 0.01
# Shared memory of a Hopper block.
MAX_BYTES = 227 * 1024


def candidates(kernel: str, dim: int) -> Iterator[Tiles]:
    """Tiles that could fit, with one kernel's changed and those of the table for the others."""
    table = HALF_PRECISION_TILES[dim]
    keeps_keys = kernel in ("key_grad", "fused")
    rows_of = (16, 32, 64, 128) if keeps_keys else (64, 128)
    keys_of = (64, 128) if keeps_keys else (32, 64, 128)
    field = "key_grad" if kernel == "fused" else kernel
    for rows, keys, warps, stages, (tanh, tma) in itertools.product(rows_of, keys_of, (4, 8), (2, 3, 4), VARIANTS):
        kept, streamed = (keys, rows) if keeps_keys else (rows, keys)
        if warps == 8 and kept == 64 and dim < 256:
            continue  # a warp group takes 64 rows
        size = 2 * dim * (kept * (1 if kernel == "forward" else 2) + 2 * streamed * (stages - 1))
        if size > MAX_BYTES or streamed * (stages - 1) > 256:
            continue
        changes: dict[str, Any] = {field: KernelTile(rows, keys, warps, stages), "tanh": tanh, "tma": tma}
        changes["fused"] = kernel == "fused"
        yield dataclasses.replace(table, **changes)


class Problem:
    """Full causal sequences, and the two launches."""

    def __init__(self, *, batch_size: int, length: int, dim: int, num_heads: int = 4) -> None:
        rows, width = batch_size * length, num_heads * dim
        fused = torch.randn(rows, 4 * width, device="cuda", dtype=torch.bfloat16)
        _, v, q, k = (part.view(-1, num_heads, dim) for part in fused.chunk(4, dim=1))
        self.inputs = (q, k, v)
        self.grad = torch.randn(rows, num_heads, dim, device="cuda", dtype=torch.bfloat16)
        self.request = Request(
            offsets=torch.arange(batch_size + 1, device="cuda") * length,
            num_contexts=None,
            num_targets=None,
            scaling_seqlen=length,
            alpha=dim**-0.5,
            rules=MaskRules(),
            bias=None,
        )
        self.flops = 2 * batch_size * num_heads * length**2 * dim
        self.schedule: Tensor | None = None

    def forward(self, tiles: Tiles) -> Tensor:
        """The output; keeps the schedule."""
        output, self.schedule = launch.forward(*self.inputs, self.request, tiles)
        return output

    def backward(self, tiles: Tiles) -> Tensor:
        """All gradients."""
        assert self.schedule is not None
        return launch.backward(self.grad, *self.inputs, self.schedule, self.request, tiles)[0]


def keep_to_triton() -> None:
    """Let no other kernels serve in this process: candidates would all be timed alike."""
    for module in (hopper_forward, hopper_backward):
        setattr(module, "why_not", lambda *_: "the Triton kernels are wanted")  # noqa: B010


def compile_one(kernel: str, dim: int, tiles: Tiles) -> str:
    """What is wrong with it; empty if it runs and is right. In a process of its own."""
    keep_to_triton()
    try:
        # As wide a step between rows as the timed problem has, and few rows, the last tile of them incomplete.
        problem, table = Problem(batch_size=1, length=300, dim=dim), HALF_PRECISION_TILES[dim]
        right = problem.forward(table)
        got = problem.forward(tiles) if kernel == "forward" else right
        if kernel != "forward":
            right, got = problem.backward(table), problem.backward(tiles)
        difference = float((got.float() - right.float()).norm() / right.float().norm())
    except Exception as error:  # noqa: BLE001, what it raises is the result
        return str(error).strip().splitlines()[0][:160] or type(error).__name__
    return "" if difference < TOLERANCE else f"differs from the table's by {difference:.3f} of the norm"


def median_ms(function: Callable[[], object], *, repeats: int = 7) -> float:
    """Of single calls, after two to warm up."""
    time_ms(function, calls=2)
    return statistics.median(time_ms(function, calls=1) for _ in range(repeats))


def best_tiles(results: list[dict[str, Any]]) -> dict[str, Any]:
    """By width, the fields of the fastest :class:`Tiles`; without widths of which a kernel was not timed."""
    timed = sorted((entry for entry in results if "ms" in entry), key=lambda entry: entry["ms"])
    table = {}
    for dim in sorted({entry["dim"] for entry in timed}):
        choices = [_best_with(timed, dim, tanh, tma) for tanh, tma in VARIANTS]
        whole = [choice for choice in choices if choice is not None]
        if whole:
            table[str(dim)] = min(whole, key=lambda choice: choice[0])[1]
    return table


def _best_with(timed: list[dict[str, Any]], dim: int, tanh: str, tma: bool) -> tuple[float, dict[str, Any]] | None:
    """Milliseconds and fields of the fastest of each kernel; ``timed`` is in order of time."""
    total, tiles = 0.0, {}
    for kernel in ("forward", "key_grad", "query_grad"):
        wanted = {"kernel": kernel, "dim": dim, "tanh": tanh, "tma": tma}
        entry = next((entry for entry in timed if entry.items() >= wanted.items()), None)
        if entry is None:
            return None
        total += entry["ms"]
        tiles[kernel] = {field.name: entry[field.name] for field in dataclasses.fields(KernelTile)}
    return total, {**tiles, "tanh": tanh, "tma": tma, "fused": False}


def main() -> int:
    """Compile, time, print the best of each, write all."""
    parser = argparse.ArgumentParser(description="Times the tiles of the attention kernels.")
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128, 256))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    jobs = [(kernel, dim, tiles) for dim in args.dims for kernel in args.kernels for tiles in candidates(kernel, dim)]
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        errors = list(pool.map(compile_one, *zip(*jobs, strict=True)))
    print(f"{len(jobs)} candidates compiled in {time.perf_counter() - start:.0f} s")
    keep_to_triton()
    results: list[dict[str, Any]] = []
    for dim in args.dims:
        problem = Problem(batch_size=args.batch_size, length=args.length, dim=dim)
        problem.forward(HALF_PRECISION_TILES[dim])
        for kernel in args.kernels:
            timed = []
            for (job_kernel, job_dim, tiles), error in zip(jobs, errors, strict=True):
                if (job_kernel, job_dim) != (kernel, dim):
                    continue
                entry = {"kernel": kernel, "dim": dim, "tanh": tiles.tanh, "tma": tiles.tma}
                entry |= vars(tiles.key_grad if kernel == "fused" else getattr(tiles, kernel))
                if not error:
                    function = problem.forward if kernel == "forward" else problem.backward
                    # For a backward kernel, the time of both: the other one is the table's all along.
                    entry["ms"] = median_ms(functools.partial(function, tiles))
                    timed.append(entry)
                results.append(entry | ({"error": error} if error else {}))
            for entry in sorted(timed, key=lambda entry: entry["ms"])[:5]:
                factor = 1.0 if kernel == "forward" else 2.5
                print(entry, f"{factor * problem.flops / entry['ms'] / 1e9:.0f} TFLOP/s", flush=True)
        report = {
            **header("tiles of the attention kernels", "triton"),
            "length": args.length,
            "batch_size": args.batch_size,
            "tables": {"triton_short" if args.length < SHORT else "triton": best_tiles(results)},
            "results": sorted(
                results, key=lambda entry: (entry["dim"], entry["kernel"], entry.get("ms", float("inf")))
            ),
        }
        write(report, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
