"""Amax histories and scales of delayed scaling: what may change them, and that checkpoints keep them. Emulated."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from genrec.hstu.precision.state import precision_tensors
from genrec.model.ranking import RankingModel
from genrec.training.checkpoint import newest_checkpoint
from genrec.training.datasets import read_run_metadata
from genrec.training.evaluation import undisturbed
from genrec.training.metrics_log import read_lines
from genrec.training.restore import restore_tensors
from genrec.training.scoring import load_checkpoint_config, score
from genrec.training.state import TrainingState
from genrec.training.step import NonFiniteError
from genrec.training.train import train

FP8 = ("MixedPrecisionArgs.mixed_precision_dtype = 'fp8'", "MixedPrecisionArgs.backend = 'emulated'")
DELAYED = (*FP8, "MixedPrecisionArgs.linear_recipe = 'delayed'", "MixedPrecisionArgs.amax_history_len = 4")
WIDE = ("NetworkArgs.hidden_size = 32", "NetworkArgs.kv_channels = 16")
IN_EVALUATION = "MixedPrecisionArgs.fp8_during_eval = True"


def everything(train_step):
    """Weights with tables, optimizer state, FP8 state."""
    optimizers = [optimizer.state_dict()["state"] for optimizer in train_step.optimizers]
    states = (train_step.model.state_dict(), optimizers, precision_tensors(train_step.model))
    return copy.deepcopy(states)


def assert_equal(before, after):
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def poison_input(model):
    uvqk = model.encoder.block.layers[1].uvqk
    return uvqk.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 0.0,))


def poison_weight(model):
    weight = model.encoder.block.layers[0].output.weight
    original = weight.detach().clone()
    weight.data[0, 0] = float("nan")

    class Handle:
        def remove(self):
            weight.data.copy_(original)

    return Handle()


def poison_one_input(model):
    """Which the cast to FP8 makes the largest finite number: output, loss and gradients are finite."""

    def spoil(module, inputs):
        x = inputs[0].clone()
        x[0, 0] = float("inf")
        return (x,)

    return model.encoder.block.layers[1].uvqk.register_forward_pre_hook(spoil)


def poison_logits(model):
    """Its gradients, and so the amaxes of gradients, are NaN; those of the forward are good ones of a bad step."""
    return model.head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))


def poison_gradient(model):
    """The loss is finite."""
    layer = model.encoder.block.layers[1].output
    return layer.register_forward_hook(lambda module, inputs, y: y.register_hook(lambda gradient: gradient / 0.0) and y)


POISONS = (poison_input, poison_weight, poison_one_input, poison_logits, poison_gradient)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("nonfinite", ["skip", "stop", "locate"])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_step_that_is_not_finite_leaves_no_trace(make_step, make_batch, nonfinite, poison, num_batches):
    """Neither in weights, tables and optimizers nor in scales, which an infinite amax would freeze for as long as the
    history is. Embedding tables too, so that an optimizer fused into backward has to be held back."""
    train_step = make_step(f"TrainerArgs.nonfinite = {nonfinite!r}", *DELAYED)
    train_step([make_batch([3, 5])], step=1)
    before = everything(train_step)
    batches = [make_batch([4, 2]), make_batch([3])][:num_batches]
    handle = poison(train_step.model)
    if nonfinite == "skip":
        assert not train_step(batches, step=2).applied
    else:
        with pytest.raises(NonFiniteError):
            train_step(batches, step=2)
    handle.remove()
    assert_equal(before, everything(train_step))
    assert train_step(batches, step=3).applied
    assert all(tensor.isfinite().all() for tensor in precision_tensors(train_step.model).values())
    with pytest.raises(AssertionError):  # a step that counts does change scales
        assert_equal(before[2], precision_tensors(train_step.model))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_infinite_weight_is_not_trained_with(make_step, make_batch, recipe):
    """The cast to FP8 clamps it, so that loss and gradients are finite."""
    train_step = make_step(*FP8, f"MixedPrecisionArgs.linear_recipe = {recipe!r}", *WIDE)
    weight = train_step.model.encoder.block.layers[1].output.weight
    weight.data[0, 0] = float("inf")
    with pytest.raises(NonFiniteError):
        train_step([make_batch([3, 5])], step=1)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_step_without_targets_leaves_no_trace(make_step, make_batch, lengths):
    train_step = make_step(*DELAYED)
    train_step([make_batch([3, 5])], step=1)
    before = everything(train_step)
    assert not train_step([make_batch(lengths)], step=2).applied
    assert_equal(before, everything(train_step))


def test_evaluation_uses_the_present_scales_and_leaves_them(make_step, make_batch):
    train_step = make_step(*DELAYED, IN_EVALUATION)
    model = train_step.model
    train_step([make_batch([3, 5])], step=1)
    before = copy.deepcopy(precision_tensors(model))
    large = make_batch([8, 8, 8], seed=1)
    model.embeddings.requires_grad_(False)
    for parameter in model.embeddings.parameters():
        parameter.mul_(100)  # amaxes that training would have to take in
    with undisturbed(model), torch.no_grad():
        with_scales = model(large).logits
        for name, tensor in precision_tensors(model).items():
            if name.endswith("scale.input"):
                tensor.mul_(1e-4)
        assert not torch.equal(model(large).logits, with_scales)
    assert_equal(before, precision_tensors(model))
    with undisturbed(model), torch.no_grad():
        assert torch.equal(model(large).logits, with_scales)


def test_checkpoint_has_plain_tensors_of_every_fp8_linear(tmp_path, tiny_config, last_tensors):
    train(tiny_config(tmp_path, *DELAYED))
    tensors = {name: value for name, value in last_tensors(tmp_path).items() if name.startswith("precision.")}
    linears = [f"encoder.block.layers.{layer}.{name}" for layer in (0, 1) for name in ("uvqk", "output")]
    roles = ("input", "weight", "grad_output")
    expected = {f"precision.{n}.{kind}.{role}" for n in linears for kind in ("amax_history", "scale") for role in roles}
    assert tensors.keys() == expected
    assert tensors["precision.encoder.block.layers.0.uvqk.amax_history.grad_output"].shape == (4,)
    assert all((value > 0).any() for value in tensors.values())


PRECISIONS = {"float32": (), "tensorwise": FP8, "delayed": DELAYED}


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("float32", "tensorwise"),
        ("float32", "delayed"),
        ("tensorwise", "delayed"),
        ("delayed", "float32"),
        ("delayed", "tensorwise"),
        ("delayed", "delayed"),
    ],
)
def test_precisions_load_each_others_checkpoints(tmp_path, tiny_config, last_tensors, caplog, first, other):
    train(tiny_config(tmp_path / "first", *PRECISIONS[first], "TrainerArgs.max_train_iters = 2"))
    load = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}"
    still = ("OptimizerArgs.learning_rate = 1e-12", "TrainerArgs.max_train_iters = 1")
    with caplog.at_level(logging.INFO, logger="genrec"):
        train(tiny_config(tmp_path / "other", *PRECISIONS[other], load, *still))
    before, after = last_tensors(tmp_path / "first"), last_tensors(tmp_path / "other")
    weights = [name for name in before if name.startswith("model.")]
    torch.testing.assert_close([before[n] for n in weights], [after[n] for n in weights], rtol=0, atol=1e-6)
    ignored = [text for text in caplog.messages if text.startswith("ignored 24 of 24 tensors of FP8 state")]
    assert len(ignored) == (first == "delayed" and other != "delayed")
    if other == "delayed":  # the history has moved on by one step
        name = "precision.encoder.block.layers.0.uvqk.amax_history.weight"
        assert int((after[name] > 0).sum()) == (3 if first == "delayed" else 1)


@pytest.mark.parametrize(
    ("other", "factors"),
    [
        ("MixedPrecisionArgs.linear_scaling_precision = 'e4m3'", {"input": 1.0, "grad_output": 448 / 57344}),
        ("MixedPrecisionArgs.margin = 3", {"input": 1 / 8, "grad_output": 1 / 8}),
    ],
)
def test_scales_are_loaded_for_the_format_and_margin_at_hand(tmp_path, tiny_config, last_tensors, other, factors):
    """A scale for e5m2 would take e4m3 128 times beyond its range."""
    train(tiny_config(tmp_path, *DELAYED))
    config = tiny_config(tmp_path / "other", *DELAYED, other)
    model = RankingModel(config, metadata=read_run_metadata(config))
    restore_tensors(newest_checkpoint(tmp_path / "checkpoints"), TrainingState(model=model))
    saved, loaded = last_tensors(tmp_path), precision_tensors(model)
    for role, factor in factors.items():
        name = f"encoder.block.layers.1.uvqk.scale.{role}"
        torch.testing.assert_close(loaded[name], saved[f"precision.{name}"] * factor)
        history = name.replace("scale", "amax_history")
        assert torch.equal(loaded[history], saved[f"precision.{history}"])


def test_weights_that_are_not_finite_are_not_saved(tmp_path, tiny_config):
    """The last step can make them, after its loss and gradients were found finite."""
    bindings = ("OptimizerArgs.optimizer_str = 'sgd'", "OptimizerArgs.learning_rate = 1e39")
    with pytest.raises(NonFiniteError, match=r"weight is not finite after step 1, which is not saved"):
        train(tiny_config(tmp_path, *bindings, "TrainerArgs.max_train_iters = 1"))
    assert newest_checkpoint(tmp_path / "checkpoints") is None


def test_history_of_another_length_starts_anew(tmp_path, tiny_config, caplog):
    train(tiny_config(tmp_path / "first", *DELAYED))
    load = f"TrainerArgs.ckpt_load_dir = {str(tmp_path / 'first')!r}"
    with caplog.at_level(logging.INFO, logger="genrec"):
        train(tiny_config(tmp_path / "other", *DELAYED, load, "MixedPrecisionArgs.amax_history_len = 6"))
    assert any(text.startswith("ignored 12 of 24 tensors of FP8 state") for text in caplog.messages)
    assert "delayed scaling starts anew in 12 of 24 tensors of FP8 state" in caplog.messages


def test_evaluating_a_checkpoint_equals_evaluating_in_the_run(tmp_path, tiny_config):
    """With scales that only training knows."""
    train(tiny_config(tmp_path, *DELAYED, IN_EVALUATION, "OptimizerArgs.learning_rate = 0.1"))
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    results = {}
    for eval_in_fp8 in (True, False):
        binding = f"MixedPrecisionArgs.fp8_during_eval = {eval_in_fp8}"
        config = load_checkpoint_config(checkpoint, gin_bindings=[binding])
        results[eval_in_fp8] = score(config, checkpoint, split="test", protocol="sequential", scores_path=None).metrics
    (line,) = [
        n for n in read_lines(tmp_path / "metrics.jsonl") if (n["event"], n.get("protocol")) == ("test", "sequential")
    ]
    assert line["metrics"] == results[True]
    assert line["metrics"] != results[False]


@pytest.mark.parametrize("bindings", [FP8, DELAYED, ("MixedPrecisionArgs.mixed_precision_dtype = None",)])
def test_a_float32_checkpoint_is_evaluated_in_any_precision(tmp_path, tiny_config, bindings):
    train(tiny_config(tmp_path))
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    config = load_checkpoint_config(checkpoint, gin_bindings=[*bindings, IN_EVALUATION])
    metrics = score(config, checkpoint, split="test", protocol="sequential", scores_path=None).metrics
    assert 0 < metrics["auc"] < 1
