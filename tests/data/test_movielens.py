"""Each public format, on small files in exactly that format."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from genrec.data import movielens
from genrec.data.format import DataError
from genrec.data.movielens import MOVIELENS, open_movielens
from genrec.data.movies import Movie, parse_listed, parse_recbole_100k, year_bucket

FORMATS = ["ml-100k", "ml-100k-recbole", "ml-1m", "ml-20m", "ml-25m"]


def small(kind):
    """The dataset, without the hash of the published ratings."""
    dataset = MOVIELENS[kind.removesuffix("-recbole")]
    return dataclasses.replace(dataset, content_hash=None, order_hash=None, items_hash=None)


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
        assert source.items["item_id"].to_list() == [10, 20, 30, 40, 50]
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


@pytest.mark.parametrize(
    ("kind", "genres", "years"),
    [
        ("ml-100k", [["Comedy", "Drama"], [], [], ["Drama"], []], [["1995"], ["2005"], ["2015"], ["1800-1929"], []]),
        ("ml-1m", [["Comedy", "Romance"]] * 5, [["2001"]] * 5),
        ("ml-20m", [["Comedy", "Drama"]] * 5, [["1995"]] * 5),
        ("ml-25m", [["Comedy", "Drama"]] * 5, [["1995"]] * 5),
    ],
)
def test_item_features(write_source, kind, genres, years):
    kinds = ("ml-100k", "ml-100k-recbole") if kind == "ml-100k" else (kind,)
    for source_kind in kinds:
        with open_movielens(small(source_kind), write_source(source_kind), origin="local") as source:
            assert source.items.columns == ["item_id", "genres", "year"]
            assert source.items["genres"].to_list() == genres
            assert source.items["year"].to_list() == years


@pytest.mark.parametrize(
    ("parse", "line", "separator", "genres", "year"),
    [
        (parse_listed, "1::a::b (1999) (2000): c::Film-Noir|Action", "::", ("Action", "Film-Noir"), 2000),
        (parse_listed, '1,"No, year",(no genres listed)', ",", (), None),
        (parse_listed, "1,Movie 2012 (12345),", ",", (), None),
        (parse_listed, "1,Twice (1987) ,Sci-Fi|Sci-Fi|Children", ",", ("Children", "Sci-Fi"), 1987),
        (parse_recbole_100k, "1\ta\t\tChildren's Sci-Fi", "\t", ("Children's", "Sci-Fi"), None),
    ],
)
def test_lines_of_movies(parse, line, separator, genres, year):
    assert parse(line.split(separator)) == Movie(genres, year)


def test_year_buckets_are_in_the_order_of_time():
    buckets = [year_bucket(year) for year in range(1880, 2030)]
    assert buckets == sorted(buckets)
    assert [year_bucket(year) for year in (1888, 1929, 1930, 1939, 1979, 1980, 1984, 1985, 1989, 1990, 1998, 2019)] == (
        ["1800-1929"] * 2 + ["1930-1939"] * 2 + ["1970-1979"] + ["1980-1984"] * 2 + ["1985-1989"] * 2
        + ["1990", "1998", "2019"]
    )  # fmt: skip


def test_other_items_than_published_are_refused(write_source):
    with open_movielens(small("ml-100k"), write_source("ml-100k"), origin="local") as source:
        rows = source.events.select("user_id", "item_id", pl.col("action") + 1, "timestamp").collect()
        found = movielens.hash_items(source.items)
    hashes = {"content_hash": movielens._hash_rows(rows.sort(rows.columns)), "order_hash": movielens._hash_rows(rows)}
    for kind in ("ml-100k", "ml-100k-recbole"):
        known = dataclasses.replace(MOVIELENS["ml-100k"], **hashes, items_hash=found)
        with open_movielens(known, write_source(kind), origin="local") as source:
            assert source.hash == hashes["content_hash"]
        with (
            pytest.raises(DataError, match="does not hold the published items of ml-100k: genres and years of 5 items"),
            open_movielens(dataclasses.replace(known, items_hash="0"), write_source(kind), origin="local"),
        ):
            pass


def test_half_stars_become_ten_classes(write_source):
    ratings = [(1, 10, stars / 2, stars) for stars in range(1, 11)]
    with open_movielens(small("ml-25m"), write_source("ml-25m", ratings=ratings), origin="local") as source:
        assert source.events.collect()["action"].to_list() == list(range(10))
        assert source.label_bits == (("rating>=4", 7), ("rating>=5", 9), ("rating>=3", 5), ("rating>=2", 3))
        assert source.positive_class == 7


def test_other_ratings_or_another_order_are_refused(write_source, small_ratings):
    with (
        pytest.raises(DataError, match="does not hold the published ml-100k: 9 ratings"),
        open_movielens(MOVIELENS["ml-100k"], write_source("ml-100k"), origin="local"),
    ):
        pass
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
        ("ml-1m", "movies.dat", "x::y\n", "does not start with an item id: 'x::y'"),
        ("ml-1m", "movies.dat", "1::y (1999)\n", "has the line '1::y .1999.': expected id, title and genres"),
        ("ml-100k", "u.item", "1|a|b||c|1|0\n", "expected 5 columns and 19 genre flags"),
        ("ml-100k", "u.item", "1|a|b||c" + 19 * "|2" + "\n", "expected 5 columns and 19 genre flags"),
        ("ml-100k-recbole", "ml-100k.item", "header\n1\ta\t1999\n", "expected id, title, year and genres"),
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
