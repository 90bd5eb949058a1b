"""HSTU attention on a GPU: ours beside FBGEMM's CUTLASS kernels in one process, ratios first.

    python benchmarks/attention.py [--peer LIBRARY --peer-runtime LIBCUDART] [--dims 64 128 256] [--output FILE]

Shapes: full causal sequences of 512 to 8192 tokens, and jagged ones (lengths log-uniform, which is Zipf's law of
exponent 1) with contexts and targets, under the mask that the peer has (contexts see the history). Ours is what the
layer calls, autograd and launches included, on slices of one fused projection; the peer's operators are called
directly, on contiguous tensors. Contenders alternate in every round; a result is the median over rounds, and no time is
reported unless both agree. FLOPs: 4 d for every pair of tokens that see each other, forward; 2.5 times that, backward.

--peer: fbgemm_gpu_experimental_hstu.so of a fbgemm-gpu-hstu wheel; --peer-runtime: the libcudart.so.12 that it needs.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from genrec.hstu.attention import hstu_attention
from reporting import RESULTS, header, write
from timing import time_ms

FULL_LENGTHS = (512, 1024, 2048, 4096, 8192)
DIRECTIONS = ("forward", "backward", "both")
FLOP_FACTOR = {"forward": 1.0, "backward": 2.5, "both": 3.5}
# Of the norm; bfloat16 rounds by 0.002 and both sides round several times.
TOLERANCE = 0.02
RESULT = RESULTS / "attention.json"


@dataclass(frozen=True)
class Case:
    """Users' lengths, all of whose users have this many contexts and targets (within those lengths)."""

    name: str
    lengths: tuple[int, ...]
    dim: int
    num_heads: int
    num_contexts: int = 0
    num_targets: int = 0

    @property
    def num_pairs(self) -> int:
        """Pairs of tokens that see each other, a head."""
        total = 0
        for length in self.lengths:
            c, end = self.num_contexts, length - self.num_targets
            total += c * end + (end * (end + 1) - c * (c + 1)) // 2 + self.num_targets * (end + 1)
        return total

    def flops(self, direction: str) -> float:
        """What the mathematics needs."""
        return FLOP_FACTOR[direction] * 4 * self.dim * self.num_heads * self.num_pairs


def make_cases(args: argparse.Namespace) -> list[Case]:
    """All shapes, for all widths."""
    cases = []
    for dim in args.dims:
        for length in args.lengths:
            cases.append(Case(f"full {length}", (length,) * args.batch_size, dim, args.num_heads))
        for name, users, shortest, longest in (("long", 32, 128, 8192), ("short", 512, 40, 700)):
            places = torch.rand(users, generator=torch.Generator().manual_seed(0)).tolist()
            lengths = tuple(round(shortest * (longest / shortest) ** place) for place in places)
            cases.append(Case(f"jagged {name}", lengths, dim, args.num_heads, num_contexts=2, num_targets=20))
    return cases


