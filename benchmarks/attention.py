"""HSTU attention on a GPU: ours beside FBGEMM's CUTLASS kernels in one process, ratios first.

    python benchmarks/attention.py [--peer LIBRARY --peer-runtime LIBCUDART] [--fp8 MODE ...] [--dims 64 128 256]
        [--lengths 512 1024 2048 4096 8192] [--keep-cache] [--output FILE]

Shapes: full causal sequences, and jagged ones with contexts and targets, under the mask that the peer has (contexts see
the history). Ours is what the layer calls, autograd and launches included, on slices of one fused projection, in
bfloat16 and in each FP8 mode, quantization included. The peer's operators are called directly, on contiguous tensors;
its FP8 has a forward alone, and gets numbers that were quantized before. Contenders alternate in every round; a result
is the median over rounds, and no time is reported unless outputs and gradients agree. FLOPs: 4 d for every pair of
tokens that see each other, forward; 2.5 times that, backward. Shares are of the card's dense products, measured here:
of FP8 ones for an FP8 mode, although backward of per-block and 1xdim has products that are not.

--peer: fbgemm_gpu_experimental_hstu.so of a fbgemm-gpu-hstu wheel; --peer-runtime: the libcudart.so.12 that it needs.
--keep-cache: take Triton's cache as it is, and report no compile times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_cases import DIRECTIONS, FULL_LENGTHS, Case, Contender, Inputs, draw, make_cases, ours
from attention_compile import compile_times
from attention_peer import NAME, load_peer, peer, peer_fp8
from attention_plot import plot
from genrec.configs.schema import ATTENTION_QUANTIZATIONS
from reporting import RESULTS, header, write
from timing import time_ms

# Of the norm. bfloat16 rounds by 0.002 and both sides round several times; e4m3 by 0.03, in four operands.
TOLERANCE, FP8_TOLERANCE = 0.02, 0.15
RESULT = RESULTS / "attention.json"
PEER_FP8 = "peer fp8"


def check_agreement(first: Contender, second: Contender, tolerance: float = TOLERANCE) -> float:
    """The largest relative difference of output and gradients; raises where it is more than rounding."""
    worst = 0.0
    for direction in [name for name in ("forward", "backward") if name in first and name in second]:
        for a, b in zip(first[direction](), second[direction](), strict=True):
            worst = max(worst, float((a.float() - b.float()).norm() / b.float().norm()))
    if not worst <= tolerance:
        raise RuntimeError(f"contenders differ by {worst:.4f} of the norm: times would mean nothing")
    return worst


# By name, who is compared: its value is how many times as fast the first is as the second.
Ratios = dict[str, tuple[str, str]]


def measure(
    contenders: dict[str, Contender], case: Case, *, rounds: int, round_ms: float, ratios: Ratios | None = None
) -> dict[str, Any]:
    """By direction: ratios (of "ours" to all others), then milliseconds (median, least, most), TFLOP/s of each."""
    if ratios is None:
        ratios = {f"ratio to {name}": ("ours", name) for name in contenders if name != "ours"}
    results: dict[str, Any] = {}
    for direction in DIRECTIONS:
        calls = {name: contender[direction] for name, contender in contenders.items() if direction in contender}
        counts = {}
        for name, call in calls.items():
            time_ms(call, calls=3)
            counts[name] = max(1, min(200, round(round_ms / time_ms(call, calls=3))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(time_ms(call, calls=counts[name]))
        medians = {name: statistics.median(values) for name, values in times.items()}
        results[direction] = {
            name: medians[slow] / medians[fast]
            for name, (fast, slow) in ratios.items()
            if fast in medians and slow in medians
        }
        for name, values in times.items():
            results[direction][name] = {
                "ms": medians[name],
                "least": min(values),
                "most": max(values),
                "tflops": case.flops(direction) / medians[name] / 1e9,
            }
    return results


def make_contenders(inputs: Inputs, modes: list[str], *, has_peer: bool) -> tuple[dict[str, Contender], dict[str, Any]]:
    """All that can be compared by name, and their differences: from the peer, of FP8 from our own bfloat16."""
    contenders = {"ours": ours(inputs)}
    differences: dict[str, Any] = {}
    if has_peer:
        contenders["peer"] = peer(inputs)
        differences["peer"] = check_agreement(contenders["ours"], contenders["peer"])
    for mode in modes:
        contenders[mode] = ours(inputs, quantization=mode)
        differences[mode] = check_agreement(contenders[mode], contenders["ours"], FP8_TOLERANCE)
    if modes and has_peer:
        theirs = peer_fp8(inputs)
        try:
            differences[PEER_FP8] = check_agreement(theirs, contenders["ours"], FP8_TOLERANCE)
            contenders[PEER_FP8] = theirs
        except RuntimeError as error:  # not every build has every width in FP8
            differences[PEER_FP8] = f"left out: {str(error).splitlines()[0]}"
    return contenders, differences


def compare(modes: list[str]) -> Ratios:
    """Ours and the peer in bfloat16; FP8 and our bfloat16; FP8 and the peer's, which is given quantized numbers."""
    ratios = {"ratio to peer": ("ours", "peer")}
    for mode in modes:
        ratios |= {f"{mode} to bf16": (mode, "ours"), f"{mode} to {PEER_FP8}": (mode, PEER_FP8)}
    return ratios


