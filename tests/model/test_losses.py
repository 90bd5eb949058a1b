"""Losses against their definitions, and the head's shape."""

from __future__ import annotations

import math

import pytest
import torch

from genrec.model.heads import PredictionHead
from genrec.model.losses import class_loss, label_bits, multi_task_loss


def test_label_bits_start_with_the_lowest() -> None:
    assert label_bits(torch.tensor([0, 1, 2, 5]), 3).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert label_bits(torch.tensor([], dtype=torch.int64), 3).shape == (0, 3)


def test_multi_task_loss_by_hand() -> None:
    logits, labels = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([1, 2])
    losses = multi_task_loss(logits, labels, (1.0, 0.5))
    first = math.log1p(math.exp(-1.0)) + 0.5 * math.log1p(math.exp(-2.0))
    second = math.log1p(math.exp(0.5)) + 0.5 * math.log1p(math.exp(-3.0))
    assert losses.tolist() == pytest.approx([first, second], rel=1e-6)


def test_class_loss_by_hand() -> None:
    losses = class_loss(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]))
    assert losses.tolist() == pytest.approx([math.log(1 + math.e + math.e**2) - 1], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_float32(dtype) -> None:
    logits, labels = torch.tensor([[20.0, -20.0]], dtype=dtype), torch.tensor([0])
    assert multi_task_loss(logits, labels, (1.0, 1.0)).dtype == torch.float32
    assert class_loss(logits, labels).dtype == torch.float32


def test_no_targets_give_no_loss() -> None:
    nothing = torch.empty(0, 2, requires_grad=True)
    for losses in (
        multi_task_loss(nothing, torch.empty(0, dtype=torch.int64), (1.0, 1.0)),
        class_loss(nothing, torch.empty(0, dtype=torch.int64)),
    ):
        losses.sum().backward()
        assert losses.shape == (0,) and nothing.grad is not None


@pytest.mark.parametrize(("activation", "function"), [("relu", torch.relu), ("gelu", torch.nn.functional.gelu)])
@pytest.mark.parametrize("sizes", [(3,), (5, 3), (5, 4, 3)])
def test_head_by_hand(activation, function, sizes) -> None:
    head = PredictionHead(6, layer_sizes=sizes, activation=activation, bias=True)
    x = torch.randn(7, 6)
    expected = x
    for linear in [module for module in head.hidden if isinstance(module, torch.nn.Linear)]:
        expected = function(expected @ linear.weight.T + linear.bias)
    torch.testing.assert_close(head(x), expected @ head.output.weight.T + head.output.bias)


def test_head_without_bias_and_in_bfloat16() -> None:
    head = PredictionHead(6, layer_sizes=(5, 3), activation="relu", bias=False)
    assert [name for name, _ in head.named_parameters()] == ["hidden.0.weight", "output.weight"]
    logits = head(torch.randn(4, 6, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())  # not rounded on the way out
