"""Checkpoints on disk: what is in one, which ones are whole, and reading. checkpoint_store.py writes them.

They are written beside and renamed, so that a crash at any byte leaves the previous one valid.

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
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from genrec.configs.schema import UserError

LOG = logging.getLogger(__name__)
STEP_NAME = re.compile(r"step_(\d{8,})")
WRITING_PREFIX = ".writing_"
MANIFEST = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
BEST = "best"


class CheckpointError(UserError):
    """A checkpoint that is not there, not whole, or not of this model."""


def newest_checkpoint(directory: Path, *, sign: Callable[[], None] = lambda: None) -> Path | None:
    """The newest whole checkpoint below ``directory``, None without one; a log line for each that is not whole.

    ``sign`` is called after each file that has been read.
    """
    if not _is_folder(directory):
        return None
    for leftover in sorted(directory.glob(f"{WRITING_PREFIX}step_*")):
        LOG.warning("ignored %s: its writing was interrupted", leftover)
    for path in by_step(directory):
        fault = find_fault(path, sign=sign)
        if fault is None:
            return path
        LOG.warning("ignored checkpoint %s: %s", path, fault)
    return None


def find_fault(path: Path, *, sign: Callable[[], None] = lambda: None) -> str | None:
    """Why ``path`` is not a whole checkpoint, None if it is one."""
    try:
        digests = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST}"
    if not isinstance(digests, dict) or METADATA not in digests:
        return f"its {MANIFEST} is not what was written"
    for name, digest in digests.items():
        if not (path / name).is_file():
            return f"its file {name} is missing"
        try:
            found = file_digest(path / name)
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
        if found != digest:
            return f"its file {name} is not what was written"
        sign()
    return None


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` names: itself, or the newest of a checkpoints or output folder.

    Raises CheckpointError where there is none or it is damaged.
    """
    if not _is_folder(path):
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


def read_tensors(
    path: Path,
    *,
    prefixes: tuple[str, ...],
    without: Sequence[str] = (),
    like: Callable[[str], DTensor | None] = lambda name: None,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with one of ``prefixes``, whole, on the CPU; not ``without``.

    Where ``like`` of a name is a DTensor of the same shape, this rank's part alone, as that one's and where it is.
    """
    tensors: dict[str, Tensor] = {}
    for name, entry in _entries(path).items():
        if name.startswith(prefixes) and name not in without:
            model, dtype = like(name), entry.properties.dtype
            if model is not None and model.shape == entry.size:
                tensors[name] = torch.empty_like(model.detach(), dtype=dtype)
            else:
                tensors[name] = torch.empty(entry.size, dtype=dtype)
    read_into(path, tensors)
    return tensors


def read_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets``, whole tensors, ShardedTensors and DTensors, from a checkpoint's tensors of the same names.

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
    values: dict[str, Any] = json.loads(host_path(path, rank).read_text())
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


def host_path(path: Path, rank: int) -> Path:
    """Where ``rank`` puts on record what it holds on the host."""
    return path / f"rank_{rank:05d}.json"


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = STEP_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def by_step(directory: Path) -> list[Path]:
    """The folders named as checkpoints, newest first. Raises CheckpointError where ``directory`` cannot be read."""
    try:
        named = [path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name)]
    except OSError as error:
        raise CheckpointError(f"checkpoints in {directory} cannot be read: {error.strerror}") from error
    return sorted(named, key=step_of, reverse=True)
