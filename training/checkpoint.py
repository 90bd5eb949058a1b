"""Checkpoints on disk: written beside and renamed, so that a crash at any byte leaves the previous one valid.

::

    checkpoints/
        step_00000020/          whole: the rename is the last thing that happens to it
            .metadata, *.distcp     tensors, by torch.distributed.checkpoint
            rank_00000.json         what a rank holds on the host: step, loader cursor, random states
            config.gin, operative_config.gin, config.json
            manifest.json           SHA-256 of every other file; a copy cut short or a flipped bit is found by it
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from genrec.configs.schema import UserError
from genrec.training.sharding import Ranks

LOG = logging.getLogger(__name__)
STEP_NAME = re.compile(r"step_(\d{8,})")
WRITING_PREFIX = ".writing_"
MANIFEST = "manifest.json"


class CheckpointError(UserError):
    """A checkpoint that is not there, not whole, or not of this model."""


class CheckpointStore:
    """The checkpoints of one run: saves, keeps the newest ``keep``, finds the newest whole one. Ranks call alike."""

    def __init__(self, directory: Path, *, keep: int, ranks: Ranks) -> None:
        self.directory = directory
        self.keep = keep
        self.ranks = ranks

    def newest(self) -> Path | None:
        """The newest whole checkpoint; what is skipped on the way is logged."""
        found = newest_checkpoint(self.directory) if self.ranks.is_main else None
        return self.ranks.gather(found)[0]

    def save(
        self, step: int, *, tensors: Mapping[str, Tensor], host: Mapping[str, Any], texts: Mapping[str, str]
    ) -> Path:
        """Write checkpoint ``step``; returns its folder once it is whole on every rank.

        tensors: by name, equal on all ranks; host: this rank's own JSON values; texts: file name -> content.
        Raises CheckpointError where the disk refuses.
        """
        final = self.directory / f"step_{step:08d}"
        writing = self.directory / f"{WRITING_PREFIX}{final.name}"
        self._main_only(lambda: self._begin(writing))
        self.ranks.together(lambda: _on_disk(lambda: _write_host(writing, self.ranks.rank, host)))
        # A rank alone would be warned that it saves without a process group, which is what it asked for.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _on_disk(lambda: _write_tensors(writing, tensors))
        self._main_only(lambda: self._finish(writing, final, texts))
        return final

    def _main_only(self, action: Callable[[], None]) -> None:
        self.ranks.together(lambda: _on_disk(action) if self.ranks.is_main else None)

    def _begin(self, writing: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f"{WRITING_PREFIX}*"):
            shutil.rmtree(leftover)
        writing.mkdir()

    def _finish(self, writing: Path, final: Path, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            write_synced(writing / name, text)
        digests = {p.name: _digest(p) for p in sorted(writing.iterdir())}
        write_synced(writing / MANIFEST, json.dumps(digests, indent=1))
        sync_directory(writing)
        if final.exists():  # never a whole one: a run continues from the newest whole checkpoint and goes beyond it
            self._remove(final)
        writing.rename(final)
        sync_directory(self.directory)
        for path in _by_step(self.directory)[self.keep :]:
            self._remove(path)

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


def read_tensors(path: Path, *, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with one of ``prefixes``, on the CPU."""
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefixes)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)  # every rank reads all it asks for, without the others
    return tensors


def read_host(path: Path, *, rank: int) -> dict[str, Any]:
    """What ``rank`` put on record when the checkpoint was written."""
    values: dict[str, Any] = json.loads(_host_path(path, rank).read_text())
    return values


def write_synced(path: Path, text: str) -> None:
    """Write ``text`` and wait until it is on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``: a reader, and a crash, see the old content or the new."""
    beside = path.with_name(f".{path.name}.writing")
    write_synced(beside, text)
    beside.replace(path)
    sync_directory(path.parent)


def require_writable(folder: Path, *, what: str) -> None:
    """Raises UserError, "``what`` cannot be written: ...", where files can't be made in ``folder``; makes nothing.

    A folder that is not there yet is judged by the nearest one above it that is.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{what} cannot be written: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{what} cannot be written: Permission denied ({existing})")


def sync_directory(path: Path) -> None:
    """Wait until renames and new names in ``path`` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _by_step(directory: Path) -> list[Path]:
    """The folders named as checkpoints, newest first."""
    steps = {p: match for p in directory.iterdir() if (match := STEP_NAME.fullmatch(p.name))}
    return sorted(steps, key=lambda p: int(steps[p].group(1)), reverse=True)
