"""Where FP8 linears pay: the two linears of an HSTU layer, forward and backward, by width, tokens and recipe.

    python benchmarks/linear.py [--widths 128 256 512 1024 2048] [--tokens 1024 ... 131072] [--output FILE]

The linears are genrec's own, width -> 4 x width with a bias (u, v, q, k) and width -> width without (output), with
bfloat16 activations and float32 weights; casts, quantization and host overhead included, as in training. All variants
are timed in one process, in turns, by CUDA events around rounds of as many passes as take some milliseconds. Writes
JSON and a picture of the speed over bfloat16's, and prints for each width the tokens from which a recipe pays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.linear import make_linear
from genrec.hstu.precision.capability import linear_capabilities
from genrec.hstu.precision.region import fp8_region
from reporting import RESULTS, header, spread, write
from timing import time_ms

BASE = "bf16"
WIDTHS = (128, 256, 512, 1024, 2048)
TOKENS = (1024, 4096, 16384, 65536, 131072)


class Pair(nn.Module):
    """The linears of a layer, without what lies between them."""

    def __init__(self, width: int, precision: MixedPrecisionArgs | None) -> None:
        super().__init__()
        self.uvqk = make_linear(width, 4 * width, bias=True, precision=precision)
        self.output = make_linear(width, width, bias=False, precision=precision)

    def forward(self, x: Tensor, gated: Tensor) -> tuple[Tensor, Tensor]:
        """x, gated: (T, width)."""
        with fp8_region():
            return self.uvqk(x), self.output(gated)


def passes(recipe: str, width: int, tokens: int) -> Callable[[], None]:
    """A forward and backward of the pair, ready to run."""
    precision = None if recipe == BASE else MixedPrecisionArgs(mixed_precision_dtype="fp8", linear_recipe=recipe)
    torch.manual_seed(0)
    pair = Pair(width, precision).cuda()
    x, gated, d_output = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    d_uvqk = torch.randn(tokens, 4 * width, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    gated.requires_grad_()
    inputs = [x, gated, *pair.parameters()]

    def run() -> None:
        torch.autograd.grad(pair(x, gated), inputs, grad_outputs=(d_uvqk, d_output))

    return run


def measure(width: int, tokens: int, recipes: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Median, least and most milliseconds of each recipe, over rounds in turns."""
    runs = {recipe: passes(recipe, width, tokens) for recipe in recipes}
    for run in runs.values():
        for _ in range(5):
            run()
    torch.cuda.synchronize()
    calls = max(3, min(30, int(15.0 / max(time_ms(runs[BASE], calls=3), 0.05))))
    times: dict[str, list[float]] = {recipe: [] for recipe in recipes}
    for _ in range(rounds):
        for recipe, run in runs.items():
            times[recipe].append(time_ms(run, calls=calls))
    return {r: spread(t) for r, t in times.items()}


def break_even(rows: list[dict[str, Any]], recipe: str, width: int) -> int | None:
    """The fewest tokens from which on the recipe was never slower than bfloat16; None if there are none."""
    found = None
    for row in sorted((r for r in rows if r["width"] == width), key=lambda r: -r["tokens"]):
        if row["ms"][recipe]["median"] > row["ms"][BASE]["median"]:
            break
        found = row["tokens"]
    return found


def plot(rows: list[dict[str, Any]], recipes: list[str], path: Path) -> None:
    """A panel a recipe: speed over bfloat16's against tokens, a line a width."""
    shown = [recipe for recipe in recipes if recipe != BASE]
    figure = Figure(figsize=(4.5 * len(shown), 4), layout="constrained")
    for axes, recipe in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
        for width in sorted({row["width"] for row in rows}):
            mine = [row for row in rows if row["width"] == width]
            speeds = [row["ms"][BASE]["median"] / row["ms"][recipe]["median"] for row in mine]
            axes.plot([row["tokens"] for row in mine], speeds, marker="o", label=f"width {width}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="tokens", title=recipe, ylabel="speed over bfloat16")
        axes.legend()
    figure.savefig(path, dpi=100)


def main() -> int:
    """Sweep, write, print."""
    parser = argparse.ArgumentParser(description="Where FP8 linears pay.")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "fp8_linear_speed.json")
    args = parser.parse_args()
    recipes = [BASE, *(recipe for recipe, reason in linear_capabilities().items() if not reason)]
    rows = [
        {"width": width, "tokens": tokens, "ms": measure(width, tokens, recipes, args.rounds)}
        for width in args.widths
        for tokens in args.tokens
    ]
    even = {recipe: {w: break_even(rows, recipe, w) for w in args.widths} for recipe in recipes if recipe != BASE}
    report = {
        **header("linears of an HSTU layer, forward and backward", "transformer_engine"),
        "rounds": args.rounds,
        "tokens_from_which_it_pays": even,
        "rows": rows,
    }
    write(report, args.output)
    plot(rows, recipes, args.output.with_suffix(".png"))
    for row in rows:
        speeds = {r: round(row["ms"][BASE]["median"] / row["ms"][r]["median"], 2) for r in recipes}
        print(f"{row['width']:>5} {row['tokens']:>7} bf16 {row['ms'][BASE]['median']:.3f} ms, speed over it {speeds}")
    print(json.dumps(even))
    return 0


if __name__ == "__main__":
    sys.exit(main())
