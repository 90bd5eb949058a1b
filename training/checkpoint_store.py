"""The checkpoints of a run: saves them, at once or in the background, and keeps the newest and the best."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from genrec.configs.schema import UserError
from genrec.data.files import link_atomically, sync, write_synced
from genrec.training.background import Background
from genrec.training.checkpoint import BEST, MANIFEST, WRITING_PREFIX, by_step, file_digest, newest_checkpoint, step_of
from genrec.training.checkpoint_writer import on_disk, write_host, write_tensors
from genrec.training.ranks import Ranks
from genrec.training.staging import Staging

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Content:
    """What goes into checkpoint ``step``.

    tensors: by name, equal on all ranks; host: this rank's own values, as JSON text; texts: file name -> content.
    best_step: of the best checkpoint, which is kept however old it is.
    """

    step: int
    tensors: Mapping[str, Tensor]
    host: str
    texts: Mapping[str, str]
    best_step: int | None


class CheckpointStore:
    """The checkpoints of one run: saves, keeps the newest ``keep`` and the best, finds the newest whole one.

    Ranks call alike, from the constructor on. in_background: ``save`` copies the tensors to the host, and the copy is
    written while the run goes on; ``finish`` waits for it, and so do the next save, ``mark_best`` and ``close``.
    """

    def __init__(self, directory: Path, *, keep: int, ranks: Ranks, in_background: bool = False) -> None:
        self.directory = directory
        self.keep = keep
        self.ranks = ranks
        self._staging = Staging(ranks.device)
        self._background = Background(ranks) if in_background else None

    def newest(self) -> Path | None:
        """The newest whole checkpoint; what is skipped on the way is logged, with the reason.

        Where none is whole, all get other names: the run that starts anew will write under theirs.
        """

        def find() -> Path | None:
            found = newest_checkpoint(self.directory, sign=self.ranks.progress.sign)
            if found is None and self.steps():
                on_disk(self._set_aside)
                LOG.warning("no checkpoint in %s is whole: starts anew", self.directory)
            return found

        return self.ranks.gather(self.ranks.together(lambda: find() if self.ranks.is_main else None))[0]

    def _set_aside(self) -> None:
        """Give all checkpoints other names, so that what is still good in them is not overwritten."""
        for path in by_step(self.directory):
            names = (f"damaged_{path.name}_{number}" for number in itertools.count(1))
            aside = next(free for name in names if not (free := path.with_name(name)).exists())
            path.rename(aside)
            LOG.warning("%s is %s now", path, aside.name)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first, whole or not."""
        return [step_of(path) for path in by_step(self.directory)] if self.directory.is_dir() else []

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        host: Mapping[str, Any],
        texts: Mapping[str, str],
        best_step: int | None = None,
    ) -> Path:
        """Write checkpoint ``step``; see Content. Returns its folder, which is whole then, or will be after ``finish``.

        Raises CheckpointError where the disk refuses, this or in the background the save before; that leaves the
        checkpoints before as they are and nothing of this one.
        """
        content = Content(step, tensors, json.dumps(host), texts, best_step)
        if self._background is None:
            self._write(content, self.ranks)
        else:
            self.finish()
            self.ranks.progress.enter("copying tensors for a checkpoint")
            staged = replace(content, tensors=self.ranks.together(lambda: self._staging.copy(tensors)))
            self._background.start(lambda ranks: self._write(staged, ranks))
        return self._folder(step)

    def check(self) -> None:
        """Raise, on this rank alone, what a save in the background has met that this rank is to tell."""
        if self._background is not None:
            self._background.raise_failure()

    def finish(self) -> None:
        """Wait until what is saved in the background is whole on every rank; all raise where it can't be."""
        if self._background is not None:
            self._background.join()
            self.ranks.together(self.check)

    def close(self) -> None:
        """Wait for the background at the end of a run that has met an error, whatever comes of it."""
        if self._background is not None:
            self._background.join()
            try:
                self.check()
            except Exception as error:  # noqa: BLE001, the run's own error is the one that is told
                LOG.warning("a checkpoint was not written: %s", error)

    def mark_best(self, step: int) -> None:
        """Let "best" lead to checkpoint ``step``, and drop the one before where it is not among the newest."""
        self.finish()
        _main_only(lambda: self._mark_best(step, last_step=step), self.ranks)

    def _folder(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}"

    def _write(self, content: Content, ranks: Ranks) -> None:
        final = self._folder(content.step)
        writing = self.directory / f"{WRITING_PREFIX}{final.name}"
        note = ranks.progress.enter
        try:
            note("making the folder of a checkpoint", step=content.step)
            _main_only(lambda: self._begin(writing), ranks)
            note("writing the host state of a checkpoint")
            ranks.together(lambda: on_disk(lambda: write_host(writing, ranks.rank, content.host)))
            on_disk(lambda: write_tensors(writing, content.tensors, ranks))
            note("sealing a checkpoint")
            _main_only(lambda: self._seal(writing, final, content, ranks), ranks)
        except UserError:
            if ranks.is_main:  # all ranks have ended writing: what is there only fills the disk
                shutil.rmtree(writing, ignore_errors=True)
            raise
        LOG.info("saved %s", final)

    def _begin(self, writing: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f"{WRITING_PREFIX}*"):
            shutil.rmtree(leftover)
        writing.mkdir()

    def _seal(self, writing: Path, final: Path, content: Content, ranks: Ranks) -> None:
        """Complete what lies in ``writing`` and give it its name, by which it is whole."""
        for name, text in content.texts.items():
            write_synced(writing / name, text)
        digests = {}
        for path in sorted(writing.iterdir()):
            digests[path.name] = file_digest(path)
            ranks.progress.sign()
        write_synced(writing / MANIFEST, json.dumps(digests, indent=1))
        sync(writing)
        if final.exists():  # never a whole one: a run continues from the newest whole checkpoint and goes beyond it
            self._remove(final)
        writing.rename(final)
        sync(self.directory)
        if content.best_step is None:
            self._prune(None, last_step=content.step)
        else:
            self._mark_best(content.best_step, last_step=content.step)

    def _mark_best(self, step: int, *, last_step: int) -> None:
        link_atomically(self.directory / BEST, f"step_{step:08d}")
        self._prune(step, last_step=last_step)

    def _prune(self, best_step: int | None, *, last_step: int) -> None:
        """Those beyond ``last_step`` are damaged, for else the run would have continued from them: they don't count."""
        saved = [path for path in by_step(self.directory) if step_of(path) <= last_step]
        for path in saved[self.keep :]:
            if step_of(path) != best_step:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first, so that a crash in between never leaves half a checkpoint under a whole one's name.
        doomed = path.with_name(f"{WRITING_PREFIX}removed_{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _main_only(action: Callable[[], None], ranks: Ranks) -> None:
    ranks.together(lambda: on_disk(action) if ranks.is_main else None)
