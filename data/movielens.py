"""The MovieLens datasets as GroupLens publishes them (https://grouplens.org/datasets/movielens/).

========  ================================  ======================================  ================================
dataset   user, item, rating, timestamp     contexts, beside the user id            catalogue
========  ================================  ======================================  ================================
ml-100k   u.data, tabs                      u.user: id|age|gender|occupation|zip    u.item: column 1, "|", latin-1
  or      ml-100k.inter, tabs, header       ml-100k.user: the same, tabs, header    ml-100k.item: column 1, tabs
ml-1m     ratings.dat, "::"                 users.dat: id::gender::age::work::zip   movies.dat: column 1, "::", latin-1
ml-20m    ratings.csv: userId, movieId,     none                                    movies.csv: movieId
ml-25m    rating, timestamp, header
========  ================================  ======================================  ================================

The files of items also give two item features, genres and year (movies.py).

The second layout of ml-100k is RecBole's: the same rows in the order of u.data, which hashes check. Ratings are 1 to 5
(ml-100k, ml-1m: class = rating - 1) or 0.5 to 5 in halves (ml-20m, ml-25m: class = 2 * rating - 1). Label bits: rating
>= 4 (bit 0), >= 5, >= 3, >= 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from genrec.data.format import DataError
from genrec.data.movies import parse_grouplens_100k, parse_listed, parse_recbole_100k
from genrec.data.ratings import Layout, ratings_to_events, read_items, read_users, scan_ratings
from genrec.data.source import EventSource
from genrec.data.sources import Archive, Wheel, hash_files, local_files

LABEL_RATINGS = (4, 5, 3, 2)


@dataclass(frozen=True)
class MovieLens:
    r"""One MovieLens dataset. steps_per_star: 1 for whole stars, 2 for half stars.

    content_hash, order_hash: sha256 of the lines "user\titem\trating\ttimestamp\n" of the published ratings, sorted
    by number and in the file's own order; items_hash: hash_items. Where they are stated, every source must give them.
    """

    name: str
    archive_md5: str
    layouts: tuple[Layout, ...]
    steps_per_star: int
    wheel: Wheel | None = None
    content_hash: str | None = None
    order_hash: str | None = None
    items_hash: str | None = None

    @property
    def archive(self) -> Archive:
        """GroupLens' zip file."""
        return Archive(url=f"https://files.grouplens.org/datasets/movielens/{self.name}.zip", md5=self.archive_md5)

    @property
    def label_bits(self) -> tuple[tuple[str, int], ...]:
        """Label bit names and the smallest class that sets them."""
        return tuple((f"rating>={stars}", stars * self.steps_per_star - 1) for stars in LABEL_RATINGS)


_GROUPLENS_100K = Layout(
    ratings_file="u.data",
    ratings_separator="\t",
    ratings_header=None,
    items_file="u.item",
    items_separator="|",
    parse_movie=parse_grouplens_100k,
    users_file="u.user",
    users_separator="|",
    users=("age", "gender", "occupation", "zip_code"),
)
_RECBOLE_100K = Layout(
    ratings_file="ml-100k.inter",
    ratings_separator="\t",
    ratings_header=("user_id:token", "item_id:token", "rating:float", "timestamp:float"),
    items_file="ml-100k.item",
    items_separator="\t",
    parse_movie=parse_recbole_100k,
    items_header=True,
    users_file="ml-100k.user",
    users_separator="\t",
    users_header=True,
    users=("age", "gender", "occupation", "zip_code"),
)
_DAT = Layout(
    ratings_file="ratings.dat",
    ratings_separator="::",
    ratings_header=None,
    items_file="movies.dat",
    items_separator="::",
    parse_movie=parse_listed,
    users_file="users.dat",
    users_separator="::",
    users=("gender", "age", "occupation", "zip_code"),
)
_CSV = Layout(
    ratings_file="ratings.csv",
    ratings_separator=",",
    ratings_header=("userId", "movieId", "rating", "timestamp"),
    items_file="movies.csv",
    items_separator=",",
    parse_movie=parse_listed,
    items_header=True,
)

