"""Small sources in exactly the published formats, and prepared datasets made of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from genrec.data.source import SOURCE_ROW, EventSource
from genrec.data.writer import write_dataset

Rating = tuple[int, int, float, int]  # user, item, rating, timestamp

# User 5 has three events at one time, listed with descending item ids; user 9 has none; user 3 has no profile.
RATINGS: list[Rating] = [
    (5, 30, 4, 1000),
    (2, 10, 5, 1500),
    (5, 20, 3, 1000),
    (5, 10, 1, 1000),
    (2, 20, 2, 1400),
    (3, 30, 5, 1600),
    (5, 40, 5, 900),
    (2, 30, 4, 1450),
    (2, 40, 1, 1700),
]


def _whole(value: float) -> str:
    return f"{value:g}"


def _write_grouplens_100k(folder: Path, ratings: Sequence[Rating]) -> None:
    lines = [f"{u}\t{i}\t{_whole(r)}\t{t}\n" for u, i, r, t in ratings]
    (folder / "u.data").write_text("".join(lines))
    flags = {10: "0000010010000000000", 50: "1" + 18 * "0"}  # Comedy and Drama; unknown
    items = [
        f"{i}|Caf\xe9 {i} ({1985 + i})|01-Jan-1996||http://x/{i}|" + "|".join(flags.get(i, "0" * 19)) + "\n"
        for i in (10, 20, 30)
    ]
    items += ["40|Land 40 (1925) (V)|01-Jan-1995||http://x/40|" + "|".join("0000000010000000000") + "\n"]
    items += ["50|unknown||||" + "|".join(flags[50]) + "\n"]
    (folder / "u.item").write_text("".join(items), encoding="latin-1")
    (folder / "u.user").write_text("2|24|M|technician|85711\n5|53|F|other|94043\n9|23|M|writer|T8H1N\n")


def _write_recbole_100k(folder: Path, ratings: Sequence[Rating]) -> None:
    lines = [f"{u}\t{i}\t{_whole(r)}\t{t}\n" for u, i, r, t in ratings]
    (folder / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(lines)
    )
    items = [f"{i}\tCaf\xe9 {i}\t{1985 + i}\t{'Drama Comedy' if i == 10 else ''}\n" for i in (10, 20, 30)]
    items += ["40\tLand 40 (1925)\tV\tDrama\n", "50\tunkonwn\tunkonwn\tunknown\n"]
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    (folder / "ml-100k.item").write_text(header + "".join(items), encoding="utf-8")
    users = "2\t24\tM\ttechnician\t85711\n5\t53\tF\tother\t94043\n9\t23\tM\twriter\tT8H1N\n"
    header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    (folder / "ml-100k.user").write_text(header + users)


def _write_1m(folder: Path, ratings: Sequence[Rating]) -> None:
    lines = [f"{u}::{i}::{_whole(r)}::{t}\n" for u, i, r, t in ratings]
    (folder / "ratings.dat").write_text("".join(lines))
    items = [f"{i}::Am\xe9lie: Part {i} (2001)::Comedy|Romance\n" for i in (10, 20, 30, 40, 50)]
    (folder / "movies.dat").write_text("".join(items), encoding="latin-1")
    (folder / "users.dat").write_text("2::M::25::15::55117\n5::F::1::10::48067\n9::M::56::16::70072\n")


def _write_csv(folder: Path, ratings: Sequence[Rating]) -> None:
    lines = [f"{u},{i},{float(r)},{t}\n" for u, i, r, t in ratings]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    items = [f'{i},"American President, The {i} (1995)",Comedy|Drama\n' for i in (10, 20, 30, 40, 50)]
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "".join(items), encoding="utf-8")


_WRITERS = {
    "ml-100k": _write_grouplens_100k,
    "ml-100k-recbole": _write_recbole_100k,
    "ml-1m": _write_1m,
    "ml-20m": _write_csv,
    "ml-25m": _write_csv,
}


@pytest.fixture(scope="session")
def small_ratings() -> list[Rating]:
    return RATINGS


@pytest.fixture
def write_source(tmp_path: Path) -> Callable[..., Path]:
    """write_source(format, ratings=..., zipped=False): a folder or zip in the published format."""

    def write(kind: str, *, ratings: Sequence[Rating] = RATINGS, zipped: bool = False) -> Path:
        name = kind.removesuffix("-recbole")
        folder = tmp_path / f"source-{kind}" / name
        folder.mkdir(parents=True, exist_ok=True)
        _WRITERS[kind](folder, ratings)
        if not zipped:
            return folder
        path = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, f"{name}/{file.name}")
        return path

    return write


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Path]:
    """make_dataset(lengths, ...): a prepared dataset whose user number u has lengths[u] events.

    Item ids are unique over all events (event e of the dataset is item e), so that tests can tell events apart.
    """

    def make(
        lengths: Sequence[int],
        *,
        rule: str = "leave_last",
        holdout: int = 2,
        name: str = "toy",
        chunk_events: int = 1000,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir(parents=True)
        source = event_source(lengths)
        write_dataset(source, directory, rule=rule, holdout=holdout, seed=1, chunk_events=chunk_events)
        return directory

    return make


@pytest.fixture(scope="session")
def make_source() -> Callable[[Sequence[int]], EventSource]:
    return event_source


def event_source(lengths: Sequence[int]) -> EventSource:
    total = int(np.sum(lengths))
    users = np.repeat(np.arange(len(lengths)), lengths)
    events = pl.DataFrame(
        {
            "user_id": users + 100,
            "item_id": np.arange(total),
            "action": np.arange(total) % 5,
            "timestamp": np.arange(total) * 10,
            SOURCE_ROW: np.arange(total),
        },
        schema=dict.fromkeys(("user_id", "item_id", "action", "timestamp", SOURCE_ROW), pl.Int64),
    )
    ids = [100 + user for user in range(len(lengths))]
    profiles = pl.DataFrame({"user_id": ids, "parity": [str(user % 2) for user in ids]})
    # Of item i: no tag to three of a to d, and one size, which every fifth lacks.
    tags = [["d", "b", "a"][: item % 4] for item in range(total)]
    sizes = [[] if item % 5 == 0 else [str(item % 2)] for item in range(total)]
    names = pl.List(pl.String)
    schema = {"item_id": pl.Int64, "tags": names, "size": names}
    catalogue = pl.DataFrame({"item_id": range(total), "tags": tags, "size": sizes}, schema=schema)
    return EventSource(
        name="toy",
        origin="test",
        path=Path("toy.csv"),
        hash="0" * 64,
        events=events.lazy(),
        users=profiles,
        items=catalogue,
        num_actions=5,
        label_bits=(("rating>=4", 3), ("rating>=5", 4)),
        positive_class=3,
    )
