"""Files that survive a crash: what is written is on the disk before anything says that it is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

LOG = logging.getLogger(__name__)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def write_synced(path: Path, text: str) -> None:
    """Write ``text`` and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place at the end; of what fails nothing is left."""
    beside = path.with_name(f".{path.name}.writing")
    beside.unlink(missing_ok=True)
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``: a reader, and a crash, see the old content or the new."""
    with replacing(path) as beside:
        write_synced(beside, text)
    sync(path.parent)


def link_atomically(link: Path, target: str) -> None:
    """Let the symbolic link ``link`` lead to ``target``, as seen from its folder, whatever it led to before."""
    with replacing(link) as beside:
        beside.symlink_to(target)
    sync(link.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within it no other process holds the file ``path``, which is made. Raises BlockingIOError where one does.

    The system frees it however the process ends, and no child has it: a loader's worker may outlive a killed run.
    Where the file system has no locks it holds nothing, and a warning says so. Raises OSError for all else.
    """
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from error
            if error.errno not in _WITHOUT_LOCKS:
                raise
            LOG.warning("%s has no locks (%s): nothing stops another run in it", path.parent, error.strerror)
        yield


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names and renames in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until ``folder`` with all that is in it is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
