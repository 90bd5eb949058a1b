"""What the rows of embedding tables stand for, as one number a row: by it a table finds its rows in another one.

Dense ids are places in a sorted vocabulary, so a new item moves those behind it: the rows of a table that was trained
before it came are found by what they stand for, never by place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from genrec.data.format import DataError, DatasetMetadata, item_feature_key


def table_keys(directory: Path, metadata: DatasetMetadata) -> dict[str, np.ndarray]:
    """Table to the key of each of its rows, (rows,) int64, of a prepared dataset; tables have their features' names.

    Raises:
        DataError: a vocabulary is missing or damaged.
    """
    folder = directory / "vocabulary"
    keys = {"item": _column(folder / "item.parquet", "original_id").to_numpy().astype(np.int64)}
    if metadata.num_actions:
        keys["action"] = np.arange(metadata.num_actions)
    for feature in metadata.contextual_features:
        path = folder / f"{feature}.parquet"
        if path.exists():
            keys[feature] = _hashes(_column(path, "value"))
    for feature, values in metadata.item_features.items():
        keys[item_feature_key(feature)] = _hashes(values.names)
    return keys


def original_item_ids(directory: Path) -> np.ndarray:
    """The source's id of each dense item id, (items,), of a prepared dataset.

    Raises:
        DataError: its vocabulary is missing or damaged.
    """
    path = directory / "vocabulary" / "item.parquet"
    return _column(path, "original_id", what=", which has the items' original ids,").to_numpy()


def _column(path: Path, name: str, *, what: str = "") -> pl.Series:
    try:
        return pl.read_parquet(path, columns=[name])[name]
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{path}{what} cannot be read ({reason}): prepare the dataset again") from error


def _hashes(values: Iterable[object]) -> np.ndarray:
    """64 bits of each value's text."""
    digests = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in values]
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)
