"""What a rank is doing, noted in memory as it does it, so that a thread beside can tell it (watchdog.py).

A note is a few stores, without the device and without the other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    """One moment of a rank.

    phase: what it does. collective: the one that it has entered and not left, "" outside of any. place: how far it is;
    ranks call alike, so a rank whose place is lower than another's is behind it.
    """

    phase: str = "starting"
    step: int = 0
    collective: str = ""
    place: tuple[int, ...] = (0, 0)


class Progress:
    """What one thread of this rank is doing; written by that thread alone, read by others."""

    def __init__(self) -> None:
        self._activity = Activity()
        self._num_signs = 0
        self._measure: Callable[[], object] | None = None
        self._other: Progress | None = None

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """From here on it does ``phase``, of ``step`` where that is another than before."""
        now = self._activity
        num_collectives, num_phases = now.place
        step = now.step if step is None else step
        self._activity = Activity(phase, step, place=(num_collectives, num_phases + 1))

    def sign(self) -> None:
        """It gets on, in the phase that it is in."""
        self._num_signs += 1

    @contextlib.contextmanager
    def collective(self, kind: str, name: str = "") -> Iterator[None]:
        """Within it this rank waits for the others, in the ``kind`` ("all-reduce") that has a name or is named after
        the phase. Within another one it adds nothing: what is around it has the better name.
        """
        before = self._activity
        if before.collective:
            yield
            return
        described = f"{kind} {name!r}" if name else f"{kind} after {before.phase!r}"
        number = before.place[0] + 1
        self._activity = dataclasses.replace(before, collective=described, place=(number, 0))
        try:
            yield
        finally:
            self._activity = dataclasses.replace(before, place=(number, 1))

    @contextlib.contextmanager
    def measuring(self, measure: Callable[[], object]) -> Iterator[None]:
        """Within it a change of what ``measure`` returns is a sign, too; it is called from another thread."""
        self._measure = measure
        try:
            yield
        finally:
            self._measure = None

    @contextlib.contextmanager
    def waiting_for(self, other: Progress) -> Iterator[None]:
        """Within it this thread does nothing but wait for the one that notes into ``other``."""
        self._other = other
        try:
            yield
        finally:
            self._other = None

    def read(self) -> tuple[Activity, object]:
        """What the rank is doing, and a value that differs from an earlier one where it has got on in between."""
        own, other, measure = self._activity, self._other, self._measure
        if other is not None:
            activity, value = other.read()
            return dataclasses.replace(activity, place=(*own.place, *activity.place)), (own, value)
        return own, (own, self._num_signs, None if measure is None else measure())
