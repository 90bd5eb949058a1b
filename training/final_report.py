"""What a run leaves behind: the table of results on stdout, report.png with curves and report.html around it."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from genrec.configs.schema import UserError
from genrec.data.files import write_atomically
from genrec.data.format import PROTOCOLS
from genrec.hstu.precision.table import PrecisionRow
from genrec.training.metrics_log import Line
from genrec.training.precision_report import precision_cells

NAMES = {"auc": "AUC", "gauc": "GAUC", "ne": "NE", "logloss": "log loss", "accuracy": "accuracy"}
SPLITS = {"valid": "validation", "test": "test"}


@dataclass(frozen=True)
class Row:
    """One row of the table of results: a split in a protocol, one task of it (0 alone is not named)."""

    split: str
    protocol: str
    task: str
    metrics: dict[str, float | None]


def result_rows(results: Sequence[Line]) -> list[Row]:
    """The rows of the table of results; "auc_task1" of an evaluation is "auc" in the row of task 1."""
    rows = []
    for line in results:
        by_task: dict[str, dict[str, float | None]] = {}
        for name, value in line["metrics"].items():
            metric, _, task = name.partition("_task")
            by_task.setdefault(task or "0", {})[metric] = value
        rows += [Row(SPLITS[line["event"]], line["protocol"], task, metrics) for task, metrics in by_task.items()]
    return rows


def print_results(
    results: Sequence[Line],
    *,
    outputs: Sequence[Path],
    checkpoints: Path | None,
    others: str = "metrics.jsonl has the others too",
) -> None:
    """The final table: a row for each split and protocol, of the first task; then where the outputs are.

    others: where further tasks are to be found.
    """
    first = [{**line, "metrics": {k: v for k, v in line["metrics"].items() if "_task" not in k}} for line in results]
    header, cells = _cells(first)
    table = Table(*header, title=f"results after step {results[-1]['step']}")
    for row in cells:
        table.add_row(*row)
    console = Console(soft_wrap=True)
    console.print(table)
    if first != list(results):
        console.print(f"of the first task; {others}")
    if outputs:
        console.print(f"outputs: {', '.join(map(str, outputs))}")
    console.print(f"checkpoints: {checkpoints or 'none, with TrainerArgs.ckpt_save_interval = 0'}")


def write_report(
    lines: Sequence[Line],
    results: Sequence[Line],
    *,
    output_dir: Path,
    config_text: str,
    precision: Sequence[PrecisionRow] = (),
) -> list[Path]:
    """Write report.png and report.html into ``output_dir`` from the lines of metrics.jsonl; returns their paths.

    Raises UserError where the disk refuses.
    """
    picture = _curves(lines)
    png, page = output_dir / "report.png", output_dir / "report.html"
    text = _page(lines, results, picture=picture, config_text=config_text, precision=precision)
    try:
        png.write_bytes(picture)
        write_atomically(page, text)
    except OSError as error:
        raise UserError(f"the report in {output_dir} cannot be written: {error.strerror}") from error
    return [page, png]


def _curves(lines: Sequence[Line]) -> bytes:
    """Training loss, validation AUC and throughput against the step, as PNG."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    loss, auc, speed = figure.subplots(1, 3)
    train = [line for line in lines if line["event"] == "train"]
    _curve(loss, train, "loss", title="training loss")
    _curve(speed, train, "tokens_per_s", title="tokens per second")
    speed.set_ylim(bottom=0)
    for protocol in PROTOCOLS:
        points = [line for line in lines if line["event"] == "valid" and line["protocol"] == protocol]
        values = [_number(line["metrics"].get("auc")) for line in points]
        auc.plot([line["step"] for line in points], values, marker="o", label=protocol)
    auc.set(title="validation AUC", xlabel="step")
    auc.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _curve(axes: Axes, lines: Sequence[Line], name: str, *, title: str) -> None:
    axes.plot([line["step"] for line in lines], [_number(line[name]) for line in lines])
    axes.set(title=title, xlabel="step")


def _page(
    lines: Sequence[Line],
    results: Sequence[Line],
    *,
    picture: bytes,
    config_text: str,
    precision: Sequence[PrecisionRow],
) -> str:
    section = f"<h1>Precision</h1>\n{_html_table(*precision_cells(precision))}" if precision else ""
    train = [line for line in lines if line["event"] == "train"]
    balance = [html.escape(balance_sentence(line)) for line in lines if line["event"] == "balance"][-1:]
    tokens, users = (_mean([line[n] for line in train]) for n in ("tokens_per_s", "users_per_s"))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>genrec run</title>
<style>body {{ font-family: sans-serif; max-width: 75em; margin: 2em auto }}
td, th {{ padding: 0.3em 1em; text-align: right }} pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto }}</style>
</head><body>
<h1>Results</h1>
{_html_table(*_cells(results))}
<p>Mean throughput: {tokens:,.0f} tokens/s, {users:,.0f} users/s.{"".join(f" {sentence}." for sentence in balance)}</p>
<img src="data:image/png;base64,{base64.b64encode(picture).decode()}" alt="training curves" width="100%">
{section}
<h1>Configuration</h1>
<pre>{html.escape(config_text)}</pre>
</body></html>
"""


def balance_sentence(line: Line) -> str:
    """What a "balance" line of metrics.jsonl says."""
    sliced, balanced = (f"{line[name]:.2f} times the mean" for name in ("sliced", "balanced"))
    of = f"of the first {line['num_batches']} global batches"
    if line["enabled"]:
        return f"balanced batches: the costliest rank has {balanced} work, {sliced} without ({of})"
    return (
        f"batches are not balanced: the costliest rank has {sliced} work, and {balanced} with"
        f" TrainerArgs.enable_balanced_shuffler = True ({of})"
    )


def _html_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cells(results: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table of results as text."""
    rows = result_rows(results)
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    task = ["task"] if any(row.task != "0" for row in rows) else []
    header = ["split", "protocol", *task, *(NAMES.get(name, name) for name in names)]
    cells = [
        [row.split, row.protocol, *([row.task] if task else []), *(_figure(row.metrics.get(n)) for n in names)]
        for row in rows
    ]
    return header, cells


def _figure(value: float | None) -> str:
    return "undefined" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
