"""FP8 by Transformer Engine in whole runs, on a GPU: resuming, evaluation, every number of tokens, finite losses."""

from __future__ import annotations

import math

import pytest
import torch

from genrec.hstu.precision.capability import linear_capabilities
from genrec.hstu.precision.state import precision_tensors
from genrec.model.ranking import RankingModel
from genrec.training.datasets import read_run_metadata
from genrec.training.metrics_log import read_lines
from genrec.training.train import train

pytestmark = pytest.mark.gpu

RECIPES = ("delayed", "tensorwise", "blockwise")
ON_GPU = (
    "TrainerArgs.device = 'cuda'",
    "TrainerArgs.deterministic = True",
    "NetworkArgs.dtype_str = 'bfloat16'",
    "RankingArgs.prediction_head_arch = [16, 1]",
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.enable_fp8_for_prediction_head = True",
    "MixedPrecisionArgs.fp8_during_eval = True",
)


def bindings(recipe, *more):
    history = ("MixedPrecisionArgs.amax_history_len = 6",) if recipe == "delayed" else ()
    return (*ON_GPU, f"MixedPrecisionArgs.linear_recipe = {recipe!r}", *history, *more)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_and_ten_steps_are_twenty(tmp_path, tiny_config, last_tensors, recipe):
    """Bit for bit, evaluations in between: weights, optimizer, amax histories and scales, losses."""
    settings = bindings(recipe, "TrainerArgs.eval_interval = 5")
    train(tiny_config(tmp_path / "whole", *settings, "TrainerArgs.max_train_iters = 20"))
    train(tiny_config(tmp_path / "parts", *settings, "TrainerArgs.max_train_iters = 10"))
    train(tiny_config(tmp_path / "parts", *settings, "TrainerArgs.max_train_iters = 20"))
    assert_equal(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "parts"))
    curves = [
        [
            (line["step"], line["loss"])
            for line in read_lines(tmp_path / name / "metrics.jsonl")
            if line["event"] == "train"
        ]
        for name in ("whole", "parts")
    ]
    assert curves[0] == curves[1] and all(math.isfinite(loss) for _, loss in curves[0])
    saved = [name for name in last_tensors(tmp_path / "whole") if name.startswith("precision.")]
    assert bool(saved) == (recipe == "delayed")


def test_evaluation_does_not_touch_training(tmp_path, tiny_config, last_tensors):
    train(tiny_config(tmp_path / "with", *bindings("delayed", "TrainerArgs.eval_interval = 2")))
    train(tiny_config(tmp_path / "without", *bindings("delayed", "TrainerArgs.eval_interval = 0")))
    assert_equal(last_tensors(tmp_path / "with"), last_tensors(tmp_path / "without"))


def build(tiny_config, tmp_path, *settings):
    config = tiny_config(tmp_path / "unused", *settings)
    torch.manual_seed(0)
    return RankingModel(config, metadata=read_run_metadata(config)).cuda()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_batch_shape_is_finite_and_near_the_emulation(tmp_path, tiny_config, make_batch, recipe):
    """No user, no event, odd numbers of tokens and of targets; training and evaluation."""
    settings = bindings(recipe)
    theirs = build(tiny_config, tmp_path, *settings)
    ours = build(tiny_config, tmp_path, *settings, "MixedPrecisionArgs.backend = 'emulated'")
    ours.load_state_dict(theirs.state_dict())
    for lengths in ([], [0, 0], [1], [3], [7], [8], [3, 5], [8, 8, 1]):
        batch = make_batch(lengths).to(torch.device("cuda"))
        outputs = []
        for model in (theirs, ours):
            model.zero_grad()
            model.train()
            torch.manual_seed(1)  # the same dropout
            output = model(batch)
            output.loss_per_target.sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), (lengths, name)
            with torch.no_grad():
                evaluated = model.eval()(batch)
            assert evaluated.logits.isfinite().all()
            outputs.append((output.logits, evaluated.logits))
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0.05, atol=0.05)


def test_bfloat16_and_fp8_load_each_others_weights(tmp_path, tiny_config, last_tensors):
    train(tiny_config(tmp_path / "bf16", "TrainerArgs.device = 'cuda'", "RankingArgs.prediction_head_arch = [16, 1]"))
    load = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'bf16')!r}"
    train(tiny_config(tmp_path / "fp8", *bindings("delayed", load)))
    load = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'fp8')!r}"
    train(
        tiny_config(
            tmp_path / "back", "TrainerArgs.device = 'cuda'", "RankingArgs.prediction_head_arch = [16, 1]", load
        )
    )
    names = [{n for n in last_tensors(tmp_path / run) if n.startswith("model.")} for run in ("bf16", "fp8", "back")]
    assert names[0] == names[1] == names[2]


def test_amaxes_are_recorded_once_a_pass(tmp_path, tiny_config, make_batch):
    model = build(tiny_config, tmp_path, *bindings("delayed"))
    for passes in range(1, 4):
        model(make_batch([3, 5]).to(torch.device("cuda"))).loss_per_target.sum().backward()
        for name, tensor in precision_tensors(model).items():
            if ".amax_history." in name:
                assert int((tensor != 0).sum()) == passes, name


def test_linears_that_are_asked_for_run_in_fp8(tmp_path, tiny_config, make_batch):
    """Not by our own word: by the kernels' outputs, which differ from bfloat16's as 4 bits of mantissa make them."""
    reasons = linear_capabilities()
    assert not any(reasons[recipe] for recipe in RECIPES)
    plain = build(tiny_config, tmp_path, *ON_GPU, "MixedPrecisionArgs.mixed_precision_dtype = None")
    batch = make_batch([8, 8]).to(torch.device("cuda"))
    for recipe in RECIPES:
        model = build(tiny_config, tmp_path, *bindings(recipe))
        model.load_state_dict(plain.state_dict())
        uvqk = [m.encoder.block.layers[0].uvqk for m in (plain, model)]
        x = torch.randn(64, 16, device="cuda", dtype=torch.bfloat16)
        expected, actual = (linear(x).detach().float() for linear in uvqk)
        error = float((actual - expected).norm() / expected.norm())
        assert 0.005 < error < 0.1, (recipe, error)
        assert not torch.equal(model(batch).logits, plain(batch).logits)
