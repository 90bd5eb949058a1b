"""Which shapes Transformer Engine's FP8 linears take, recipe by recipe, forward and backward, on this GPU.

    python benchmarks/linear_shapes.py [--output FILE]

Each recipe runs a linear of 128 -> 256 on every number of rows from 0 to 64 and some larger ones, and a linear of
other dimensions on 128 rows; what raises, or differs from bfloat16 by more than FP8 explains, is recorded with its
first sentence. What follows from the table is in configs/precision.py (FP8_ROW_MULTIPLES, FP8_DIM_MULTIPLES).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

from genrec.configs.schema import LINEAR_RECIPES, MixedPrecisionArgs
from genrec.hstu.precision.recipes import linear_recipe
from genrec.hstu.precision.te import te_recipe
from reporting import RESULTS, header, write

ROWS = (*range(65), 80, 96, 100, 120, 128, 136, 144, 1000, 1008, 1024)
DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 100, 112, 128, 136, 144, 200, 1000, 1008)
TOLERANCE = 0.1  # of the norm: e4m3 has 3 bits of mantissa, e5m2 2


def attempt(recipe: Any, rows: int, in_features: int, out_features: int, *, backward: bool) -> str:
    """Why it does not run or is not right; empty if it does and is."""
    import transformer_engine.pytorch as te

    torch.manual_seed(rows)
    linear = te.Linear(in_features, out_features, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(rows, out_features, device="cuda", dtype=torch.bfloat16)
    try:
        # Twice: delayed scaling starts with scales of 1.
        for _ in range(2):
            x.grad, linear.weight.grad = None, None
            with te.autocast(enabled=True, recipe=recipe):
                y = linear(x)
            if backward:
                (y * weights).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001, what it raises is what we want to know
        return str(error).strip().splitlines()[0][:200]
    expected = x.detach() @ linear.weight.detach().T + linear.bias.detach()
    pairs = [(y.detach(), expected)]
    if backward:
        assert x.grad is not None and linear.weight.grad is not None
        pairs += [(x.grad, weights @ linear.weight.detach()), (linear.weight.grad, weights.T @ x.detach())]
    errors = [float((a - b).float().norm() / b.float().norm().clamp(min=1e-6)) for a, b in pairs]
    worst = max(errors, default=0.0)
    return f"wrong: relative error {worst:.3f}" if not math.isfinite(worst) or worst > TOLERANCE else ""


def least_multiple(outcomes: dict[int, str]) -> int | None:
    """The smallest multiple all of whose positive instances work, None if there is none."""
    for multiple in (1, 2, 4, 8, 16, 32, 64, 128):
        sizes = [size for size in outcomes if size > 0 and size % multiple == 0]
        if sizes and all(not outcomes[size] for size in sizes):
            return multiple
    return None


def measure(name: str) -> dict[str, Any]:
    """The outcomes of one recipe."""
    result: dict[str, Any] = {}
    for precision in ("hybrid", "e4m3"):
        args = MixedPrecisionArgs("fp8", linear_recipe=name, linear_scaling_precision=precision)
        ours = linear_recipe(args)
        assert ours is not None
        recipe = te_recipe(ours)
        for direction in ("forward", "forward and backward"):
            backward = direction != "forward"
            rows = {n: attempt(recipe, n, 128, 256, backward=backward) for n in ROWS}
            if all(rows.values()):
                result[f"{precision}, {direction}"] = {"never": rows[128]}
                continue
            in_dims = {n: attempt(recipe, 128, n, 256, backward=backward) for n in DIMS}
            out_dims = {n: attempt(recipe, 128, 256, n, backward=backward) for n in DIMS}
            result[f"{precision}, {direction}"] = {
                "rows": least_multiple(rows),
                "in_features": least_multiple(in_dims),
                "out_features": least_multiple(out_dims),
                "no rows at all": rows[0] or "works",
                "refusals": {
                    what: {size: reason for size, reason in outcomes.items() if reason and size > 0}
                    for what, outcomes in (("rows", rows), ("in_features", in_dims), ("out_features", out_dims))
                },
            }
    return result


def main() -> int:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description="Which shapes FP8 linears take.")
    parser.add_argument("--output", type=Path, default=RESULTS / "fp8_linear_shapes.json")
    args = parser.parse_args()
    report: dict[str, Any] = {
        **header("shapes of FP8 linears", "transformer_engine"),
        "recipes": {name: measure(name) for name in LINEAR_RECIPES},
    }
    write(report, args.output)
    for name, outcomes in report["recipes"].items():
        for setting, outcome in outcomes.items():
            print(f"{name:>11} {setting:<30}", {key: value for key, value in outcome.items() if key != "refusals"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
