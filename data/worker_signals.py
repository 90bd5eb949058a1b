"""SIGTERM in the worker processes of a loader: from their parent it ends them, from a scheduler it does not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_held() -> Iterator[None]:
    """Start workers within it: none is ended by a SIGTERM that comes before its ``outlive_sigterm``. This process gets
    its own afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_sigterm(worker: int) -> None:
    """Let a worker end by SIGTERM where its parent sends it, and not where a scheduler sends it to all processes: the
    parent then still trains to the end of its step, and saves.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
