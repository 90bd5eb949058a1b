"""SIGTERM, by which schedulers ask a run to end: it saves after the step it is in, and ends with exit code 0.

Signals are the process's, so what is known of them is this module's. A rank that is asked tells the others in the
collective that every step begins with, and that every batch of an evaluation has, so that all stop at the same place.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_asked = threading.Event()


class Stopped(Exception):
    """The run ends because it was asked to; ``step`` is saved, in a run that saves. No error: starting it again
    continues.
    """

    def __init__(self, step: int | None = None, *, saved: bool = True) -> None:
        super().__init__(f"asked to stop after step {step}")
        self.step = step
        self.saved = saved


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Within it SIGTERM is a request. A thread other than the main one, which Python gives no signals, never is asked.

    A second SIGTERM adds nothing: the first is being followed, and schedulers repeat themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    before = signal.signal(signal.SIGTERM, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked.clear()


def stop_asked() -> bool:
    """Whether this process has been asked to stop."""
    return _asked.is_set()


def _note(signal_number: int, frame: FrameType | None) -> None:
    # Nothing else: a handler runs between any two lines, one that writes a log among them.
    _asked.set()
