"""Writes an EventSource as a prepared dataset (format.py), a bounded number of events at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from genrec.data.format import SPLIT_NAMES, DataError, DatasetMetadata, ItemFeature, context_column
from genrec.data.item_features import encode_values
from genrec.data.source import SOURCE_ROW, EventSource
from genrec.data.sources import hash_files
from genrec.data.splits import SplitPlan, plan_split

# Users a row group: a shuffled read decodes a whole group, so groups are small (about 40,000 events of MovieLens-25M).
ROW_GROUP_USERS = 256
CHUNK_EVENTS = 8_000_000


@dataclass(frozen=True)
class _Tables:
    """user_ids (U,) and item_ids (V,) ascend, dense ids are places in them; contexts: feature to (U,) dense ids.

    item_values: feature to (V,) lists of ids; item_features: what those are.
    """

    user_ids: np.ndarray
    num_events: np.ndarray
    item_ids: np.ndarray
    contexts: dict[str, np.ndarray]
    vocabularies: dict[str, pl.Series]
    item_values: dict[str, pl.Series]
    item_features: dict[str, ItemFeature]
    notes: dict[str, int]


def write_dataset(
    source: EventSource, directory: Path, *, rule: str, holdout: int, seed: int, chunk_events: int = CHUNK_EVENTS
) -> DatasetMetadata:
    """Writes ``source`` into the existing, empty ``directory``; metadata.json comes last. Returns the metadata.

    Memory: the events of ``chunk_events`` (or of one user, if it has more) at a time; the source is read once a chunk.

    Raises:
        DataError: the source has no events, or an id is negative.
    """
    tables = _read_tables(source)
    plan = plan_split(source, tables.user_ids, tables.num_events, rule=rule, holdout=holdout, seed=seed)
    for number, users in enumerate(_chunks(tables.num_events, chunk_events)):
        items, actions, times = _read_events(source, tables, users)
        for split in SPLIT_NAMES:
            rows = np.flatnonzero(plan.is_written(split)[users]) + users.start
            table = _table(tables, plan, split, rows, users.start, (items, actions, times))
            (directory / split).mkdir(exist_ok=True)
            path = directory / split / f"{number:05d}.parquet"
            # Page checksums make damage an error when it is read instead of wrong values.
            pq.write_table(table, path, row_group_size=ROW_GROUP_USERS, compression="zstd", write_page_checksum=True)
    (directory / "vocabulary").mkdir()
    catalogue = pl.DataFrame({"original_id": tables.item_ids, **tables.item_values})
    catalogue.write_parquet(directory / "vocabulary" / "item.parquet")
    for feature, values in tables.vocabularies.items():
        pl.DataFrame({"value": values}).write_parquet(directory / "vocabulary" / f"{feature}.parquet")
    files = {str(path.relative_to(directory)): hash_files([path]) for path in sorted(directory.rglob("*.parquet"))}
    metadata = _metadata(source, tables, plan, files)
    (directory / "metadata.json").write_text(metadata.to_json(), encoding="utf-8")
    return metadata


def _read_tables(source: EventSource) -> _Tables:
    counted = source.events.group_by("user_id").agg(pl.len().cast(pl.Int64).alias("n")).collect(engine="streaming")
    if counted.is_empty():
        raise DataError(f"{source.path} has no events")
    listed = source.users.select("user_id")
    users = pl.concat([listed, counted.select("user_id")]).unique().sort("user_id")
    rated = source.events.select("item_id").unique().collect(engine="streaming")["item_id"]
    item_ids = pl.concat([source.items["item_id"], rated]).unique().sort()
    for column, ids in (("user", users["user_id"]), ("item", item_ids)):
        if ids[0] is None or ids[0] < 0:
            raise DataError(f"{source.path} has the {column} id {ids[0]}, allowed are whole numbers from 0")
    num_events = users.join(counted, on="user_id", how="left", maintain_order="left")["n"].fill_null(0).to_numpy()
    profiles = users.join(source.users.unique("user_id", keep="first"), on="user_id", how="left", maintain_order="left")
    contexts, vocabularies = {}, {}
    for feature in source.users.columns:
        contexts[feature], vocabularies[feature] = _encode(profiles[feature])
    catalogue = source.items.unique("item_id", keep="first")
    items = pl.DataFrame({"item_id": item_ids}).join(catalogue, on="item_id", how="left", maintain_order="left")
    encoded = {feature: encode_values(items[feature]) for feature in items.columns if feature != "item_id"}
    return _Tables(
        user_ids=users["user_id"].to_numpy(),
        num_events=num_events,
        item_ids=item_ids.to_numpy(),
        contexts=contexts,
        vocabularies=vocabularies,
        item_values={feature: ids for feature, (ids, _) in encoded.items()},
        item_features={feature: described for feature, (_, described) in encoded.items()},
        notes={
            "users_without_events": int((num_events == 0).sum()),
            "users_without_profile": len(users) - listed["user_id"].n_unique(),
            "items_without_events": len(item_ids) - len(rated),
            "items_not_in_catalogue": len(item_ids) - len(catalogue),
        },
    )


def _encode(values: pl.Series) -> tuple[np.ndarray, pl.Series]:
    """Dense ids (U,) of ``values`` and the sorted vocabulary; a missing value (a user without profile) sorts last."""
    vocabulary = values.unique().sort(nulls_last=True)
    ids = pl.DataFrame({"value": vocabulary}).with_row_index("id")
    joined = pl.DataFrame({"value": values}).join(ids, on="value", how="left", nulls_equal=True, maintain_order="left")
    return joined["id"].cast(pl.Int64).to_numpy(), vocabulary


def _chunks(num_events: np.ndarray, chunk_events: int) -> Iterator[slice]:
    """Slices of consecutive users with at most ``chunk_events`` events (one user at least)."""
    ends = np.cumsum(num_events)
    start = 0
    while start < len(ends):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + chunk_events, side="right")), start + 1)
        yield slice(start, stop)
        start = stop


def _read_events(source: EventSource, tables: _Tables, users: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Dense items, actions and timestamps of the users of a chunk, by user, then in time order."""
    ids = tables.user_ids[users]
    events = (
        source.events.filter(pl.col("user_id").is_between(int(ids[0]), int(ids[-1])))
        .collect(engine="streaming")
        .sort(["user_id", "timestamp", SOURCE_ROW])
    )
    items = np.searchsorted(tables.item_ids, events["item_id"].to_numpy())
    return items, events["action"].to_numpy(), events["timestamp"].to_numpy()


