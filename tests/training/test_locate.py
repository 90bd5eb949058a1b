"""nonfinite = "locate": the sentence names the module that made the first value that is not finite."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from genrec.training.locate import Finding, locate
from genrec.training.ranks import Ranks
from genrec.training.step import NonFiniteError
from genrec.training.train import main as train_main

LOCATE = "TrainerArgs.nonfinite = 'locate'"
FP8 = ("MixedPrecisionArgs.mixed_precision_dtype = 'fp8'", "MixedPrecisionArgs.backend = 'emulated'")
DELAYED = (*FP8, "MixedPrecisionArgs.linear_recipe = 'delayed'", "MixedPrecisionArgs.amax_history_len = 4")


@pytest.fixture
def located(make_batch):
    """``located(train_step, *lengths)``: what is said of a step with a micro-batch for each list of lengths."""

    def run(train_step, *lengths):
        batches = [make_batch(each, seed=seed) for seed, each in enumerate(lengths or ([3, 5],))]
        with pytest.raises(NonFiniteError, match="not finite at step 7") as caught:
            train_step(batches, step=7)
        assert all(parameter.grad is None for parameter in train_step.model.parameters())
        return str(caught.value)

    return run


class BackwardOf(torch.autograd.Function):
    """The identity, whose gradient ``change`` makes of the one that comes."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


@pytest.mark.parametrize(
    "name", ["embeddings", "encoder.block.layers.1.uvqk", "encoder.block.layers.0", "head.hidden.0"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_output(make_step, located, name, value):
    train_step = make_step(LOCATE)
    module = train_step.model.get_submodule(name)

    def spoil(module, inputs, output):
        tensor = output if isinstance(output, torch.Tensor) else getattr(output, "values", None)
        (output.item if tensor is None else tensor).data[-1, 0] = value

    module.register_forward_hook(spoil)
    found = located(train_step)
    assert f"is the output of {name}" in found
    assert ("largest finite magnitude in its inputs" in found) == (name != "embeddings")  # which takes ids


def test_first_in_the_order_of_execution(make_step, located):
    train_step = make_step(LOCATE)
    for name in ("head.hidden.0", "encoder.block.layers.1.output", "encoder.block.layers.1.uvqk"):
        train_step.model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output / 0.0)
    assert "is the output of encoder.block.layers.1.uvqk" in located(train_step, [2], [3])


def test_amax_is_of_the_finite_part_of_the_inputs(make_step, located):
    train_step = make_step(LOCATE)
    hidden = train_step.model.head.hidden[0]
    hidden.register_forward_pre_hook(lambda module, inputs: (torch.full_like(inputs[0], -2.5),))
    hidden.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    assert "the output of head.hidden.0 (largest finite magnitude in its inputs 2.5)" in located(train_step)


def test_value_made_between_modules(make_step, located):
    """Attention is a function, not a module: its result is first seen where the output norm reads it."""
    train_step = make_step(LOCATE)
    layer = train_step.model.encoder.block.layers[1]
    attend = layer._attend
    layer._attend = lambda *args, **kwargs: attend(*args, **kwargs) * float("nan")
    found = located(train_step)
    assert "an input of encoder.block.layers.1.output_norm, made by the code before it" in found


def test_loss(make_step, located, monkeypatch):
    train_step = make_step(LOCATE)
    loss = train_step.model._loss
    monkeypatch.setattr(train_step.model, "_loss", lambda logits, labels: loss(logits, labels) * float("inf"))
    assert "is the loss of the model" in located(train_step)


def test_weight_that_is_not_finite_is_named_beside_the_output(make_step, located):
    train_step = make_step(LOCATE)
    train_step.model.head.hidden[0].weight.data[0, 0] = float("nan")
    assert "the output of head.hidden.0, whose weight is not finite either" in located(train_step)


def test_gradient_of_a_weight(make_step, located):
    train_step = make_step(LOCATE)
    module = train_step.model.encoder.block.layers[1].uvqk
    module.register_forward_hook(lambda module, inputs, output: BackwardOf.apply(output, lambda g: g * float("nan")))
    found = located(train_step)
    assert "of encoder.block.layers.1.uvqk (largest finite magnitude in its inputs" in found
    assert "is the gradient of weight of" in found or "is the gradient of bias of" in found
    assert "in the gradient that came to it" in found


def test_gradient_of_an_input(make_step, located):
    """The slope of a square root at 0 is infinite, and that of a magnitude 0: NaN."""

    class Root(torch.nn.Module):
        def forward(self, x):
            return (x - x.detach()).abs().sqrt()

    train_step = make_step(LOCATE)
    train_step.model.head.hidden[1] = Root()
    assert "is the gradient of the input of head.hidden.1 (largest" in located(train_step)


def test_gradient_made_between_modules(make_step, located):
    train_step = make_step(LOCATE)
    layer = train_step.model.encoder.block.layers[0]
    gate = layer._gate
    layer._gate = lambda u, attended: gate(BackwardOf.apply(u, lambda g: g / 0.0), attended)
    found = located(train_step)
    assert "the gradient of the output of encoder.block.layers.0.uvqk, made by the code after it" in found


def test_gradients_whose_sum_overflows(make_step, located):
    train_step = make_step(LOCATE)
    weight = train_step.model.head.hidden[0].weight
    weight.register_hook(lambda gradient: torch.full_like(gradient, 2e38))
    assert "is the gradient of head.hidden.0.weight, added over micro-batches" in located(train_step, [3], [2])


def test_gradients_whose_norm_overflows(make_step, located):
    train_step = make_step(LOCATE)
    train_step.model.head.hidden[0].weight.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    found = located(train_step)
    assert (
        "every gradient is finite, but not their global norm: the largest magnitude is 3e+38, in the gradient of "
        in found
    )
    assert found.endswith("head.hidden.0.weight")


def test_replay_draws_the_same_random_numbers(make_step, located):
    train_step = make_step(LOCATE)
    draws = []

    def spoil(module, inputs, output):
        draws.append(float(torch.rand(())))
        return output * float("nan")

    train_step.model.head.hidden[0].register_forward_hook(spoil)
    located(train_step, [3], [2])
    assert len(set(draws)) == 2
    assert draws[:2] == draws[2:]


def test_replay_that_is_finite_says_so(make_step, located):
    train_step = make_step(LOCATE)
    times = iter([float("nan")])
    train_step.model.head.hidden[0].register_forward_hook(lambda module, inputs, output: output * next(times, 1.0))
    assert "a replay of the step was finite" in located(train_step)


def test_infinite_weight_that_the_cast_to_fp8_hides(make_step, located):
    """From the output of its linear, but not from the search."""
    train_step = make_step(LOCATE, *DELAYED)
    train_step.model.encoder.block.layers[1].output.weight.data[0, 0] = float("inf")
    train_step.model.head.register_forward_hook(lambda module, inputs, logits: logits / 0.0)
    assert "the weight of encoder.block.layers.1.output, which the cast to FP8 clamps, (" in located(train_step)


@pytest.mark.parametrize("recipe", [FP8, DELAYED], ids=["tensorwise", "delayed"])
def test_fp8_linear_tells_amax_and_scale(make_step, located, recipe):
    train_step = make_step(LOCATE, *recipe)
    uvqk = train_step.model.encoder.block.layers[0].uvqk
    uvqk.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0 + 3.0,))
    uvqk.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    found = located(train_step)
    assert "the output of encoder.block.layers.0.uvqk (largest finite magnitude in its inputs 3; FP8 amax." in found
    assert recipe == FP8 or ("amax.input 3," in found and "scale.input 1," in found)


