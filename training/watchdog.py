"""Names the rank that hangs: all ranks tell what they do, and where none gets on, the run ends with one sentence.

Each rank publishes every few seconds what it is doing (progress.py) to the store by which the ranks met, and for how
long it has not got on. A run hangs where that is TrainerArgs.hang_timeout_s on every rank: as long as one gets on, the
others only wait for it. A rank whose heartbeats end, since its process is stopped or its interpreter stuck, is told
of by the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from genrec.training.hang_report import RankReport, hang_sentence, idle_sentence
from genrec.training.progress import Activity
from genrec.training.ranks import Ranks

EXIT_HANG = 4
MAX_INTERVAL_S = 5.0
SILENT_INTERVALS = 5  # without a new heartbeat of a rank, after which it counts as stopped
DUMPING_S, TELLING_S = 5.0, 10.0  # at most, for the stacks of all ranks, for the sentence

_numbers = itertools.count()  # each run of a process has keys of its own in the store


@contextlib.contextmanager
def watching(ranks: Ranks, *, timeout_s: float | None, folder: Path) -> Iterator[None]:
    """Within it a run in which no rank gets on for ``timeout_s`` seconds ends, every rank of it with EXIT_HANG.

    What each rank did and its Python stacks go into ``folder``. None, and one rank alone, are not watched.
    """
    number = next(_numbers)
    if timeout_s is None or ranks.world_size == 1:
        yield
        return
    # A connection of its own: on a shared one a request waits for those of other threads.
    own: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"genrec_watchdog_{number}", own)
    watchdog = Watchdog(ranks, timeout_s=timeout_s, folder=folder, store=store)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


@dataclass(frozen=True)
class Heartbeat:
    """What another rank has published. number: of its heartbeats so far; heard_at: when it was first read here."""

    number: int
    heard_at: float
    report: RankReport


class Watchdog:
    """One rank's two threads: one keeps the time and judges, one speaks with the store, which may not answer."""

    def __init__(self, ranks: Ranks, *, timeout_s: float, folder: Path, store: dist.Store) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.folder = folder
        self.interval_s = min(MAX_INTERVAL_S, timeout_s / 10)
        self._store = store
        self._heartbeats: dict[int, Heartbeat] = {}
        # In seconds of this process: time in which it was stopped, with all others perhaps, is nobody's fault.
        self._clock = self._changed_at = self._answered_at = 0.0
        self._verdict: str | None = None
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"genrec watchdog: {what}", daemon=True)
            for what, work in (("time", self._keep_time), ("store", self._exchange))
        ]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End watching; a store that doesn't answer is not waited for."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.interval_s)

    @property
    def _idle_s(self) -> float:
        return self._clock - self._changed_at

    def _keep_time(self) -> None:
        last, sign = time.monotonic(), None
        while not self._stopping.wait(self.interval_s):
            now = time.monotonic()
            self._clock += min(now - last, 2 * self.interval_s)
            last = now
            _, current = self.ranks.progress.read()
            if current != sign:
                sign, self._changed_at = current, self._clock
            self._judge()

    def _judge(self) -> None:
        if self._idle_s < self.timeout_s:
            return
        if self._clock - self._answered_at >= self.timeout_s / 2:
            self._end_without_store()
        reports = [self._report_of(rank) for rank in range(self.ranks.world_size)]
        if all(report.has_left or report.idle_s >= self.timeout_s for report in reports):
            self._verdict = hang_sentence(reports)

    def _report_of(self, rank: int) -> RankReport:
        if rank == self.ranks.rank:
            return RankReport(rank, self.ranks.progress.read()[0], self._idle_s)
        heartbeat = self._heartbeats.get(rank)
        if heartbeat is None:
            return RankReport(rank, Activity(), 0.0)
        silent_s = self._clock - heartbeat.heard_at
        is_silent = silent_s >= SILENT_INTERVALS * self.interval_s
        return dataclasses.replace(heartbeat.report, idle_s=heartbeat.report.idle_s + silent_s, is_silent=is_silent)

    def _exchange(self) -> None:
        """Publish and read until the end. Where the store is gone this only stops answering, which ``_judge`` sees."""
        with contextlib.suppress(RuntimeError):
            for number in itertools.count():
                ends = self._stopping.wait(self.interval_s)
                self._publish(number, has_left=ends)
                if ends:
                    return
                if self._idle_s >= self.timeout_s / 2:
                    self._read_others()
                    self._end_if_judged()
                self._answered_at = self._clock

    def _publish(self, number: int, *, has_left: bool) -> None:
        report = dataclasses.replace(self._report_of(self.ranks.rank), has_left=has_left)
        self._store.set(f"rank_{self.ranks.rank}", json.dumps([number, dataclasses.asdict(report)]))

    def _read_others(self) -> None:
        for rank in range(self.ranks.world_size):
            key = f"rank_{rank}"
            if rank == self.ranks.rank:
                continue
            number, report = -1, RankReport(rank, Activity(), 0.0)  # of one that was stopped before its first heartbeat
            if self._store.check([key]):
                number, values = json.loads(self._store.get(key))
                report = RankReport.of_json(values)
            if rank not in self._heartbeats or self._heartbeats[rank].number != number:
                self._heartbeats[rank] = Heartbeat(number, self._clock, report)

    def _end_if_judged(self) -> None:
        """End where any rank has judged; the first one's sentence is everybody's."""
        if self._verdict is not None:
            own = json.dumps([self.ranks.rank, self._verdict])
            verdict = self._store.compare_set("verdict", "", own)
        elif self._store.check(["verdict"]):
            verdict = self._store.get("verdict")
        else:
            return
        speaker, sentence = json.loads(verdict)
        self._dump()
        self._store.set(f"dumped_{self.ranks.rank}", "")
        if speaker == self.ranks.rank:
            self._await_dumps()
            self._tell(sentence)
            self._store.set("told", "")
        else:
            with contextlib.suppress(RuntimeError):  # nobody told it in time, or the store's rank has ended
                self._await("told", TELLING_S)
        os._exit(EXIT_HANG)

    def _await_dumps(self) -> None:
        end = time.monotonic() + DUMPING_S
        for rank in range(self.ranks.world_size):
            report = self._report_of(rank)
            if not report.is_silent and not report.has_left:
                self._await(f"dumped_{rank}", end - time.monotonic())

    def _await(self, key: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._store.check([key]) and time.monotonic() < end:
            time.sleep(0.05)

    def _end_without_store(self) -> None:
        self._dump()
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Without the store ranks can't agree on who speaks.
        if self.ranks.rank == (0 if by_torchrun else 1):
            silent_s = self._clock - self._answered_at
            keeper = "torchrun" if by_torchrun else "rank 0"
            silent = f"{keeper}, which keeps what ranks tell each other, gives no sign of life for {silent_s:.0f} s"
            self._tell(f"{silent} (is its process stopped?); {idle_sentence(self._report_of(self.ranks.rank))}")
        time.sleep(1.0)
        os._exit(EXIT_HANG)

    def _tell(self, sentence: str) -> None:
        stacks = f"Python stacks of the ranks are in {self.folder}"
        print(f"error: the run hangs: {sentence}; {stacks}", file=sys.stderr, flush=True)

    def _dump(self) -> None:
        """What this rank does, and the Python stacks of its threads, into a file."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"rank_{self.ranks.rank:05d}.txt").open("w") as file:
                file.write(f"{idle_sentence(self._report_of(self.ranks.rank))}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
