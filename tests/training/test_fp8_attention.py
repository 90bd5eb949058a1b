"""Whole runs with FP8 attention, emulated: the shipped preset with FP8 linears too, resuming, the table at start."""

from __future__ import annotations

import math

import pytest
import torch

from genrec.configs.loading import load_experiment
from genrec.model.ranking import RankingModel
from genrec.training.datasets import read_run_metadata
from genrec.training.metrics_log import read_lines
from genrec.training.precision_report import model_rows
from genrec.training.train import train

FP8 = ("MixedPrecisionArgs.mixed_precision_dtype = 'fp8'", "MixedPrecisionArgs.backend = 'emulated'")


def attention(mode):
    return f"MixedPrecisionArgs.hstu_attn_quantization_mode = {mode!r}"


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


@pytest.fixture
def train_preset(tmp_path, tiny_dataset):
    """``train_preset(name, *bindings)``: losses of the first steps of movielens_ranking_fp8.gin on tiny data."""

    def run(name, *bindings):
        settings = {
            "DatasetArgs.dataset_name": "ml-100k",
            "DatasetArgs.dataset_path": str(tiny_dataset),
            "DatasetArgs.max_num_candidates": 3,
            "TrainerArgs.train_batch_size": 4,
            "TrainerArgs.max_train_iters": 6,
            "TrainerArgs.eval_interval": 0,
            "TrainerArgs.log_interval": 1,
            "TrainerArgs.profile": False,
            "TrainerArgs.device": "cpu",
            "TrainerArgs.output_dir": str(tmp_path / name),
            "MixedPrecisionArgs.backend": "emulated",
        }
        bound = [f"{field} = {value!r}" for field, value in settings.items()]
        train(load_experiment("ranking", gin_files=["movielens_ranking_fp8.gin"], gin_bindings=[*bound, *bindings]))
        return losses(tmp_path / name)

    return run


@pytest.mark.parametrize("mode", ["per-head", "1xdim"])
def test_the_preset_trains_with_linears_and_attention_in_fp8(train_preset, mode):
    exact = train_preset("bf16", "MixedPrecisionArgs.mixed_precision_dtype = None")
    linears = train_preset("linears")
    both = train_preset("both", attention(mode))
    alone = train_preset("alone", attention(mode), "MixedPrecisionArgs.linear_recipe = None")
    assert len(both) == 6 and both not in (exact, linears, alone)
    for run in (linears, both, alone):
        assert all(math.isfinite(loss) for loss in run)
        assert run == pytest.approx(exact, rel=0.02)
        assert run[-1] < run[0]


def test_resuming_changes_no_bit(tmp_path, tiny_config, last_tensors):
    """Its scales are made anew in each pass: there is no state to lose."""
    settings = (*FP8, attention("per-block"), "MixedPrecisionArgs.linear_recipe = None")
    train(tiny_config(tmp_path / "whole", *settings, "TrainerArgs.max_train_iters = 6"))
    for steps in (3, 6):
        train(tiny_config(tmp_path / "parts", *settings, f"TrainerArgs.max_train_iters = {steps}"))
    whole, parts = last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "parts")
    assert whole.keys() == parts.keys() and not any(name.startswith("precision.") for name in whole)
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_attention_in_the_table(tmp_path, tiny_config):
    def rows(*bindings):
        config = tiny_config(tmp_path / "unused", "NetworkArgs.num_layers = 3", *FP8, *bindings)
        model = RankingModel(config, metadata=read_run_metadata(config), device=torch.device("meta"))
        return {
            row.module: (row.precision, row.evaluation, row.note)
            for row in model_rows(model, config)
            if row.kind == "attention"
        }

    alone = "MixedPrecisionArgs.linear_recipe = None"
    emulated = "fp8 per-head e4m3 (emulated)"
    assert rows(attention("per-head"), alone) == {"encoder.block.layers.0-2": (emulated, "float32", "")}
    on_gpu = rows(attention("128x1"), alone, "MixedPrecisionArgs.backend = 'te'")
    assert on_gpu == {"encoder.block.layers.0-2": ("fp8 1xdim e4m3 (triton)", "float32", "")}
    by_name = rows(
        attention("fp8"), alone, "MixedPrecisionArgs.backend = 'te'", "NetworkArgs.kernel_backend = 'pytorch'"
    )
    assert by_name == {"encoder.block.layers.0-2": ("fp8 plain cast e4m3 (emulated)", "float32", "")}
    skipping = rows(
        attention("per-head"), alone, "MixedPrecisionArgs.skip_first_last_layer = True",
        "MixedPrecisionArgs.fp8_during_eval = True",
    )  # fmt: skip
    assert skipping == {
        "encoder.block.layers.0": ("float32", "float32", "first layer (skip_first_last_layer)"),
        "encoder.block.layers.1": (emulated, emulated, ""),
        "encoder.block.layers.2": ("float32", "float32", "last layer (skip_first_last_layer)"),
    }
    without = rows("MixedPrecisionArgs.skip_first_last_layer = True", "NetworkArgs.hidden_size = 16")
    assert without == {"encoder.block.layers.0-2": ("float32", "float32", "")}
