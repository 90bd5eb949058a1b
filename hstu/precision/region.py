"""One forward pass of the linears that run in FP8: what delayed scaling calls an iteration.

Delayed scaling updates its scales once a pass: those of inputs and weights when the pass ends, those of gradients when
its backward ends, that is after the backward of the linear that came first. A region is such a pass. Models open one
around everything that runs in FP8; regions inside it join it, so an encoder or a single linear works on its own too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from genrec.hstu.precision.delayed import DelayedState, update_states


class Region:
    """A pass under way.

    states: of the linears with delayed scaling that ran in it, in order, each once. exits: closed when it ends; what
    else must enclose the pass (Transformer Engine's autocast) is put there by the first linear that needs it.
    """

    def __init__(self) -> None:
        self.states: list[DelayedState] = []
        self.exits = contextlib.ExitStack()
        self.autocasts: set[object] = set()

    def record(self, state: DelayedState) -> bool:
        """Note that the linear of ``state`` runs; returns whether it is the first call of the pass."""
        first = not self.states
        if not any(state is other for other in self.states):
            self.states.append(state)
        return first


_open: list[Region] = []


@contextlib.contextmanager
def fp8_region() -> Iterator[Region]:
    """Open a region, or join the one that is open. Its end updates the scales, if gradients are wanted."""
    if _open:
        yield _open[0]
        return
    region = Region()
    _open.append(region)
    try:
        with region.exits:
            yield region
    finally:
        _open.clear()
    if torch.is_grad_enabled():
        update_states(region.states, ("input", "weight"))


class FiniteWatch:
    """Remembers whether anything not finite entered an FP8 product since the last look.

    A saturating cast turns infinity into a large number, and a recipe answers an infinite amax with a scale of 1 or an
    old one, so neither a loss nor a gradient need tell of it. ``watch`` is one reading pass, without a device sync.
    """

    LIMIT = 1024  # of amaxes kept apart, so that a loop that never looks doesn't fill memory

    def __init__(self) -> None:
        self._amaxes: dict[torch.device, list[Tensor]] = {}

    @torch.no_grad()
    def watch(self, x: Tensor) -> None:
        """Take in the largest magnitude of ``x``; NaN stays."""
        if x.numel() == 0:
            return
        amaxes = self._amaxes.setdefault(x.device, [])
        amaxes.append(torch.linalg.vector_norm(x, float("inf")))  # put together later: one launch, not three
        if len(amaxes) > self.LIMIT:
            amaxes[:] = [_largest(amaxes)]

    def take(self, device: torch.device) -> Tensor | None:
        """() float32: the largest magnitude seen on ``device`` since the last call, None where nothing was."""
        amaxes = self._amaxes.pop(device, None)
        return None if amaxes is None else _largest(amaxes)


def _largest(amaxes: list[Tensor]) -> Tensor:
    """() float32, NaN if any is."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for amax in amaxes:
        by_dtype.setdefault(amax.dtype, []).append(amax)
    return torch.cat([torch.stack(group).float() for group in by_dtype.values()]).max()


FINITE_WATCH = FiniteWatch()
