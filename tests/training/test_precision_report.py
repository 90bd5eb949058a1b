from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from genrec.hstu.linear import Linear
from genrec.hstu.precision.table import PrecisionRow, collapsed, precision_rows
from genrec.model.ranking import RankingModel
from genrec.training.datasets import read_run_metadata
from genrec.training.precision_report import FLOAT32_LINEARS, model_rows
from genrec.training.train import main as train_main
from genrec.training.train import train

FP8 = ("MixedPrecisionArgs.mixed_precision_dtype = 'fp8'", "MixedPrecisionArgs.backend = 'emulated'")


@pytest.fixture
def rows_of(tmp_path, tiny_config):
    """``rows_of(*bindings)``: the table of a tiny model as {module: row}."""

    def rows(*bindings):
        config = tiny_config(tmp_path / "unused", *bindings)
        model = RankingModel(config, metadata=read_run_metadata(config), device=torch.device("meta"))
        return {row.module: row for row in model_rows(model, config)}

    return rows


def test_rows_of_a_model_without_fp8(rows_of):
    rows = rows_of("NetworkArgs.num_layers = 24", "NetworkArgs.dtype_str = 'bfloat16'")
    found = {name: (row.kind, row.shape, row.precision) for name, row in rows.items()}
    assert found == {
        "encoder.block.layers.0-23": ("attention", "2 heads of 8", "bfloat16"),
        "encoder.block.layers.0-23.uvqk": ("linear", "16 -> 64", "bfloat16"),
        "encoder.block.layers.0-23.output": ("linear", "16 -> 16", "bfloat16"),
        "head.hidden.0": ("linear", "16 -> 8", "bfloat16"),
        "head.output": ("linear", "8 -> 1", "float32"),
    }
    assert all(row.evaluation == row.precision and not row.note for row in rows.values())


def test_table_says_what_the_linears_compute_in(make_step, make_batch):
    """Of every linear in float32 or bfloat16 the table says the dtype that it is fed with."""
    step = make_step("NetworkArgs.dtype_str = 'bfloat16'", "NetworkArgs.item_embedding_dim = 32")
    fed = {}
    for name, module in step.model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda module, inputs, name=name: fed.update({name: inputs[0].dtype}))
    step([make_batch([3])], step=1)
    rows = precision_rows(step.model, dtype=step.model.dtype, float32_linears=FLOAT32_LINEARS)
    linears = [row for row in rows if row.kind == "linear"]
    assert len(linears) > 6
    assert {row.module: row.precision for row in linears} == {
        name: str(dtype).removeprefix("torch.") for name, dtype in fed.items()
    }


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("scaling", ["hybrid", "e4m3"])
def test_fp8_rows_name_recipe_format_and_backend(rows_of, recipe, scaling):
    widths = ("NetworkArgs.hidden_size = 128", "NetworkArgs.kv_channels = 64")
    bindings = (
        f"MixedPrecisionArgs.linear_recipe = {recipe!r}",
        f"MixedPrecisionArgs.linear_scaling_precision = {scaling!r}",
    )
    row = rows_of(*FP8, *widths, *bindings)["encoder.block.layers.0-1.uvqk"]
    assert row.precision == f"fp8 {recipe} {scaling} (emulated)"
    assert row.evaluation == "float32"


def test_skipped_layers_and_the_head(rows_of):
    bindings = (
        "NetworkArgs.num_layers = 6",
        "MixedPrecisionArgs.skip_first_last_layer = True",
        "MixedPrecisionArgs.enable_fp8_for_prediction_head = True",
        "MixedPrecisionArgs.fp8_during_eval = True",
        "RankingArgs.prediction_head_arch = [32, 1]",
    )
    rows = rows_of(*FP8, *bindings)
    assert rows["encoder.block.layers.1-4.uvqk"].is_fp8
    assert rows["encoder.block.layers.1-4.uvqk"].evaluation == rows["encoder.block.layers.1-4.uvqk"].precision
    for index, place in ((0, "first"), (5, "last")):
        outer = rows[f"encoder.block.layers.{index}.uvqk"]
        assert (outer.is_fp8, outer.precision) == (False, "float32")
        assert outer.note == f"{place} layer (skip_first_last_layer)"
    assert rows["head.hidden.0"].is_fp8
    assert not rows["head.output"].is_fp8 and rows["head.output"].note


def test_only_rows_that_are_alike_are_one():
    row = PrecisionRow("a.0.b", "linear", "1 -> 2", "float32", "float32")
    rows = [
        row,
        replace(row, module="a.1.b"),
        replace(row, module="a.2.b", shape="1 -> 3"),
        replace(row, module="a.3.b"),
    ]
    assert [(each.module, each.shape) for each in collapsed(rows)] == [("a.0-1,3.b", "1 -> 2"), ("a.2.b", "1 -> 3")]
    assert collapsed([replace(row, module="plain")])[0].module == "plain"


def test_a_run_shows_the_table_once_and_reports_it(tmp_path, tiny_config, caplog):
    with caplog.at_level(logging.INFO, logger="genrec"):
        train(tiny_config(tmp_path / "run", *FP8))
    assert caplog.text.count("what runs in which precision") == 1
    assert caplog.text.count("fp8 tensorwise hybrid (emulated)") == 2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h1>Precision</h1>" in page
    assert "<td>encoder.block.layers.0-1.uvqk</td><td>linear</td><td>16 -&gt; 64</td><td>fp8 tensorwise" in page


def test_check_shows_the_table(tiny_gin, capsys):
    words = [word for binding in FP8 for word in ("--gin-bindings", binding)]
    assert train_main("ranking", ["--gin-config-file", str(tiny_gin), "--check", *words]) == 0
    out = capsys.readouterr().out
    assert "encoder.block.layers.0-1.uvqk" in out
    assert "fp8 tensorwise hybrid" in out
