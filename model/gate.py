"""Keeps gradients from sharded tables until a step is known to be sound.

The optimizer of a sharded table runs inside its backward: once gradients get there, the table has changed. So vectors
that were looked up are cut off from their tables; backward ends at the cut, and goes on behind it when told to::

    table -> vectors | cut | -> encoder -> loss        backward: loss -> cut;  release: cut -> table
"""

from __future__ import annotations

import torch
from torch import Tensor


class GradientGate:
    """The cuts of the lookups since the last ``release`` or ``drop``."""

    def __init__(self) -> None:
        self._cuts: list[tuple[Tensor, Tensor]] = []

    def cut(self, vectors: Tensor) -> Tensor:
        """``vectors`` with a gradient of their own; themselves where no gradient is wanted."""
        if not torch.is_grad_enabled():
            return vectors
        leaf = vectors.detach().requires_grad_()
        self._cuts.append((vectors, leaf))
        return leaf

    def gradients(self) -> list[Tensor]:
        """What waits at the cuts."""
        return [leaf.grad for _, leaf in self._cuts if leaf.grad is not None]

    def release(self) -> None:
        """Let the gradients reach the tables, whose optimizers then step. Ranks call alike, also without any user."""
        cuts, self._cuts = self._cuts, []
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in cuts]
        torch.autograd.backward([vectors for vectors, _ in cuts], gradients)

    def drop(self) -> None:
        """Forget the gradients: the tables stay as they are."""
        self._cuts = []
