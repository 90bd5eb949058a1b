"""Each public format, on small files in exactly that format."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from genrec.data.format import DataError
from genrec.data.movielens import MOVIELENS, open_movielens

FORMATS = ["ml-100k", "ml-100k-recbole", "ml-1m", "ml-20m", "ml-25m"]


def small(kind):
    """The dataset, without the hash of the published ratings."""
    return dataclasses.replace(MOVIELENS[kind.removesuffix("-recbole")], content_hash=None, order_hash=None)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_reads_the_published_format(write_source, small_ratings, kind, zipped):
    dataset = small(kind)
    with open_movielens(dataset, write_source(kind, zipped=zipped), origin="local") as source:
        events = source.events.collect()
        assert events["user_id"].to_list() == [user for user, _, _, _ in small_ratings]
        assert events["item_id"].to_list() == [item for _, item, _, _ in small_ratings]
        assert events["action"].to_list() == [rating * dataset.steps_per_star - 1 for _, _, rating, _ in small_ratings]
        assert events["timestamp"].to_list() == [time for _, _, _, time in small_ratings]
        assert source.item_ids.to_list() == [10, 20, 30, 40, 50]
        assert source.num_actions == 5 * dataset.steps_per_star
        assert source.label_bits[0] == ("rating>=4", source.positive_class)


@pytest.mark.parametrize(
    ("kind", "contexts", "first"),
    [
        ("ml-100k", ["age", "gender", "occupation", "zip_code"], (2, "24", "M", "technician", "85711")),
        ("ml-100k-recbole", ["age", "gender", "occupation", "zip_code"], (2, "24", "M", "technician", "85711")),
        ("ml-1m", ["gender", "age", "occupation", "zip_code"], (2, "M", "25", "15", "55117")),
        ("ml-20m", [], (2,)),
    ],
)
def test_contexts(write_source, kind, contexts, first):
    with open_movielens(small(kind), write_source(kind), origin="local") as source:
        users = source.users.sort("user_id")
        assert users.columns == ["user_id", *contexts]
        assert users.row(0) == first


def test_half_stars_become_ten_classes(write_source):
    ratings = [(1, 10, stars / 2, stars) for stars in range(1, 11)]
    with open_movielens(small("ml-25m"), write_source("ml-25m", ratings=ratings), origin="local") as source:
        assert source.events.collect()["action"].to_list() == list(range(10))
        assert source.label_bits == (("rating>=4", 7), ("rating>=5", 9), ("rating>=3", 5), ("rating>=2", 3))
        assert source.positive_class == 7


def test_both_layouts_of_ml_100k_hash_alike_and_hash_is_checked(write_source):
    from genrec.data import movielens

    with open_movielens(small("ml-100k"), write_source("ml-100k"), origin="local") as source:
        rows = source.events.select("user_id", "item_id", pl.col("action") + 1, "timestamp").collect()
    ordered, by_number = movielens._hash_rows(rows), movielens._hash_rows(rows.sort(rows.columns))
    known = dataclasses.replace(MOVIELENS["ml-100k"], content_hash=by_number, order_hash=ordered)
    for kind in ("ml-100k", "ml-100k-recbole"):
        with open_movielens(known, write_source(kind), origin="local") as source:
            assert source.hash == by_number


def test_other_ratings_or_another_order_are_refused(write_source, small_ratings):
    with (
        pytest.raises(DataError, match="does not hold the published ml-100k: 9 ratings"),
        open_movielens(MOVIELENS["ml-100k"], write_source("ml-100k"), origin="local"),
    ):
        pass
    from genrec.data import movielens

    rows = pl.DataFrame(sorted(small_ratings), orient="row", schema=["u", "i", "r", "t"]).cast(pl.Int64)
    known = dataclasses.replace(MOVIELENS["ml-100k"], content_hash=movielens._hash_rows(rows), order_hash="0")
    with (
        pytest.raises(DataError, match="in another order than published"),
        open_movielens(known, write_source("ml-100k"), origin="local"),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "file", "text", "message"),
    [
        ("ml-1m", "ratings.dat", "1::10::6::5\n", "bad data row 1: .* multiple of 1 up to 5"),
        ("ml-1m", "ratings.dat", "1::10::3\n", "bad data row 1"),
        ("ml-1m", "ratings.dat", "1::ten::3::5\n", "not a ratings file of the expected layout"),
        ("ml-1m", "ratings.dat", "", "is empty"),
        ("ml-1m", "users.dat", "1::M::25\n", "expected an id and gender, age, occupation, zip_code"),
        ("ml-1m", "movies.dat", "x::y\n", "does not start with an item id"),
        ("ml-20m", "ratings.csv", "userId,movieId,stars,timestamp\n1,2,3,4\n", "lacks the column 'rating'"),
        (
            "ml-20m",
            "ratings.csv",
            "userId,movieId,rating,timestamp\n1,2,3.0,4\n1,2,3.3,4\n",
            "bad data row 2: .* of 0.5",
        ),
        ("ml-20m", "ratings.csv", "\x00\x01\x02", "lacks the column 'userId'"),
    ],
)
def test_damaged_files_are_one_sentence(write_source, kind, file, text, message):
    folder = write_source(kind)
    (folder / file).write_text(text)
    with pytest.raises(DataError, match=message) as caught, open_movielens(small(kind), folder, origin="local"):
        pass
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(write_source, tmp_path):
    folder = write_source("ml-1m")
    (folder / "users.dat").unlink()
    with (
        pytest.raises(DataError, match=r"lacks users.dat: expected ratings.dat, movies.dat, users.dat"),
        open_movielens(small("ml-1m"), folder, origin="local"),
    ):
        pass
    with (
        pytest.raises(DataError, match="does not exist"),
        open_movielens(small("ml-1m"), tmp_path / "nowhere", origin="local"),
    ):
        pass
    broken = tmp_path / "ml-1m.zip"
    broken.write_bytes(b"PK no zip")
    with (
        pytest.raises(DataError, match="neither a folder nor a whole zip file"),
        open_movielens(small("ml-1m"), broken, origin="local"),
    ):
        pass
