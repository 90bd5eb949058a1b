"""Checkpoints on disk: written beside and renamed, so that a crash at any byte leaves the previous one valid.

::

    checkpoints/
        step_00000020/          whole: the rename is the last thing that happens to it
            .metadata, *.distcp     tensors, by torch.distributed.checkpoint
            rank_00000.json         what a rank holds on the host: step, loader cursor, random states
            config.gin, operative_config.gin, config.json
            versions.json           of the packages that wrote it
            manifest.json           SHA-256 of every other file; a copy cut short or a flipped bit is found by it
        best -> step_00000020   a link, with TrainerArgs.best_metric
        .writing_step_00000030/ a crash interrupted this one: ignored, and removed by the next save
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from genrec.configs.schema import UserError
from genrec.data.files import link_atomically, sync, write_synced
from genrec.training.sharding import Ranks

LOG = logging.getLogger(__name__)
STEP_NAME = re.compile(r"step_(\d{8,})")
WRITING_PREFIX = ".writing_"
MANIFEST = "manifest.json"
BEST = "best"


class CheckpointError(UserError):
    """A checkpoint that is not there, not whole, or not of this model."""


class CheckpointStore:
    """The checkpoints of one run: saves, keeps the newest ``keep`` and the best, finds the newest whole one.

    Ranks call alike.
    """

    def __init__(self, directory: Path, *, keep: int, ranks: Ranks) -> None:
        self.directory = directory
        self.keep = keep
        self.ranks = ranks

    def newest(self) -> Path | None:
        """The newest whole checkpoint; what is skipped on the way is logged, with the reason."""

        def find() -> Path | None:
            found = newest_checkpoint(self.directory)
            if found is None and self.steps():
                LOG.warning("no checkpoint in %s is whole: starts anew", self.directory)
            return found

        return self.ranks.gather(find() if self.ranks.is_main else None)[0]

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first, whole or not."""
        return [_step_of(path) for path in _by_step(self.directory)] if self.directory.is_dir() else []

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        host: Mapping[str, Any],
        texts: Mapping[str, str],
        best_step: int | None = None,
    ) -> Path:
        """Write checkpoint ``step``; returns its folder once it is whole on every rank.

        tensors: by name, equal on all ranks; host: this rank's own JSON values; texts: file name -> content. best_step:
        of the best checkpoint, which is kept however old it is. Raises CheckpointError where the disk refuses, which
        leaves the checkpoints before as they are and nothing of this one.
        """
        final = self.directory / f"step_{step:08d}"
        writing = self.directory / f"{WRITING_PREFIX}{final.name}"
        try:
            self._main_only(lambda: self._begin(writing))
            self.ranks.together(lambda: _on_disk(lambda: _write_host(writing, self.ranks.rank, host)))
            # A rank alone would be warned that it saves without a process group, which is what it asked for.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _on_disk(lambda: _write_tensors(writing, tensors))
            self._main_only(lambda: self._finish(writing, final, texts, best_step))
        except UserError:
            if self.ranks.is_main:  # all ranks have ended writing: what is there only fills the disk
                shutil.rmtree(writing, ignore_errors=True)
            raise
        return final

    def mark_best(self, step: int) -> None:
        """Let "best" lead to checkpoint ``step``, and drop the one before where it is not among the newest."""
        self._main_only(lambda: self._mark_best(step))

    def _main_only(self, action: Callable[[], None]) -> None:
        self.ranks.together(lambda: _on_disk(action) if self.ranks.is_main else None)

    def _begin(self, writing: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f"{WRITING_PREFIX}*"):
            shutil.rmtree(leftover)
        writing.mkdir()

    def _mark_best(self, step: int) -> None:
        link_atomically(self.directory / BEST, f"step_{step:08d}")
        self._prune(step)

    def _prune(self, best_step: int | None) -> None:
        for path in _by_step(self.directory)[self.keep :]:
            if _step_of(path) != best_step:
                self._remove(path)

    def _finish(self, writing: Path, final: Path, texts: Mapping[str, str], best_step: int | None) -> None:
        for name, text in texts.items():
            write_synced(writing / name, text)
        digests = {p.name: _digest(p) for p in sorted(writing.iterdir())}
        write_synced(writing / MANIFEST, json.dumps(digests, indent=1))
        sync(writing)
        if final.exists():  # never a whole one: a run continues from the newest whole checkpoint and goes beyond it
            self._remove(final)
        writing.rename(final)
        sync(self.directory)
        if best_step is None:
            self._prune(None)
        else:
            self._mark_best(best_step)

    def _remove(self, path: Path) -> None:
        # Renamed first, so that a crash in between never leaves half a checkpoint under a whole one's name.
        doomed = path.with_name(f"{WRITING_PREFIX}removed_{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint below ``directory``, None without one; a log line for each that is not whole."""
    if not directory.is_dir():
        return None
    for leftover in sorted(directory.glob(f"{WRITING_PREFIX}step_*")):
        LOG.warning("ignored %s: its writing was interrupted", leftover)
    for path in _by_step(directory):
        fault = find_fault(path)
        if fault is None:
            return path
        LOG.warning("ignored checkpoint %s: %s", path, fault)
    return None


def find_fault(path: Path) -> str | None:
    """Why ``path`` is not a whole checkpoint, None if it is one."""
    try:
        digests = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST}"
    for name, digest in digests.items():
        if not (path / name).is_file():
            return f"its file {name} is missing"
        if _digest(path / name) != digest:
            return f"its file {name} is not what was written"
    return None


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` names: itself, or the newest of a checkpoints or output folder.

    Raises CheckpointError where there is none or it is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint folder {path}")
    if STEP_NAME.fullmatch(path.resolve().name) or (path / MANIFEST).exists():
        fault = find_fault(path)
        if fault:
            raise CheckpointError(f"{path} is not a whole checkpoint: {fault}")
        return path
    found = newest_checkpoint(path) or newest_checkpoint(path / "checkpoints")
    if found is None:
        raise CheckpointError(f"no whole checkpoint in {path} (looked for step_*/ there and in its checkpoints/)")
    return found


def read_tensors(path: Path, *, prefixes: tuple[str, ...], without: Sequence[str] = ()) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with one of ``prefixes``, whole, on the CPU; not ``without``."""
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _entries(path).items()
        if name.startswith(prefixes) and name not in without
    }
    read_into(path, tensors)
    return tensors


def read_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets``, whole tensors and ShardedTensors, from a checkpoint's tensors of the same names.

    Raises CheckpointError where one is not there or has another shape.
    """
    if not targets:
        return
    entries = _entries(path)
    for name, tensor in targets.items():
        there = tuple(entries[name].size) if name in entries else "absent"
        if there != tuple(tensor.size()):
            raise CheckpointError(
                f"{path} is of another model: {name} is {there} there and {tuple(tensor.size())} here"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Every rank reads all it asks for, without the others.
        dcp.load(dict(targets), storage_reader=FileSystemReader(path), no_dist=True)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors."""
    return {name: tuple(entry.size) for name, entry in _entries(path).items()}


def _entries(path: Path) -> dict[str, TensorStorageMetadata]:
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def read_host(path: Path, *, rank: int) -> dict[str, Any]:
    """What ``rank`` put on record when the checkpoint was written."""
    values: dict[str, Any] = json.loads(_host_path(path, rank).read_text())
    return values


def require_writable(folder: Path, *, what: str) -> None:
    """Raises UserError, "``what`` cannot be written: ...", where files can't be made in ``folder``; makes nothing.

    A folder that is not there yet is judged by the nearest one above it that is.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{what} cannot be written: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{what} cannot be written: Permission denied ({existing})")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    dcp.save(dict(tensors), storage_writer=FileSystemWriter(path), no_dist=not dist.is_initialized())


def _write_host(path: Path, rank: int, host: Mapping[str, Any]) -> None:
    write_synced(_host_path(path, rank), json.dumps(host))


def _host_path(path: Path, rank: int) -> Path:
    return path / f"rank_{rank:05d}.json"


def _on_disk(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint: {error}") from error
    except CheckpointException as error:  # what torch.distributed.checkpoint wraps any rank's exception in
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, (OSError, RuntimeError)):
            raise
        reason = str(cause).strip().splitlines()[0]
        raise CheckpointError(f"cannot write a checkpoint: {reason}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def _by_step(directory: Path) -> list[Path]:
    """The folders named as checkpoints, newest first."""
    return sorted((p for p in directory.iterdir() if STEP_NAME.fullmatch(p.name)), key=_step_of, reverse=True)
