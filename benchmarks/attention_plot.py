"""The heat maps of attention.py: how many times as fast, by shape and width."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_cases import DIRECTIONS

NUM_COLUMNS = 3
# Of what is no ratio: the share of the card's dense products that ours reaches in bfloat16.
SHARE = "ours"


def plot(report: dict[str, Any], path: Path) -> None:
    """A map for each ratio and direction that was measured, and for the shares."""
    results = report["results"]
    ratios = [name for name, value in results[0]["forward"].items() if isinstance(value, float)]
    maps = [(n, d) for n in (*ratios, SHARE) for d in DIRECTIONS if any(n in entry[d] for entry in results)]
    num_cases, num_rows = len({entry["case"] for entry in results}), math.ceil(len(maps) / NUM_COLUMNS)
    figure = Figure(figsize=(14, 1 + (0.8 + 0.3 * num_cases) * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flat
    for (name, direction), axes in zip(maps, panels, strict=False):
        _draw(axes, results, name, direction)
    for axes in panels:
        axes.set_axis_off()
    figure.suptitle(f"{report['benchmark']}, {report['dtype']}, {report['device']}, {report['date']}")
    figure.savefig(path, dpi=100)


def _draw(axes: Axes, results: list[dict[str, Any]], name: str, direction: str) -> None:
    cases = list(dict.fromkeys(entry["case"] for entry in results))
    dims = list(dict.fromkeys(entry["dim"] for entry in results))
    grid = [[math.nan] * len(dims) for _ in cases]
    for entry in results:
        found = entry[direction].get(name)
        if found is not None:
            row, column = cases.index(entry["case"]), dims.index(entry["dim"])
            grid[row][column] = found["share"] if name == SHARE else found
            axes.text(column, row, f"{grid[row][column]:.2f}", ha="center", va="center")
    low, high = (0.0, 1.0) if name == SHARE else (0.5, 1.5)
    axes.imshow(grid, cmap="RdYlGn", vmin=low, vmax=high, aspect="auto", alpha=0.7)
    what = "bf16, share of dense products" if name == SHARE else name.replace("ratio to", "bf16 to")
    axes.set_title(f"{direction}: {what}", fontsize=10)
    axes.set_xticks(range(len(dims)), [f"d = {dim}" for dim in dims])
    axes.set_yticks(range(len(cases)), cases)
