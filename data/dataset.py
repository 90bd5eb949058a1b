"""SequenceDataset: one split of a prepared dataset, read by row group with bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from genrec.data.format import (
    EVENT_COLUMNS,
    SPLIT_NAMES,
    DataError,
    DatasetMetadata,
    check_one_of,
    context_column,
    read_metadata,
)

PLAN_COLUMNS = ("user_id", "num_targets", "num_events")
DEFAULT_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class RowGroup:
    """Decoded rows. events: item, action, timestamp, (E,) int64; offsets: (rows + 1,); contexts: feature to (rows,)."""

    events: dict[str, np.ndarray]
    offsets: np.ndarray
    contexts: dict[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = (*self.events.values(), self.offsets, *self.contexts.values())
        return sum(array.nbytes for array in arrays)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file into one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: prepare the dataset again") from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(f"{path} is damaged or not a parquet file ({reason}): prepare the dataset again") from error


class SequenceDataset:
    """The rows (users) of one split. Lengths and user ids are held in full, events only in a cache of row groups.

    directory, metadata, split: of the dataset. user_ids, num_events, num_targets: (rows,) int64, see format.py.
    """

    def __init__(
        self,
        directory: Path,
        metadata: DatasetMetadata,
        split: str,
        paths: Sequence[Path],
        *,
        contexts: Sequence[str],
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.directory = directory
        self.metadata = metadata
        self.split = split
        self._paths = list(paths)
        self._contexts = list(contexts)
        self._cache: OrderedDict[int, RowGroup] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._files: dict[int, pq.ParquetFile] = {}  # open ones: parsing a footer takes longer than reading a row group
        self._groups: list[tuple[int, int]] = []  # (file, row group in it)
        sizes: list[int] = []
        plans: list[pa.Table] = []
        for number, path in enumerate(self._paths):
            with _reading(path), pq.ParquetFile(path) as file:
                self._check_columns(path, file.schema_arrow)
                self._groups += [(number, group) for group in range(file.num_row_groups)]
                sizes += [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                plans.append(file.read(columns=list(PLAN_COLUMNS), use_threads=False))
        plan = pa.concat_tables(plans)
        self.user_ids, self.num_targets, self.num_events = (plan[name].to_numpy() for name in PLAN_COLUMNS)
        self._group_starts = np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))])

    @classmethod
    def open(cls, directory: Path | str, *, split: str, cache_bytes: int = DEFAULT_CACHE_BYTES) -> SequenceDataset:
        """Opens ``split`` ("train", "valid", "test") of the prepared dataset in ``directory``.

        Raises:
            DataError: no dataset there, unknown split, a file is missing or damaged or lacks a column, or no rows.
        """
        metadata = read_metadata(directory)
        check_one_of(split, field_name="split", allowed=SPLIT_NAMES)
        directory = Path(directory)
        folder = directory / split
        paths = sorted(folder.glob("*.parquet"))
        if not paths:
            raise DataError(f"{folder} has no parquet files: prepare the dataset again")
        contexts = list(metadata.contextual_features)
        dataset = cls(directory, metadata, split, paths, contexts=contexts, cache_bytes=cache_bytes)
        if len(dataset) != metadata.num_rows[split]:
            counts = f"{len(dataset)} rows, metadata.json says {metadata.num_rows[split]}"
            raise DataError(f"{folder} has {counts}: prepare the dataset again")
        outside = np.flatnonzero((dataset.num_targets < 0) | (dataset.num_targets > dataset.num_events))
        if len(outside):
            row = int(outside[0])
            counts = f"{dataset.num_targets[row]} targets among {dataset.num_events[row]} events"
            raise DataError(f"{folder}: user {dataset.user_ids[row]} has {counts}: prepare the dataset again")
        if not dataset.num_targets.any():
            raise DataError(f"{folder} is empty: no user has an event to train or evaluate on")
        return dataset

    def __len__(self) -> int:
        return len(self.user_ids)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row group and row within it, both (N,), of rows (N,)."""
        groups = np.searchsorted(self._group_starts, rows, side="right") - 1
        return groups, rows - self._group_starts[groups]

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes that are spawned: without open files and cached rows."""
        return {**self.__dict__, "_files": {}, "_cache": OrderedDict()}

    @property
    def group_events(self) -> np.ndarray:
        """Events of each row group, (groups,) int64."""
        return np.diff(np.concatenate([[0], np.cumsum(self.num_events)])[self._group_starts])

    def row_group(self, group: int) -> RowGroup:
        """The decoded row group, from the cache or the file; the least recently used ones leave a full cache."""
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        self._cache[group] = self._read(group)
        while len(self._cache) > 1 and sum(cached.num_bytes for cached in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)
        return self._cache[group]

    def _read(self, group: int) -> RowGroup:
        number, group_in_file = self._groups[group]
        path = self._paths[number]
        columns = [*EVENT_COLUMNS, *map(context_column, self._contexts)]
        with _reading(path):
            if number not in self._files:
                self._files[number] = pq.ParquetFile(path, page_checksum_verification=True)
            table = self._files[number].read_row_group(group_in_file, columns=columns, use_threads=False)
        lists = {name: table[name].combine_chunks() for name in EVENT_COLUMNS}
        expected = np.diff(self._group_starts)[group]
        lengths = self.num_events[self._group_starts[group] : self._group_starts[group] + expected]
        for name, column in lists.items():
            if not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
                raise DataError(f"{path} is damaged: column {name!r} has other lengths than num_events says")
        return RowGroup(
            events={name: column.values.to_numpy()[column.offsets[0].as_py() :] for name, column in lists.items()},
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            contexts={name: table[context_column(name)].to_numpy() for name in self._contexts},
        )

    def _check_columns(self, path: Path, schema: pa.Schema) -> None:
        scalars = [*PLAN_COLUMNS, *map(context_column, self._contexts)]
        wanted = {name: pa.int64() for name in scalars} | {name: pa.list_(pa.int64()) for name in EVENT_COLUMNS}
        for name, kind in wanted.items():
            if name not in schema.names:
                raise DataError(f"{path} lacks the column {name!r}: prepare the dataset again")
            found = schema.field(name).type
            is_list = pa.types.is_list(found) or pa.types.is_large_list(found)  # polars writes large ones
            found = pa.list_(found.value_type) if is_list else found
            if found != kind:
                raise DataError(f"{path} has column {name!r} of type {found}, not {kind}: prepare the dataset again")
