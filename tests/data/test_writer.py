"""What is written: order, vocabularies, counts, and that chunks of any size give the same rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest

from genrec.data import writer
from genrec.data.format import DataError, ItemFeature, read_metadata
from genrec.data.item_features import read_padded_values
from genrec.data.movielens import MOVIELENS, open_movielens
from genrec.data.writer import write_dataset


@pytest.fixture
def prepared_1m(write_source, tmp_path):
    dataset = dataclasses.replace(MOVIELENS["ml-1m"])
    directory = tmp_path / "prepared"
    directory.mkdir()
    with open_movielens(dataset, write_source("ml-1m"), origin="local") as source:
        write_dataset(source, directory, rule="leave_last", holdout=1, seed=0)
    return directory


def rows(directory, split):
    return {row["user_id"]: row for row in pl.read_parquet(directory / split / "*.parquet").to_dicts()}


def original_items(directory, items):
    vocabulary = pl.read_parquet(directory / "vocabulary" / "item.parquet")["original_id"]
    return [vocabulary[item] for item in items]


def test_ties_keep_source_order(prepared_1m):
    test = rows(prepared_1m, "test")
    assert original_items(prepared_1m, test[5]["item"]) == [40, 30, 20, 10]
    assert original_items(prepared_1m, test[2]["item"]) == [20, 30, 10, 40]
    assert test[5]["timestamp"] == [900, 1000, 1000, 1000]
    assert "order of rows" in read_metadata(prepared_1m).tie_rule


def test_users_of_one_file_only_are_kept_and_counted(prepared_1m):
    train, metadata = rows(prepared_1m, "train"), read_metadata(prepared_1m)
    assert sorted(train) == [2, 3, 5, 9]
    assert (train[9]["item"], train[9]["num_events"]) == ([], 0)
    assert metadata.num_users == 4
    assert metadata.notes == {
        "users_without_events": 1,
        "users_without_profile": 1,
        "items_without_events": 1,
        "items_not_in_catalogue": 0,
        "users_too_short_to_split": 1,
    }
    assert metadata.dropped == {}
    ages = pl.read_parquet(prepared_1m / "vocabulary" / "age.parquet")["value"]
    assert ages[train[3]["context_age"]] is None
    assert ages[train[5]["context_age"]] == "1"
    assert metadata.contextual_features == {"user_id": 4, "gender": 3, "age": 4, "occupation": 4, "zip_code": 4}


def test_splits_nest(prepared_1m):
    train, valid, test = (rows(prepared_1m, split) for split in ("train", "valid", "test"))
    assert sorted(valid) == sorted(test) == [2, 5]  # user 3 has one event: too short, in train only
    assert train[3]["num_events"] == train[3]["num_targets"] == 1
    for user in (2, 5):
        assert test[user]["item"][:-1] == valid[user]["item"]
        assert valid[user]["item"][:-1] == train[user]["item"]
        assert valid[user]["num_targets"] == test[user]["num_targets"] == 1
    metadata = read_metadata(prepared_1m)
    assert metadata.num_targets == {"train": 5, "valid": 2, "test": 2}
    assert metadata.num_rows == {"train": 4, "valid": 2, "test": 2}


@pytest.mark.parametrize("rule", ["leave_last", "user", "global_time"])
def test_chunks_do_not_matter(make_dataset, rule):
    lengths = [3, 0, 7, 1, 12, 5, 4, 9, 2, 6]
    whole = make_dataset(lengths, rule=rule, name="whole")
    pieces = make_dataset(lengths, rule=rule, name="pieces", chunk_events=8)
    assert len(list((pieces / "train").glob("*.parquet"))) > 3
    for split in ("train", "valid", "test"):
        expected = pl.read_parquet(whole / split / "*.parquet")
        assert pl.read_parquet(pieces / split / "*.parquet").equals(expected)


@pytest.mark.parametrize("rule", ["leave_last", "user", "global_time"])
def test_events_in_no_row_would_be_counted(make_source, tmp_path, monkeypatch, rule):
    plan_split = writer.plan_split

    def lose_two(*args, **options):
        plan = plan_split(*args, **options)
        num_events = {split: np.maximum(counts - 2, 0) for split, counts in plan.num_events.items()}
        return dataclasses.replace(plan, num_events=num_events)

    for name, dropped in (("all", {}), ("fewer", {"events_in_no_split": 2 * 4})):
        (tmp_path / name).mkdir()
        source = make_source([9, 8, 0, 5, 7])
        assert write_dataset(source, tmp_path / name, rule=rule, holdout=1, seed=0).dropped == dropped
        monkeypatch.setattr(writer, "plan_split", lose_two)


def test_no_events_and_negative_ids_are_refused(make_source, tmp_path):
    with pytest.raises(DataError, match=r"^toy\.csv has no events"):
        write_dataset(make_source([0, 0]), tmp_path, rule="leave_last", holdout=1, seed=0)
    source = make_source([3])
    negative = dataclasses.replace(source, events=source.events.with_columns(item_id=pl.col("item_id") - 1))
    with pytest.raises(DataError, match="has the item id -1, allowed are whole numbers from 0"):
        write_dataset(negative, tmp_path, rule="leave_last", holdout=1, seed=0)


def test_ids_beyond_32_bits(make_source, tmp_path):
    source = make_source([6])
    moved = pl.col("item_id") + 2**40
    events, items = source.events.with_columns(item_id=moved), source.items.with_columns(item_id=moved)
    large = dataclasses.replace(source, events=events, items=items)
    write_dataset(large, tmp_path, rule="leave_last", holdout=1, seed=0)
    assert rows(tmp_path, "test")[100]["item"] == list(range(6))
    assert original_items(tmp_path, [0, 5]) == [2**40, 2**40 + 5]


def test_item_features(make_source, tmp_path):
    source = make_source([6])
    items = source.items.filter(pl.col("item_id") != 2)  # rated, but not in the catalogue
    items = pl.concat([items, pl.DataFrame([(99, ["c"], [])], schema=items.schema, orient="row")])
    write_dataset(dataclasses.replace(source, items=items), tmp_path, rule="leave_last", holdout=1, seed=0)
    written = pl.read_parquet(tmp_path / "vocabulary" / "item.parquet")
    assert written.columns == ["original_id", "tags", "size"]
    assert written["original_id"].to_list() == [0, 1, 2, 3, 4, 5, 99]
    assert written["tags"].to_list() == [[], [4], [], [1, 2, 4], [], [4], [3]]
    assert written["size"].to_list() == [[], [2], [], [2], [1], [], []]
    metadata = read_metadata(tmp_path)
    assert metadata.item_features == {
        "tags": ItemFeature(num_values=5, max_per_item=3, names=("(none)", "a", "b", "c", "d")),
        "size": ItemFeature(num_values=3, max_per_item=1, names=("(none)", "0", "1")),
    }
    assert metadata.notes["items_not_in_catalogue"] == 1
    padded = read_padded_values(tmp_path, metadata, "tags")
    assert padded.tolist() == [[0, 0, 0], [4, 0, 0], [0, 0, 0], [1, 2, 4], [0, 0, 0], [4, 0, 0], [3, 0, 0]]


def test_a_feature_that_no_item_has(make_source, tmp_path):
    source = make_source([4])
    bare = dataclasses.replace(source, items=source.items.with_columns(pl.col("tags").list.head(0)))
    metadata = write_dataset(bare, tmp_path, rule="leave_last", holdout=1, seed=0)
    assert metadata.item_features["tags"] == ItemFeature(num_values=1, max_per_item=1, names=("(none)",))
    assert read_padded_values(tmp_path, metadata, "tags").tolist() == [[0]] * 4
