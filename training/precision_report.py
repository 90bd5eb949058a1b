"""Shows what runs in which precision: at the start of a run, in ``--check`` and in report.html."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from genrec.configs.schema import ExperimentConfig
from genrec.hstu.precision.table import PrecisionRow, collapsed, precision_rows
from genrec.model.ranking import RankingModel

FLOAT32_LINEARS = ("head.output",)  # the logits', see PredictionHead


def model_rows(model: RankingModel, config: ExperimentConfig) -> list[PrecisionRow]:
    """The rows of a ranking model, identical layers as one."""
    rows = collapsed(precision_rows(model, dtype=model.dtype, float32_linears=FLOAT32_LINEARS))
    asked = config.mixed_precision.mixed_precision_dtype is not None
    assert not asked or any(row.is_fp8 for row in rows), "the configuration refuses FP8 that nothing would run in"
    return rows


def precision_cells(rows: Sequence[PrecisionRow]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows as text. Evaluation and notes have columns only where they say something."""
    columns = {
        "module": [row.module for row in rows],
        "kind": [row.kind for row in rows],
        "shape": [row.shape for row in rows],
        "precision": [row.precision for row in rows],
    }
    if any(row.evaluation != row.precision for row in rows):
        columns["in evaluation"] = [row.evaluation for row in rows]
    if any(row.note for row in rows):
        columns["why not in FP8"] = [row.note for row in rows]
    return list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)]


def precision_table(rows: Sequence[PrecisionRow]) -> Table:
    """The same as a table for a terminal."""
    header, cells = precision_cells(rows)
    table = Table(*header)
    for row in cells:
        table.add_row(*row)
    return table
