"""Which states are handed to the head."""

from __future__ import annotations

import pytest
import torch

from genrec.hstu.jagged import JaggedSequence
from genrec.hstu.postprocessor import HSTUPostprocessor


@pytest.fixture
def sequence():
    """Users of 5, 1 and 4 tokens, with 1, 1 and 0 contexts, and two padding rows."""
    values = torch.arange(12.0)[:, None].expand(12, 2).clone().requires_grad_()
    contexts = torch.tensor([1, 1, 0])
    return JaggedSequence(values, torch.tensor([0, 5, 6, 10]), 5, num_contexts=contexts, num_padding=2)


@pytest.mark.parametrize(
    ("labelled", "has_actions", "rows"),
    [
        ([2, 0, 2], True, [1, 3, 6, 8]),
        ([1, 0, 1], True, [3, 8]),
        ([0, 0, 2], True, [6, 8]),
        ([4, 0, 4], False, [1, 2, 3, 4, 6, 7, 8, 9]),
        ([1, 0, 0], False, [4]),
        ([0, 0, 0], False, []),
    ],
)
def test_last_labelled_items_in_order(sequence, labelled, has_actions, rows):
    labelled = torch.tensor(labelled)
    for num_states in (None, len(rows)):
        states = HSTUPostprocessor()(sequence, num_labelled=labelled, has_actions=has_actions, num_states=num_states)
        assert states[:, 0].tolist() == rows
    states.sum().backward()
    assert sequence.values.grad[:, 0].nonzero()[:, 0].tolist() == rows


def test_no_users():
    empty = JaggedSequence(torch.empty(0, 2, requires_grad=True), torch.tensor([0]), 0)
    states = HSTUPostprocessor()(empty, num_labelled=torch.empty(0, dtype=torch.int64), has_actions=True)
    assert states.shape == (0, 2)
    states.sum().backward()


def test_l2_norm(sequence):
    states = HSTUPostprocessor(l2_norm=True)(sequence, num_labelled=torch.tensor([2, 0, 2]), has_actions=True)
    torch.testing.assert_close(states.norm(dim=1), torch.ones(4))
