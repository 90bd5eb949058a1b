"""Features of items, from their names in the source to the padded ids of a batch.

An item has any number of values of a feature. Ids follow the sorted names from 1 on; id 0 is no value::

    names      genres: Comedy, Drama          names: (none) Comedy Drama
    item.parquet   [Drama Comedy] [] [Drama]  -> [1 2] [] [2]
    padded         max_per_item = 2           -> [1 2] [0 0] [2 0]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from genrec.data.format import NO_VALUE, DataError, DatasetMetadata, ItemFeature, check_ids, item_feature_key


def encode_values(values: pl.Series) -> tuple[pl.Series, ItemFeature]:
    """List(String) values (V,) of items, null for none -> List(Int64) ids in ascending order, and what they mean."""
    names = values.explode().drop_nulls().unique().sort()
    ids = values.list.eval(pl.element().replace_strict(names, np.arange(1, len(names) + 1), return_dtype=pl.Int64))
    ids = ids.cast(pl.List(pl.Int64)).fill_null([]).list.unique().list.sort()
    most = int(ids.list.len().to_numpy().max(initial=1))
    return ids, ItemFeature(num_values=len(names) + 1, max_per_item=most, names=(NO_VALUE, *names))


def read_padded_values(directory: Path, metadata: DatasetMetadata, name: str) -> np.ndarray:
    """(num_items, max_per_item) int64 ids of feature ``name`` of each dense item id, filled up with id 0.

    Raises:
        DataError: the file is missing, damaged or isn't what the metadata says, or an id is outside its table.
    """
    path, feature = directory / "vocabulary" / "item.parquet", metadata.item_features[name]
    try:
        values = pl.read_parquet(path, columns=[name])[name]
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        problem = f"is missing, damaged or lacks {name!r} ({reason})"
        raise DataError(f"{path} {problem}: prepare the dataset again") from error
    flat, lengths = np.empty(0), np.empty(0)
    if values.dtype == pl.List(pl.Int64):
        flat, lengths = values.explode().drop_nulls().to_numpy(), values.list.len().fill_null(0).to_numpy()
    is_whole = len(lengths) == metadata.num_items and len(flat) == lengths.sum()
    if not is_whole or lengths.max(initial=0) > feature.max_per_item:
        raise DataError(f"{path} has other values of {name!r} than metadata.json says: prepare the dataset again")
    padded = np.zeros((metadata.num_items, feature.max_per_item), dtype=np.int64)
    padded[np.arange(feature.max_per_item) < lengths[:, None]] = flat
    check_ids(padded, feature=item_feature_key(name), table=item_feature_key(name), num_rows=feature.num_values)
    return padded
