"""A movie's genres and release year, from a line of each published movies file.

::

    ml-100k, u.item   1|Toy Story (1995)|01-Jan-1995||http...|0|0|0|1|1|1|0...    19 flags, one a genre of GENRES_100K
    ... RecBole's     1    Toy Story    1995    Animation Children's Comedy       tabs
    ml-1m             1::Toy Story (1995)::Animation|Children's|Comedy
    ml-20m, ml-25m    1,Toy Story (1995),Adventure|Animation|Children|Comedy|Fantasy

The year is the last one in parentheses in the title; u.item's release date is often a year later. RecBole's file has
the year in a column of its own, except for one movie whose title still ends in it. Years become buckets. Names for "no
genre" are no genre. Both files of ml-100k give the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
NO_GENRE = ("unknown", "(no genres listed)", "")
NUM_FIELDS_100K = 5 + len(GENRES_100K)
YEAR = re.compile(r"\(((?:18|19|20)\d\d)\)")
FIRST_BUCKET_STOP = 1930


@dataclass(frozen=True)
class Movie:
    """genres: in order of their names. year: None where it isn't known."""

    genres: tuple[str, ...]
    year: int | None


# From the fields of a line to what it says; raises ValueError where they are not of the layout.
MovieParser = Callable[[Sequence[str]], Movie]


def parse_grouplens_100k(fields: Sequence[str]) -> Movie:
    """Of u.item, split at "|"."""
    flags = fields[NUM_FIELDS_100K - len(GENRES_100K) :]
    if len(fields) != NUM_FIELDS_100K or not set(flags) <= {"0", "1"}:
        raise ValueError(f"expected 5 columns and {len(GENRES_100K)} genre flags")
    return _movie(fields[1], [genre for genre, flag in zip(GENRES_100K, flags, strict=True) if flag == "1"])


def parse_recbole_100k(fields: Sequence[str]) -> Movie:
    """Of RecBole's ml-100k.item, split at tabs."""
    if len(fields) != 4:
        raise ValueError("expected id, title, year and genres")
    _, title, year, genres = fields
    return _movie(f"{title} ({year})", genres.split(" "))


def parse_listed(fields: Sequence[str]) -> Movie:
    """Of movies.dat or movies.csv, split at its separator, which titles may hold too."""
    if len(fields) < 3:
        raise ValueError("expected id, title and genres")
    return _movie(" ".join(fields[1:-1]), fields[-1].split("|"))


def year_bucket(year: int) -> str:
    """Up to 1929, decades to 1979, five years to 1989, then each year by itself; the names sort by time."""
    if year < FIRST_BUCKET_STOP:
        return f"1800-{FIRST_BUCKET_STOP - 1}"
    if year >= 1990:
        return str(year)
    size = 10 if year < 1980 else 5
    first = year - year % size
    return f"{first}-{first + size - 1}"


def _movie(title: str, genres: Sequence[str]) -> Movie:
    years = YEAR.findall(title)
    named = sorted({genre.strip() for genre in genres} - set(NO_GENRE))
    return Movie(genres=tuple(named), year=int(years[-1]) if years else None)
