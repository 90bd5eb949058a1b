"""Damage and misuse of a prepared dataset: one sentence each."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genrec.configs.schema import ConfigError
from genrec.data.dataset import SequenceDataset
from genrec.data.format import DataError, check_dataset_name, read_metadata
from genrec.data.loader import SequenceLoader


@pytest.fixture
def directory(make_dataset):
    return make_dataset([6] * 300, chunk_events=10_000)  # one file, two row groups


def read_all(directory, split="train", **more):
    dataset = SequenceDataset.open(directory, split=split)
    options = {"mode": "train", "label": "class", "max_history_seqlen": 8, "batch_size": 64, **more}
    return list(SequenceLoader(dataset, **options))


def file(directory, split="train"):
    return next((directory / split).glob("*.parquet"))


def rewrite(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def assert_refused(directory, message, **options):
    with pytest.raises(DataError, match=message) as caught:
        read_all(directory, **options)
    assert "\n" not in str(caught.value)


def test_whole(directory):
    assert sum(batch.batch_size for batch in read_all(directory)) == 300


def test_not_prepared(tmp_path):
    assert_refused(
        tmp_path, "is not a prepared dataset, it has no metadata.json: make it by examples/prepare_data.py --output "
    )


def test_unknown_split(directory):
    with pytest.raises(DataError, match="split is 'dev', allowed are 'train', 'valid', 'test'"):
        SequenceDataset.open(directory, split="dev")


@pytest.mark.parametrize("num_bytes", [0, 10, 3000])
def test_truncated(directory, num_bytes):
    path = file(directory)
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert_refused(directory, "is damaged or not a parquet file")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_inside_a_page(directory, num_workers):
    path = file(directory)
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(pq.ParquetFile(path).schema_arrow.names.index("item"))
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 4] = b"\xff\x00\xff\x00"
    path.write_bytes(bytes(content))
    assert_refused(directory, "is damaged", num_workers=num_workers)


def test_missing_file_and_missing_rows(directory):
    path = file(directory)
    rewrite(path, lambda table: table.slice(0, 10))
    assert_refused(directory, "has 10 rows, metadata.json says 300")
    path.unlink()
    assert_refused(directory, "has no parquet files")


def test_missing_column_and_wrong_type(directory):
    rewrite(file(directory), lambda table: table.drop_columns(["context_parity"]))
    assert_refused(directory, "lacks the column 'context_parity'")
    rewrite(
        file(directory, "test"),
        lambda table: table.set_column(
            table.schema.names.index("num_events"), "num_events", table["num_events"].cast(pa.float64())
        ),
    )
    with pytest.raises(DataError, match="has column 'num_events' of type double, not int64"):
        SequenceDataset.open(directory, split="test")


def test_lengths_that_disagree(directory):
    rewrite(
        file(directory),
        lambda table: table.set_column(
            table.schema.names.index("num_events"), "num_events", pa.array(np.full(len(table), 3))
        ),
    )
    assert_refused(directory, "column 'item' has other lengths than num_events says")


def test_empty(make_dataset):
    directory = make_dataset([1, 1, 1])  # all too short for the split
    assert len(read_all(directory)) == 1
    with pytest.raises(DataError, match="test is empty"):
        SequenceDataset.open(directory, split="test")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("old", "new"), [(0, -1), (0, 1800), (0, 2**40)])
def test_ids_outside_the_table(directory, old, new, num_workers):
    def change(table):
        items = table["item"].combine_chunks()
        values = items.values.to_numpy()
        moved = pa.ListArray.from_arrays(items.offsets, pa.array(np.where(values == old, new, values)))
        return table.set_column(table.schema.names.index("item"), "item", moved)

    rewrite(file(directory), change)
    message = rf"^feature 'item' has id {new} but table 'item' has 1800 rows \(ids 0 to 1799\)$"
    assert_refused(directory, message, num_workers=num_workers)


def test_context_ids_outside_the_table(directory):
    small = dataclasses.replace(read_metadata(directory), contextual_features={"user_id": 300, "parity": 1})
    (directory / "metadata.json").write_text(small.to_json())
    assert_refused(directory, r"feature 'parity' has id 1 but table 'parity' has 1 rows")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop("tags"), "is missing, damaged or lacks 'tags'"),
        (lambda t: t.head(5), "has other values of 'tags' than metadata.json says"),
        (lambda t: t.with_columns(tags=pl.lit("x")), "has other values of 'tags' than metadata.json says"),
        (lambda t: t.with_columns(tags=pl.lit([1, 2, 3, 4])), "has other values of 'tags' than metadata.json says"),
        (lambda t: t.with_columns(tags=pl.lit([None], pl.List(pl.Int64))), "has other values of 'tags'"),
        (
            lambda t: t.with_columns(tags=pl.lit([4], pl.List(pl.Int64))),
            r"feature 'item_tags' has id 4 but table 'item_tags' has 4 rows \(ids 0 to 3\)",
        ),
    ],
)
def test_bad_item_features(directory, change, message):
    path = directory / "vocabulary" / "item.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    with pytest.raises(DataError, match=message) as caught:
        read_all(directory, item_features=["tags"])
    assert "\n" not in str(caught.value)
    read_all(directory)  # which does without
    path.unlink()
    with pytest.raises(DataError, match="is missing, damaged or lacks 'tags'"):
        read_all(directory, item_features=["tags"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("num_items"), "is damaged .*num_items"),
        (lambda v: v.update(format_version=0), "has format version 0, this version reads 2"),
        (lambda v: v.update(extra=1), "is damaged .*extra"),
        (lambda v: v.update(item_features=[]), "is damaged"),
        (lambda v: v.update(num_items="many"), "is damaged .*num_items is 'many', not a count"),
        (lambda v: v.update(num_actions=None), "is damaged .*num_actions is None, not a count"),
        (lambda v: v["num_rows"].update(train=-5), r"is damaged .*num_rows\['train'\] is -5, not a count"),
        (lambda v: v.update(positive_class=40), "is damaged .*positive_class is 40, of "),
        (lambda v: v["item_features"]["tags"].pop("names"), "is damaged .*names"),
    ],
)
def test_bad_metadata(directory, change, message):
    path = directory / "metadata.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    assert_refused(directory, message)
    path.write_text("{")
    assert_refused(directory, "is damaged")


def test_metadata_round_trip(directory):
    metadata = read_metadata(directory)
    (directory / "metadata.json").write_text(metadata.to_json())
    assert read_metadata(directory) == metadata


def test_cache_is_bounded_and_drops_the_oldest(directory):
    dataset = SequenceDataset.open(directory, split="train", cache_bytes=1)
    first, second = dataset.row_group(0), dataset.row_group(1)
    assert dataset.row_group(1) is second
    assert dataset.row_group(0) is not first
    large = SequenceDataset.open(directory, split="train")
    assert large.row_group(0) is large.row_group(0)


def test_a_folder_of_another_dataset_is_refused_by_both_names(make_dataset):
    directory = make_dataset([6, 5])
    metadata = read_metadata(directory)
    check_dataset_name(metadata, metadata.name, directory=directory)
    with pytest.raises(ConfigError) as caught:
        check_dataset_name(metadata, "ml-1m", directory=directory)
    assert "DatasetArgs.dataset_name = 'ml-1m'" in str(caught.value)
    assert f"{directory} holds 'toy'" in str(caught.value)


@pytest.mark.parametrize("num_targets", [-3, 100_000])
def test_targets_that_cannot_be(directory, num_targets):
    rewrite(
        file(directory, "test"),
        lambda table: table.set_column(
            table.schema.names.index("num_targets"), "num_targets", pa.array(np.full(len(table), num_targets))
        ),
    )
    with pytest.raises(DataError, match=rf"user \d+ has {num_targets} targets among \d+ events"):
        SequenceDataset.open(directory, split="test")


def test_a_file_written_again_by_polars(directory):
    """It has large lists, and other row groups."""

    def items():
        return [b.features["item"].values().tolist() for b in read_all(directory, split="test", mode="sequential")]

    before = items()
    pl.read_parquet(file(directory, "test")).write_parquet(file(directory, "test"))
    assert pa.types.is_large_list(pq.read_schema(file(directory, "test")).field("item").type)
    assert items() == before