@dataclass(frozen=True)
class Inputs:
    """A case's tensors. ``fused``: u | v | q | k of every token."""

    case: Case
    fused: Tensor
    grad: Tensor
    offsets: Tensor
    num_contexts: Tensor | None
    num_targets: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slices of the fused projection."""
        heads = (-1, self.case.num_heads, self.case.dim)
        _, v, q, k = (part.view(heads) for part in self.fused.chunk(4, dim=1))
        return q, k, v


def draw(case: Case, dtype: torch.dtype) -> Inputs:
    """Normal numbers: zeros would cost less power, so run faster."""
    rows, width = sum(case.lengths), case.num_heads * case.dim
    generator = torch.Generator("cuda").manual_seed(0)
    users = len(case.lengths)
    return Inputs(
        case=case,
        fused=torch.randn(rows, 4 * width, device="cuda", dtype=dtype, generator=generator),
        grad=torch.randn(rows, case.num_heads, case.dim, device="cuda", dtype=dtype, generator=generator),
        offsets=torch.tensor([0, *itertools.accumulate(case.lengths)], device="cuda"),
        num_contexts=torch.full((users,), case.num_contexts, device="cuda") if case.num_contexts else None,
        num_targets=torch.full((users,), case.num_targets, device="cuda") if case.num_targets else None,
    )


Contender = dict[str, Callable[[], tuple[Tensor, ...]]]


def ours(inputs: Inputs, backend: str = "triton") -> Contender:
    """By direction; gradients are of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in inputs.qkv)
    longest = max(inputs.case.lengths)

    def forward() -> Tensor:
        return hstu_attention(
            q,
            k,
            v,
            offsets=inputs.offsets,
            max_seqlen=longest,
            scaling_seqlen=longest,
            num_contexts=inputs.num_contexts,
            num_targets=inputs.num_targets,
            contextual_mask="history",
            backend=backend,
        )

    output = forward()

    def forward_only() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (forward(),)

    return {
        "forward": forward_only,
        "backward": lambda: torch.autograd.grad(output, (q, k, v), inputs.grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(forward(), (q, k, v), inputs.grad),
    }


def load_peer(library: Path, runtime: Path | None) -> None:
    """Register torch.ops.fbgemm.hstu_varlen_fwd_90 and hstu_varlen_bwd_90."""
    if runtime is not None:
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))


def peer(inputs: Inputs) -> Contender:
    """FBGEMM's CUTLASS kernels for Hopper, which divide by the longest length."""
    q, k, v = (x.contiguous() for x in inputs.qkv)
    longest, alpha = max(inputs.case.lengths), 1 / math.sqrt(inputs.case.dim)
    offsets = inputs.offsets.int()
    contexts, targets = (None if x is None else x.int() for x in (inputs.num_contexts, inputs.num_targets))
    batch = (offsets, offsets, longest, longest, contexts, targets, 1)
    ops = torch.ops.fbgemm

    def forward() -> tuple[Tensor, ...]:
        result = ops.hstu_varlen_fwd_90(
            q, k, v, *batch, window_size_left=-1, window_size_right=0, alpha=alpha, rab=None, is_delta_q=False,
            descale_q=None, descale_k=None, descale_v=None,
        )  # fmt: skip
        return (result,) if isinstance(result, Tensor) else tuple(result[:1])

    def backward() -> tuple[Tensor, ...]:
        return tuple(ops.hstu_varlen_bwd_90(inputs.grad, q, k, v, *batch, -1, 0, alpha, None, False, False, False)[:3])

    def both() -> tuple[Tensor, ...]:
        forward()
        return backward()

    return {"forward": forward, "backward": backward, "both": both}


def check_agreement(first: Contender, second: Contender) -> float:
    """The largest relative difference of output and gradients; raises where it is more than rounding."""
    worst = 0.0
    for direction in ("forward", "backward"):
        for a, b in zip(first[direction](), second[direction](), strict=True):
            worst = max(worst, float((a.float() - b.float()).norm() / b.float().norm()))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"contenders differ by {worst:.4f} of the norm: times would mean nothing")
    return worst


def measure(contenders: dict[str, Contender], case: Case, *, rounds: int, round_ms: float) -> dict[str, Any]:
    """By direction: ratios, then milliseconds (median, least, most) and TFLOP/s of each contender."""
    results: dict[str, Any] = {}
    for direction in DIRECTIONS:
        calls = {}
        for name, contender in contenders.items():
            time_ms(contender[direction], calls=3)
            calls[name] = max(1, min(200, round(round_ms / time_ms(contender[direction], calls=3))))
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, contender in contenders.items():
                times[name].append(time_ms(contender[direction], calls=calls[name]))
        medians = {name: statistics.median(values) for name, values in times.items()}
        results[direction] = {f"ratio to {name}": medians[name] / medians["ours"] for name in medians if name != "ours"}
        for name, values in times.items():
            teraflops = case.flops(direction) / medians[name] / 1e9
            results[direction][name] = {
                "ms": medians[name], "least": min(values), "most": max(values), "tflops": teraflops,
            }  # fmt: skip
    return results


