"""Trading time for memory: an intermediate result that autograd doesn't keep but computes again in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _View:
    """Where in the recomputed tensor the saved one lies."""

    size: Sequence[int]
    stride: Sequence[int]
    storage_offset: int


@contextmanager
def recomputed(result: Tensor, function: Callable[[], Tensor]) -> Iterator[None]:
    """Within, operations that would save ``result`` or a view of it for backward save how to get it instead.

    ``function`` computes ``result`` again, bit for bit, from tensors that are kept anyway; it runs without gradients,
    once for all views that are alive together. ``result`` must own its memory, contiguous.
    """
    storage = result.untyped_storage().data_ptr()
    alive: list[weakref.ReferenceType[Tensor]] = []

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.untyped_storage().data_ptr() != storage or saved.numel() == 0:
            return saved
        return _View(saved.shape, saved.stride(), int(saved.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _View):
            kept: Tensor = packed
            return kept
        again = alive[0]() if alive else None
        if again is None:
            with torch.no_grad():
                again = function()
            alive[:] = [weakref.ref(again)]
        view = again.as_strided(packed.size, packed.stride, packed.storage_offset)
        # The view holds the memory, but only a reference keeps the tensor that the next view is taken from.
        view._recomputed_from = again  # type: ignore[attr-defined]
        return view

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
