"""Tensor parallelism: a few ranks, the peers, share the heads of every layer and work on the same tokens.

A pair of linears is cut so that what lies between them needs no exchange (Megatron-LM, Shoeybi et al. 2019)::

    x (T, D) -> f -> W1's rows of own heads -> activation, attention of own heads -> W2's columns of own heads -> g -> y

x and y are the same on all peers. f copies x to the parts: forward it does nothing, backward it sums the gradients of
the parts. g sums what the parts give: forward a sum over peers, backward nothing. A matrix u | v | q | k has rows of
each head in four blocks, so peer r of n has, of each block, part r of n: see :class:`Split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among its peers; by default it has none. group: theirs, None where nothing is exchanged."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


ALONE = TensorParallel()

# Of the tensors of a linear those of which peers have a part each, by what they share of its weight.
PARTS: dict[str, tuple[str, ...]] = {"": (), "rows": ("weight", "grad_output"), "columns": ("input", "weight")}


@dataclass(frozen=True)
class Split:
    """How peers share a tensor: along ``dim`` it has ``num_blocks`` equal blocks, each cut into one part a peer.

    Twelve rows in 3 blocks for 2 peers: peer 0 has rows 0 1, 4 5, 8 9 as its rows 0 to 5, peer 1 has the others.
    """

    dim: int
    num_blocks: int = 1

    def fits(self, whole: Tensor, tp: TensorParallel) -> bool:
        """Whether ``whole`` can be cut so."""
        return whole.dim() > self.dim and whole.shape[self.dim] % (self.num_blocks * tp.size) == 0

    def part(self, whole: Tensor, tp: TensorParallel) -> Tensor:
        """The part of ``whole`` that this rank has, in memory of its own."""
        blocks = whole.unflatten(self.dim, (self.num_blocks, tp.size, -1))
        return blocks.select(self.dim + 1, tp.rank).flatten(self.dim, self.dim + 1).clone()

    def whole_shape(self, part: Tensor, tp: TensorParallel) -> tuple[int, ...]:
        """The shape of the tensor that ``part`` is of."""
        return tuple(size * tp.size if dim == self.dim else size for dim, size in enumerate(part.shape))

    def offsets(self, part: Tensor, tp: TensorParallel) -> list[int]:
        """Where, along ``dim`` of the whole, each block of ``part`` starts."""
        width = part.shape[self.dim] // self.num_blocks
        return [(block * tp.size + tp.rank) * width for block in range(self.num_blocks)]


def share_parameter(module: nn.Module, name: str, split: Split, tp: TensorParallel) -> None:
    """Leave this rank's part of a parameter in its place. Bare of gradients and optimizers: before training."""
    parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(split.part(parameter.detach(), tp), requires_grad=parameter.requires_grad))


def copy_to_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """f: ``x``, whose gradient is the sum of the peers' gradients."""
    if tp.group is None:
        return x
    copied: Tensor = _CopyToRegion.apply(x, tp)
    return copied


def reduce_from_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """g: the sum of the peers' ``x``, in its dtype; the gradient goes to each as it is."""
    if tp.group is None:
        return x
    reduced: Tensor = _ReduceFromRegion.apply(x, tp)
    return reduced


def largest(x: Tensor, tp: TensorParallel) -> Tensor:
    """The largest of the peers' ``x``, element by element; in place, no gradient."""
    if tp.group is not None:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=tp.group)
    return x


def summed(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of the peers' ``x``; in place, no gradient."""
    if tp.group is not None and x.numel():
        dist.all_reduce(x, group=tp.group)
    return x


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        """A view, so that nothing is copied."""
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """gradients: of the part that this rank has computed."""
        (gradient,) = gradients
        return summed(gradient.clone(memory_format=torch.contiguous_format), ctx.tp), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        """In new memory: ``x`` may be a view, or wanted by who made it."""
        return summed(x.clone(memory_format=torch.contiguous_format), tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """gradients: of the sum, the same on all peers."""
        return gradients[0], None