_DATASETS = (
    MovieLens(
        name="ml-100k",
        archive_md5="0e33842e24a9c977be4e0107933c0723",
        layouts=(_GROUPLENS_100K, _RECBOLE_100K),
        steps_per_star=1,
        wheel=Wheel(requirement="recbole==1.2.1", folder="recbole/dataset_example/ml-100k"),
        content_hash="6cfffb52c89b05fbc3afb75f6912eeda04c81c2add0dc58e773a0ef6c8adb160",
        order_hash="06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
        items_hash="f07a35ba7681fcaf1375178b39fbbd523c929842571ff4c5b77a846cfd447a5d",
    ),
    MovieLens(name="ml-1m", archive_md5="c4d9eecfca2ab87c1945afe126590906", layouts=(_DAT,), steps_per_star=1),
    MovieLens(name="ml-20m", archive_md5="cd245b17a1ae2cc31bb14903e1204af3", layouts=(_CSV,), steps_per_star=2),
    MovieLens(name="ml-25m", archive_md5="6b51fb2759a8657d3bfcbfc42b592ada", layouts=(_CSV,), steps_per_star=2),
)
MOVIELENS = {dataset.name: dataset for dataset in _DATASETS}


@contextmanager
def open_movielens(dataset: MovieLens, path: Path, *, origin: str) -> Iterator[EventSource]:
    """The events of ``dataset`` in folder or zip ``path``; valid inside the ``with``, since a zip is unpacked for it.

    Raises:
        DataError: a file is missing, cannot be parsed, has a rating off the scale, or isn't the published data.
    """
    with local_files(path, wanted=[layout.files for layout in dataset.layouts]) as files:
        layout = next(layout for layout in dataset.layouts if layout.ratings_file in files)
        ratings = scan_ratings(files[layout.ratings_file], layout)
        events = ratings_to_events(ratings, files[layout.ratings_file], steps_per_star=dataset.steps_per_star)
        if layout.users_file is not None:
            users = read_users(files[layout.users_file], layout)
        else:
            users = events.select("user_id").unique().collect(engine="streaming")
        items = read_items(files[layout.items_file], layout)
        yield EventSource(
            name=dataset.name,
            origin=origin,
            path=path,
            hash=_source_hash(dataset, ratings, items, files),
            events=events,
            users=users,
            items=items,
            num_actions=5 * dataset.steps_per_star,
            label_bits=dataset.label_bits,
            positive_class=dataset.label_bits[0][1],
        )


def _source_hash(dataset: MovieLens, ratings: pl.LazyFrame, items: pl.DataFrame, files: dict[str, Path]) -> str:
    """The hash of the files' bytes, or, where the content's is stated, that one, which is the same for all layouts."""
    if dataset.content_hash is None:
        return hash_files(list(files.values()))
    rows = ratings.select("user_id", "item_id", pl.col("rating").cast(pl.Int64), "timestamp").collect()
    path = next(iter(files.values()))
    if (found := _hash_rows(rows.sort(rows.columns))) != dataset.content_hash:
        raise DataError(
            f"{path} does not hold the published {dataset.name}: {len(rows)} ratings with content hash {found[:12]},"
            f" expected {dataset.content_hash[:12]}"
        )
    if _hash_rows(rows) != dataset.order_hash:
        raise DataError(
            f"{path} holds the ratings of {dataset.name} in another order than published, which would change the order"
            " of events of equal time: use the published file"
        )
    if (found := hash_items(items)) != dataset.items_hash:
        raise DataError(
            f"{path.parent} does not hold the published items of {dataset.name}: genres and years of {len(items)} items"
            f" have the hash {found[:12]}, expected {str(dataset.items_hash)[:12]}"
        )
    return dataset.content_hash


def _hash_rows(rows: pl.DataFrame) -> str:
    return hashlib.sha256(rows.write_csv(include_header=False, separator="\t").encode()).hexdigest()


def hash_items(items: pl.DataFrame) -> str:
    r"""sha256 of the lines "item\tgenre|genre\tyear\n" of the items, sorted by item."""
    joined = items.sort("item_id").with_columns(pl.col("genres", "year").list.join("|"))
    return _hash_rows(joined.select("item_id", "genres", "year"))
