"""Reads rating, item and user files of a stated layout; ratings lazily, so that they may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from genrec.data.format import DataError
from genrec.data.movies import Movie, MovieParser, year_bucket
from genrec.data.source import SOURCE_ROW

RATING_COLUMNS = ("user_id", "item_id", "rating", "timestamp")


@dataclass(frozen=True)
class Layout:
    """The three files of a ratings dataset. Item and user files have the id first and may be latin-1.

    parse_movie: what a line of the items file says.
    ratings_header: the names of user, item, rating and timestamp in the first line; None: no such line, these columns.
    A separator of two characters ("::") is read as one, with an empty column between each two.
    users: the columns after the id in the users file, in its order; users_file None: users are those with ratings.
    """

    ratings_file: str
    ratings_separator: str
    ratings_header: tuple[str, ...] | None
    items_file: str
    items_separator: str
    parse_movie: MovieParser
    items_header: bool = False
    users_file: str | None = None
    users_separator: str = ""
    users_header: bool = False
    users: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files."""
        names = (self.ratings_file, self.items_file, self.users_file)
        return tuple(name for name in names if name is not None)


def scan_ratings(path: Path, layout: Layout) -> pl.LazyFrame:
    """user_id, item_id, timestamp (Int64), rating (Float64) and source_row (Int64), in the order of the file.

    Raises:
        DataError: the file is empty or its first line lacks a column. Bad rows are found when the frame is read.
    """
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    places, num_fields = _columns(path, layout)
    frame = pl.scan_csv(
        path,
        separator=layout.ratings_separator[0],
        has_header=False,
        skip_rows=int(layout.ratings_header is not None),
        row_index_name=SOURCE_ROW,
        quote_char=None,
        schema={f"field_{i}": pl.String for i in range(num_fields)},
        missing_columns="insert",  # nulls, which are found as bad rows
    )
    kinds = (pl.Int64, pl.Int64, pl.Float64, pl.Int64)
    columns = zip(RATING_COLUMNS, places, kinds, strict=True)
    typed = [pl.col(f"field_{place}").cast(kind).alias(name) for name, place, kind in columns]
    return frame.select(*typed, pl.col(SOURCE_ROW).cast(pl.Int64))


def _columns(path: Path, layout: Layout) -> tuple[list[int], int]:
    """Places of the four rating columns, and how many columns the file has."""
    if layout.ratings_header is None:
        stride = len(layout.ratings_separator)
        return [stride * i for i in range(len(RATING_COLUMNS))], stride * (len(RATING_COLUMNS) - 1) + 1
    with path.open(encoding="latin-1") as file:
        header = file.readline().rstrip("\r\n").split(layout.ratings_separator)
    if missing := [name for name in layout.ratings_header if name not in header]:
        raise DataError(f"{path} lacks the column {missing[0]!r}: its first line is {', '.join(header)[:200]!r}")
    return [header.index(name) for name in layout.ratings_header], len(header)


def ratings_to_events(ratings: pl.LazyFrame, path: Path, *, steps_per_star: int) -> pl.LazyFrame:
    """EventSource.events of ``ratings``: class = steps_per_star * rating - 1, for ratings up to 5 stars.

    Raises:
        DataError: some row is not whole or its rating is off the scale; all rows are read once to know.
    """
    steps = pl.col("rating") * steps_per_star
    is_rating = (steps == steps.round()) & steps.is_between(1, 5 * steps_per_star)
    is_whole = pl.all_horizontal(pl.col(*RATING_COLUMNS).is_not_null())
    bad_row = pl.when(~(is_whole & is_rating).fill_null(False)).then(pl.col(SOURCE_ROW)).min().alias("row")
    try:
        first_bad = ratings.select(bad_row).collect(engine="streaming")["row"][0]
    except pl.exceptions.PolarsError as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a ratings file of the expected layout ({reason})") from error
    if first_bad is not None:
        raise DataError(
            f"{path} has a bad data row {first_bad + 1}: expected user, item, a rating that is a multiple of"
            f" {1 / steps_per_star:g} up to 5, timestamp"
        )
    return ratings.select("user_id", "item_id", (steps - 1).cast(pl.Int64).alias("action"), "timestamp", SOURCE_ROW)


def read_items(path: Path, layout: Layout) -> pl.DataFrame:
    """EventSource.items of the items file, in its order, with the features genres and year (a bucket)."""
    ids: list[int] = []
    movies: list[Movie] = []
    for fields in _split_lines(path, layout.items_separator, skip_first=layout.items_header):
        line = layout.items_separator.join(fields)[:200]
        if not fields[0].isdecimal():
            raise DataError(f"{path} has a line that does not start with an item id: {line!r}")
        try:
            movies.append(layout.parse_movie(fields))
        except ValueError as error:
            raise DataError(f"{path} has the line {line!r}: {error}") from error
        ids.append(int(fields[0]))
    columns = {
        "item_id": ids,
        "genres": [list(movie.genres) for movie in movies],
        "year": [[] if movie.year is None else [year_bucket(movie.year)] for movie in movies],
    }
    names = pl.List(pl.String)
    return pl.DataFrame(columns, schema={"item_id": pl.Int64, "genres": names, "year": names})


def read_users(path: Path, layout: Layout) -> pl.DataFrame:
    """user_id (Int64) and the other columns (String) of the users file, one row a user; the first of a repeated id."""
    rows = list(_split_lines(path, layout.users_separator, skip_first=layout.users_header))
    for row in rows:
        if len(row) <= len(layout.users) or not row[0].isdigit():
            line = layout.users_separator.join(row)[:200]
            raise DataError(f"{path} has the line {line!r}, expected an id and {', '.join(layout.users)}")
    columns: dict[str, Sequence[int] | Sequence[str]] = {"user_id": [int(row[0]) for row in rows]}
    for place, name in enumerate(layout.users, start=1):
        columns[name] = [row[place] for row in rows]
    schema = {"user_id": pl.Int64, **dict.fromkeys(layout.users, pl.String)}
    return pl.DataFrame(columns, schema=schema).unique("user_id", keep="first", maintain_order=True)


def _split_lines(path: Path, separator: str, *, skip_first: bool) -> Iterator[list[str]]:
    # Every byte is some latin-1 character, so UTF-8 files pass too; only ids and plain attributes are used.
    with path.open(encoding="latin-1") as file:
        for number, line in enumerate(file):
            if line.strip() and not (skip_first and number == 0):
                yield line.rstrip("\r\n").split(separator)