def _table(
    tables: _Tables, plan: SplitPlan, split: str, rows: np.ndarray, first_user: int, events: tuple[np.ndarray, ...]
) -> pa.Table:
    """The rows of users ``rows`` of the chunk that starts at ``first_user``; ``events`` are the chunk's columns."""
    last_user = first_user if not len(rows) else int(rows[-1]) + 1
    starts = np.concatenate([[0], np.cumsum(tables.num_events[first_user:last_user])])[rows - first_user]
    lengths = plan.num_events[split][rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # Position of every event kept: its user's start plus its place in the user.
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    columns: dict[str, pa.Array] = {"user_id": pa.array(tables.user_ids[rows])}
    for feature, ids in tables.contexts.items():
        columns[context_column(feature)] = pa.array(ids[rows])
    for name, values in zip(("item", "action", "timestamp"), events, strict=True):
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values[index]))
    columns["num_targets"] = pa.array(plan.num_targets[split][rows])
    columns["num_events"] = pa.array(lengths)
    return pa.table(columns)


def _dropped(num_events: np.ndarray, plan: SplitPlan) -> dict[str, int]:
    """Reason to count of the events, of users with ``num_events (U,)``, that are in no row; {} where there are none."""
    held = [np.where(plan.is_written(split), plan.num_events[split], 0) for split in SPLIT_NAMES]
    count = int((num_events - np.maximum.reduce(held)).sum())
    return {"events_in_no_split": count} if count else {}


def _metadata(source: EventSource, tables: _Tables, plan: SplitPlan, files: dict[str, str]) -> DatasetMetadata:
    return DatasetMetadata(
        name=source.name,
        source=source.origin,
        source_hash=source.hash,
        split=plan.options,
        tie_rule=source.tie_rule,
        contextual_features={feature: len(values) for feature, values in tables.vocabularies.items()},
        num_items=len(tables.item_ids),
        item_features=tables.item_features,
        num_actions=source.num_actions,
        label_bits=source.label_bits,
        positive_class=source.positive_class,
        num_users=len(tables.user_ids),
        num_events=int(tables.num_events.sum()),
        num_targets={split: int(plan.num_targets[split].sum()) for split in SPLIT_NAMES},
        num_rows={split: int(plan.is_written(split).sum()) for split in SPLIT_NAMES},
        dropped=_dropped(tables.num_events, plan),
        notes={**tables.notes, "users_too_short_to_split": plan.num_short_users},
        files=files,
    )