@dataclass(frozen=True)
class TwoRanks(Ranks):
    """This rank, and another with a finding of its own."""

    other: Finding | None = None

    def gather(self, value):
        return [value, self.other]

    def sum(self, tensor):
        return tensor.mul_(2)


def two_ranks(other):
    return TwoRanks(rank=0, world_size=2, device=torch.device("cpu"), other=other)


def test_lowest_rank_with_a_finding_is_told(make_step, make_batch):
    model = make_step().model
    batches = [make_batch([3])]
    found = locate(model, batches, loss_scale=1.0, ranks=two_ranks(Finding("the output of {}", "there", 2.0)))
    assert "on rank 1 is the output of there (largest finite magnitude in its inputs 2)" in found
    model.head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))
    found = locate(model, batches, loss_scale=1.0, ranks=two_ranks(Finding("the output of {}", "there", 2.0)))
    assert "on rank 0 is the output of head" in found


def test_sum_over_ranks_that_overflows(make_step, make_batch, monkeypatch):
    model = make_step().model
    model.head.hidden[0].weight.register_hook(lambda gradient: torch.full_like(gradient, 2e38))
    monkeypatch.setattr(TwoRanks, "sum", lambda self, tensor: tensor.mul_(4))
    found = locate(model, [make_batch([3])], loss_scale=1.0, ranks=two_ranks(None))
    assert found.endswith("every rank is finite alone, but not the gradient of head.hidden.0.weight, added over ranks")


def test_exit_code_and_sentence_of_a_run(tiny_gin, capsys):
    bindings = (LOCATE, "OptimizerArgs.optimizer_str = 'sgd'", "OptimizerArgs.learning_rate = 1e30")
    words = [word for binding in bindings for word in ("--gin-bindings", binding)]
    assert train_main("ranking", ["--gin-config-file", str(tiny_gin), *words]) == 3
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "in a replay of the step, the first value that is not finite is the " in errors[0]
