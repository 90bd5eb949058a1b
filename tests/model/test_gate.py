"""Gradients wait at the gate: a table changes when it opens, and never otherwise."""

from __future__ import annotations

import pytest
import torch

from genrec.model.gate import GradientGate


@pytest.fixture
def looked_up():
    """A weight and two lookups of it, through a gate."""
    weight = torch.ones(3, requires_grad=True)
    gate = GradientGate()
    return weight, gate, gate.cut(2 * weight), gate.cut(weight[:0])


def test_gradients_wait_and_then_arrive(looked_up):
    weight, gate, vectors, nothing = looked_up
    ((5 * vectors).sum() + nothing.sum()).backward()
    assert weight.grad is None
    assert [gradient.tolist() for gradient in gate.gradients()] == [[5.0] * 3, []]
    gate.release()
    assert weight.grad.tolist() == [10.0] * 3
    assert gate.gradients() == []


def test_what_is_dropped_never_arrives(looked_up):
    weight, gate, vectors, _ = looked_up
    vectors.sum().backward()
    gate.drop()
    gate.cut(weight)  # of the next step, from which no gradient comes
    gate.release()
    assert weight.grad.tolist() == [0.0] * 3


def test_without_gradients_nothing_is_cut():
    gate, vectors = GradientGate(), torch.ones(2)
    with torch.no_grad():
        assert gate.cut(vectors) is vectors
    assert gate.gradients() == []