def matmul_tflops(dtype: torch.dtype) -> float:
    """What this card's dense products reach, 8192 cubed."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    time_ms(lambda: a @ b, calls=10)
    return 2 * 8192**3 / statistics.median(time_ms(lambda: a @ b, calls=20) for _ in range(5)) / 1e9


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="fbgemm_gpu_experimental_hstu.so")
    parser.add_argument("--peer-runtime", type=Path, help="libcudart.so.12")
    parser.add_argument("--lengths", type=int, nargs="*", default=FULL_LENGTHS)
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128, 256))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=30.0, help="how long a contender runs in each round")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> int:
    """Measure, print as it goes, write."""
    args = parse()
    if args.peer is not None:
        load_peer(args.peer, args.peer_runtime)
    dtype = getattr(torch, args.dtype)
    ceiling = matmul_tflops(dtype)
    report: dict[str, Any] = {
        **header("HSTU attention", "triton"),
        "peer": None if args.peer is None else "FBGEMM CUTLASS (hstu_varlen_*_90)",
        "dtype": args.dtype,
        "rounds": args.rounds,
        "matmul_tflops": ceiling,
        "results": [],
    }
    print(f"{report['device']}, dense products: {ceiling:.0f} TFLOP/s")
    for case in make_cases(args):
        inputs = draw(case, dtype)
        contenders = {"ours": ours(inputs)}
        entry: dict[str, Any] = {"case": case.name, "dim": case.dim, "num_heads": case.num_heads}
        if args.peer is not None:
            contenders["peer"] = peer(inputs)
            entry["difference"] = check_agreement(contenders["ours"], contenders["peer"])
        entry |= {"num_users": len(case.lengths), "num_tokens": sum(case.lengths)}
        entry |= measure(contenders, case, rounds=args.rounds, round_ms=args.round_ms)
        report["results"].append(entry)
        print(_line(entry, ceiling), flush=True)
        write(report, args.output)
    plot(report, args.output.with_suffix(".png"))
    return 0


def plot(report: dict[str, Any], path: Path) -> None:
    """A heat map of ratios to the peer, or of shares of the card's dense products where there is no peer."""
    has_peer = report["peer"] is not None
    names = list(dict.fromkeys(entry["case"] for entry in report["results"]))
    dims = list(dict.fromkeys(entry["dim"] for entry in report["results"]))
    figure = Figure(figsize=(14, 1.5 + 0.6 * len(names)), layout="constrained")
    for axes, direction in zip(figure.subplots(1, len(DIRECTIONS)), DIRECTIONS, strict=True):
        grid = [[math.nan] * len(dims) for _ in names]
        for entry in report["results"]:
            result = entry[direction]
            value = result["ratio to peer"] if has_peer else result["ours"]["tflops"] / report["matmul_tflops"]
            row, column = names.index(entry["case"]), dims.index(entry["dim"])
            grid[row][column] = value
            axes.text(column, row, f"{value:.2f}", ha="center", va="center")
        axes.imshow(grid, cmap="RdYlGn", vmin=0.5 if has_peer else 0.0, vmax=1.5 if has_peer else 1.0, aspect="auto")
        axes.set_title(f"{direction}: {'times as fast as the peer' if has_peer else 'share of dense products'}")
        axes.set_xticks(range(len(dims)), [f"d = {dim}" for dim in dims])
        axes.set_yticks(range(len(names)), names)
    figure.suptitle(f"{report['benchmark']}, {report['dtype']}, {report['device']}, {report['date']}")
    figure.savefig(path, dpi=100)


def _line(entry: dict[str, Any], ceiling: float) -> str:
    parts = [f"{entry['case']:<13} d={entry['dim']:<4}"]
    for direction in DIRECTIONS:
        result = entry[direction]
        ratio = f"{result['ratio to peer']:.2f}x " if "ratio to peer" in result else ""
        tflops = result["ours"]["tflops"]
        parts.append(f"{direction} {ratio}{result['ours']['ms']:.3f} ms {tflops:.0f} TFLOP/s ({tflops / ceiling:.0%})")
    return " | ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
