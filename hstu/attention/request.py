"""What a request for attention gives to every kernel: arguments, compile-time constants, grid, and tensors' layouts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from genrec.hstu.attention.bias import RelativeBias, tensors_of
from genrec.hstu.attention.mask import MaskRules

MIN_DIM, MAX_DIM = 32, 256
# Tokens below which a user has so few tiles that smaller ones pay. Measured at 230 tokens on average, and at 2,048.
SHORT = 512
# Rows that a tile has at most: kernels multiply their number within it by a stride, in 32 bits.
_MAX_TILE_ROWS = 256
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(frozen=True)
class Request:
    """What :func:`genrec.hstu.attention.hstu_attention` was asked for, but for q, k and v."""

    offsets: Tensor
    num_contexts: Tensor | None
    num_targets: Tensor | None
    scaling_seqlen: int
    alpha: float
    rules: MaskRules
    bias: RelativeBias | None

    @property
    def num_users(self) -> int:
        """B."""
        return self.offsets.shape[0] - 1

    def users(self) -> tuple[Tensor, ...]:
        """Contexts and targets. What isn't there is never read, but something must stand for it."""
        return tuple(self._or_offsets(x) for x in (self.num_contexts, self.num_targets))

    def pointers(self) -> tuple[Tensor, ...]:
        """:meth:`users`, and the four tensors of the relative bias."""
        return (*self.users(), *(self._or_offsets(x) for x in tensors_of(self.bias)))

    def sizes(self, q: Tensor) -> tuple[int, ...]:
        """B, H, the window, and how many targets a group has."""
        return (self.num_users, q.shape[1], self.rules.max_attn_len, self.rules.target_group_size)

    def factors(self) -> tuple[float, float]:
        """Of all scores, by half their size, and of all results."""
        return (self.alpha / 2, 1.0 / self.scaling_seqlen)

    def mask_constants(self) -> dict[str, Any]:
        """The kinds of mask that kernels are compiled for."""
        return {
            "CAUSAL": self.rules.causal,
            "CONTEXTS": "none" if self.num_contexts is None else self.rules.contextual_mask,
            "TARGETS": self.num_targets is not None,
            "WINDOW": self.rules.max_attn_len > 0,
        }

    def has_short_users(self, q: Tensor) -> bool:
        """Whether the mean length is below ``SHORT``, with padding; whatever else is known lies on the device."""
        return q.shape[0] < SHORT * self.num_users

    def grid(self, q: Tensor, block: int) -> tuple[int]:
        """A program for each tile of ``block`` tokens and head."""
        return ((q.shape[0] // block + self.num_users + 1) * q.shape[1],)

    def _or_offsets(self, x: Tensor | None) -> Tensor:
        return self.offsets if x is None else x.contiguous()


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be that of ``x``; where it is, nothing happens."""
    is_current = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return _NOTHING if is_current else torch.cuda.device(x.device)


def block_of(dim: int) -> int:
    """The width that kernels are compiled for: the next power of two, 32 at least."""
    return max(MIN_DIM, 1 << (dim - 1).bit_length())


def as_blocks(x: Tensor) -> Tensor:
    """``x`` (T, H, d) with heads of a block's width, completed with zeros, and :func:`with_dense_heads`."""
    missing = block_of(x.shape[2]) - x.shape[2]
    return F.pad(x, (0, missing)) if missing > 0 else with_dense_heads(x)


def with_dense_heads(x: Tensor) -> Tensor:
    """``x`` (T, H, d) with a head's numbers in a row and strides that kernels can take; a copy if it isn't so.

    Of an address, kernels compute head times stride, and row of the tile times stride, in 32 bits.
    """
    num_heads = x.shape[1]
    furthest = max((num_heads - 1) * x.stride(1), (_MAX_TILE_ROWS - 1) * x.stride(0))
    return x if x.stride(2) == 1 and furthest < 2**31 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Between rows and between heads of each."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])