def matmul_tflops(dtype: torch.dtype) -> float:
    """What this card's dense products reach, 8192 cubed; FP8 with a scale a tensor and fast accumulation."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> Tensor:
        if dtype != torch.float8_e4m3fn:
            return a @ b
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    time_ms(product, calls=10)
    return 2 * 8192**3 / statistics.median(time_ms(product, calls=20) for _ in range(5)) / 1e9


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="fbgemm_gpu_experimental_hstu.so")
    parser.add_argument("--peer-runtime", type=Path, help="libcudart.so.12")
    parser.add_argument("--fp8", nargs="*", default=["per-head"], choices=ATTENTION_QUANTIZATIONS[1:], metavar="MODE")
    parser.add_argument("--lengths", type=int, nargs="*", default=FULL_LENGTHS)
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128, 256))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=30.0, help="how long a contender runs in each round")
    parser.add_argument("--keep-cache", action="store_true", help="take Triton's cache as it is")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> int:
    """Compile, measure, print as it goes, write."""
    args = parse()
    if args.keep_cache:
        return run(args)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # processes inherit it
        return run(args)


def run(args: argparse.Namespace) -> int:
    """The benchmark itself."""
    if args.peer is not None:
        load_peer(args.peer, args.peer_runtime)
    dtype = getattr(torch, args.dtype)
    cases = list(make_cases(dims=args.dims, lengths=args.lengths, batch_size=args.batch_size, num_heads=args.num_heads))
    report: dict[str, Any] = {
        **header("HSTU attention", "triton"),
        "peer": None if args.peer is None else NAME,
        "dtype": args.dtype,
        "fp8": args.fp8,
        "rounds": args.rounds,
        "matmul_tflops": matmul_tflops(dtype),
        "fp8_matmul_tflops": matmul_tflops(torch.float8_e4m3fn) if args.fp8 else None,
        "compile": [],
        "results": [],
    }
    products = {name: report[name] for name in ("matmul_tflops", "fp8_matmul_tflops") if report[name]}
    print(report["device"], *(f"{name} {value:.0f}" for name, value in products.items()))
    if not args.keep_cache:
        start = time.perf_counter()
        report["compile"] = compile_times(cases, ["bf16", *args.fp8], dtype, processes=args.processes)
        slowest = max(entry["forward_s"] + entry["backward_s"] for entry in report["compile"])
        print(f"compiled in {time.perf_counter() - start:.0f} s, a configuration in at most {slowest:.0f} s")
    for case in cases:
        contenders, differences = make_contenders(draw(case, dtype), args.fp8, has_peer=args.peer is not None)
        entry = {"case": case.name, "dim": case.dim, "num_heads": case.num_heads, "difference": differences}
        entry |= {"num_users": len(case.lengths), "num_tokens": sum(case.lengths)}
        entry |= measure(contenders, case, rounds=args.rounds, round_ms=args.round_ms, ratios=compare(args.fp8))
        add_shares(entry, report)
        report["results"].append(entry)
        print(line(entry), flush=True)
        write(report, args.output)
    plot(report, args.output.with_suffix(".png"))
    return 0


def add_shares(entry: dict[str, Any], report: dict[str, Any]) -> None:
    """What each contender reaches of the card's dense products."""
    for direction in DIRECTIONS:
        for name, result in entry[direction].items():
            if isinstance(result, dict):
                is_fp8 = name in (*report["fp8"], PEER_FP8)
                result["share"] = result["tflops"] / report["fp8_matmul_tflops" if is_fp8 else "matmul_tflops"]


def line(entry: dict[str, Any]) -> str:
    """One case: by direction, ratios and what ours takes in bfloat16."""
    parts = [f"{entry['case']:<12} d={entry['dim']:<3}"]
    for direction in DIRECTIONS:
        result = entry[direction]
        ratios = " ".join(
            f"{name.removeprefix('ratio ')} {value:.2f}x" for name, value in result.items() if isinstance(value, float)
        )
        own = result["ours"]
        parts.append(f"{direction} {ratios} {own['ms']:.3f} ms {own['tflops']:.0f} TFLOP/s ({own['share']:.0%})")
    return " | ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
