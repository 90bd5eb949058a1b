"""A thread of each rank for one job at a time that the ranks do together, beside what they do otherwise."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from genrec.configs.schema import UserError
from genrec.training.process_group import COLLECTIVE_TIMEOUT
from genrec.training.progress import Progress
from genrec.training.ranks import PeerStopped, RankError, Ranks


class Background:
    """Runs jobs in a thread, with the ranks' threads meeting by gloo in a group that is theirs alone.

    Ranks call alike. The collectives of jobs thus never mix with those of training.
    """

    def __init__(self, ranks: Ranks) -> None:
        group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if dist.is_initialized() else None
        self._main = ranks
        self._ranks = dataclasses.replace(
            ranks, device=torch.device("cpu"), group=group, host_group=group, progress=Progress()
        )
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[Ranks], None]) -> None:
        """Begin ``job``, which is given the ranks as its thread sees them; the one before is to be joined first."""
        assert self._thread is None, "one job at a time"
        self._thread = threading.Thread(target=self._run, args=(job,), name="genrec background", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the job, if there is one, on this rank."""
        if self._thread is None:
            return
        with self._main.progress.waiting_for(self._ranks.progress):
            self._thread.join()
        self._thread = None

    def raise_failure(self) -> None:
        """Raise what a job has met, once, if it is for this rank to tell; what all met, rank 0 tells."""
        error, self._error = self._error, None
        if error is None or isinstance(error, PeerStopped):
            return
        if isinstance(error, UserError) and not (self._main.is_main or isinstance(error, RankError)):
            return
        if not isinstance(error, Exception):  # torch.distributed.checkpoint's own is none
            raise RuntimeError(f"a job in the background failed: {error}") from error
        raise error

    def _run(self, job: Callable[[Ranks], None]) -> None:
        try:
            job(self._ranks)
        except BaseException as error:  # noqa: BLE001, the main thread raises it
            self._error = error
