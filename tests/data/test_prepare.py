"""prepare: where sources come from, no-op, atomic replacement, and its errors."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import polars as pl
import pytest

from genrec.configs.schema import UnavailableError
from genrec.data import prepare as prepare_module
from genrec.data import sources
from genrec.data.format import DataError, read_metadata
from genrec.data.movielens import MOVIELENS
from genrec.data.prepare import prepare
from genrec.data.sources import Archive, FetchError, Wheel, fetch_archive, fetch_wheel


@pytest.fixture
def small_100k(monkeypatch):
    """ml-100k without the hashes of the published ratings."""
    small = dataclasses.replace(MOVIELENS["ml-100k"], content_hash=None, order_hash=None, items_hash=None)
    monkeypatch.setitem(prepare_module.MOVIELENS, "ml-100k", small)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_args, **_options):
        raise FetchError("no network")

    monkeypatch.setattr(prepare_module, "fetch_archive", refuse)
    monkeypatch.setattr(prepare_module, "fetch_wheel", refuse)


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    stats = {path: path.stat() for path in directory.rglob("*")}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.parametrize("split", ["leave_last", "user", "global_time"])
def test_second_run_is_a_no_op(write_source, tmp_path, split):
    output, source = tmp_path / "out", write_source("ml-1m")
    metadata = prepare("ml-1m", output=output, source=source, split=split, holdout=1)
    before = snapshot(output)
    assert prepare("ml-1m", output=output, source=source, split=split, holdout=1) == metadata
    assert snapshot(output) == before


@pytest.fixture
def prepared(write_source, tmp_path):
    """prepared(**options): whole ml-1m split with ``options`` in a folder, its source and what the folder holds."""

    def prepare_1m(**options):
        output, source = tmp_path / "out", write_source("ml-1m")
        prepare("ml-1m", output=output, source=source, **options)
        return output, source, snapshot(output)

    return prepare_1m


OTHERS = [
    ({"holdout": 1}, {"holdout": 2}, r"its split is \{'rule': 'leave_last', 'holdout': 1\}"),
    ({"holdout": 1}, {"holdout": 1, "split": "user"}, "its split is .*'leave_last'"),
    (
        {"holdout": 1, "split": "user", "seed": 1},
        {"holdout": 1, "split": "user", "seed": 2},
        "its split is .*'seed': 1",
    ),
    ({"holdout": 1, "split": "global_time"}, {"holdout": 1}, "its split is .*'global_time'"),
]


@pytest.mark.parametrize(("held", "asked", "part"), OTHERS)
def test_another_split_does_not_replace_a_dataset(prepared, held, asked, part):
    output, source, before = prepared(**held)
    with pytest.raises(DataError, match=f"out holds another dataset, {part}.*: give another folder or delete it"):
        prepare("ml-1m", output=output, source=source, **asked)
    assert snapshot(output) == before


@pytest.mark.usefixtures("small_100k")
def test_another_name_does_not_replace_a_dataset_even_damaged_or_old(prepared, write_source):
    output, _, before = prepared(holdout=1)
    source = write_source("ml-100k")
    with pytest.raises(DataError, match="holds another dataset, its name is 'ml-1m' instead of 'ml-100k'"):
        prepare("ml-100k", output=output, source=source, holdout=1)
    assert snapshot(output) == before
    old = {**json.loads((output / "metadata.json").read_text()), "format_version": 1}
    (output / "metadata.json").write_text(json.dumps(old))
    with pytest.raises(DataError, match="its name is 'ml-1m' instead of 'ml-100k'"):
        prepare("ml-100k", output=output, source=source, holdout=1)


def test_another_source_does_not_replace_a_dataset(prepared, write_source, small_ratings):
    output, source, before = prepared(holdout=1)
    write_source("ml-1m", ratings=[*small_ratings, (3, 10, 2, 5)])
    with pytest.raises(DataError, match=r"holds another dataset, its source_hash is '[0-9a-f]{64}' instead of"):
        prepare("ml-1m", output=output, source=source, holdout=1)
    assert snapshot(output) == before


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"split": 3}'])
def test_what_cannot_be_told_is_not_replaced(prepared, text):
    output, source, _ = prepared(holdout=1)
    (output / "metadata.json").write_text(text)
    with pytest.raises(DataError, match=r"metadata.json is damaged .*: give another folder or delete"):
        prepare("ml-1m", output=output, source=source, holdout=1)
    assert (output / "metadata.json").read_text() == text


def damage(output: Path) -> Path:
    """Overwrites a file of the dataset, so that preparing it again replaces it."""
    path = next((output / "test").iterdir())
    path.write_bytes(b"x")
    return path


def test_an_older_format_is_refused_by_readers_and_prepared_again(write_source, tmp_path):
    output, source = tmp_path / "out", write_source("ml-1m")
    metadata = prepare("ml-1m", output=output, source=source, holdout=1)
    old = json.loads((output / "metadata.json").read_text())
    del old["item_features"]
    (output / "metadata.json").write_text(json.dumps({**old, "format_version": 1}))
    with pytest.raises(DataError, match="has format version 1, this version reads 2: prepare the dataset again"):
        read_metadata(output)
    assert prepare("ml-1m", output=output, source=source, holdout=1) == metadata == read_metadata(output)


@pytest.mark.usefixtures("small_100k")
def test_both_layouts_of_ml_100k_give_the_same_files(write_source, tmp_path):
    prepared = [
        prepare("ml-100k", output=tmp_path / kind, source=write_source(kind), holdout=1)
        for kind in ("ml-100k", "ml-100k-recbole")
    ]
    assert prepared[0].files == prepared[1].files and prepared[0].item_features == prepared[1].item_features


def test_damaged_output_is_prepared_again(prepared):
    output, source, _ = prepared(holdout=1)
    content = next((output / "test").iterdir()).read_bytes()
    damaged = damage(output)
    prepare("ml-1m", output=output, source=source, holdout=1)
    assert damaged.read_bytes() == content


def test_a_crash_leaves_the_old_dataset_and_no_rubbish(write_source, tmp_path, monkeypatch):
    output, source = tmp_path / "out", write_source("ml-1m")
    metadata = prepare("ml-1m", output=output, source=source, holdout=1)

    def crash(*_args, **_options):
        raise KeyboardInterrupt

    damage(output)
    monkeypatch.setattr(prepare_module, "write_dataset", crash)
    with pytest.raises(KeyboardInterrupt):
        prepare("ml-1m", output=output, source=source, holdout=1)
    assert read_metadata(output) == metadata
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_a_failed_rename_puts_the_old_dataset_back(write_source, tmp_path, monkeypatch):
    output, source = tmp_path / "out", write_source("ml-1m")
    metadata = prepare("ml-1m", output=output, source=source, holdout=1)
    damage(output)
    rename = Path.rename

    def fail_for_fresh(self, target):
        if self.name == "fresh":
            raise OSError("disk on fire")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_fresh)
    with pytest.raises(OSError, match="disk on fire"):
        prepare("ml-1m", output=output, source=source, holdout=1)
    assert read_metadata(output) == metadata


def test_refuses_to_replace_something_else(write_source, tmp_path):
    output = tmp_path / "home"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="exists and is not a prepared dataset"):
        prepare("ml-1m", output=output, source=write_source("ml-1m"), holdout=1)
    with pytest.raises(DataError, match="exists and is not a prepared dataset"):
        prepare("ml-1m", output=output / "thesis.txt", source=write_source("ml-1m"), holdout=1)
    assert (output / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "Error writing bytes to file"), "No space left on device"),
        (OSError(errno.EDQUOT, "Error writing bytes to file"), "Disk quota exceeded"),
        (pl.exceptions.ComputeError("No space left on device: x"), "No space left on device"),
    ],
    ids=["of pyarrow", "a quota", "of polars"],
)
def test_a_full_disk(write_source, tmp_path, monkeypatch, error, reason):
    def write(*_, **__):
        raise error

    monkeypatch.setattr("genrec.data.prepare.write_dataset", write)
    source = write_source("ml-1m")
    with pytest.raises(DataError, match=rf"^output .*out cannot be written \({reason}\)$"):
        prepare("ml-1m", output=tmp_path / "out", source=source, holdout=1)
    assert not list(tmp_path.glob("*out*"))


def test_output_that_cannot_be_written(write_source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        prepare("ml-1m", output=tmp_path / "file" / "out", source=write_source("ml-1m"), holdout=1)


@pytest.mark.usefixtures("offline")
def test_offline_without_source_says_what_to_put_where(tmp_path):
    with pytest.raises(
        DataError, match=r"ml-100k could not be fetched .* pass the zip, or a folder with u.data u.item"
    ):
        prepare("ml-100k", output=tmp_path / "out")
    with pytest.raises(DataError, match=r"download https://files.grouplens.org/datasets/movielens/ml-25m.zip"):
        prepare("ml-25m", output=tmp_path / "out")


@pytest.mark.usefixtures("small_100k", "offline")
def test_falls_back_from_archive_to_wheel_and_needs_neither_again(write_source, tmp_path, monkeypatch):
    folder = write_source("ml-100k-recbole")
    monkeypatch.setattr(prepare_module, "fetch_wheel", lambda wheel, _folder: folder)
    metadata = prepare("ml-100k", output=tmp_path / "out", holdout=1)
    assert metadata.source == "recbole==1.2.1"
    monkeypatch.undo()
    monkeypatch.setattr(prepare_module, "_open", None)  # calling it would fail
    assert prepare("ml-100k", output=tmp_path / "out", holdout=1) == metadata


def test_names():
    with pytest.raises(DataError, match=r"dataset is 'ml-10m', allowed are 'ml-100k', 'ml-1m', .* 'custom'"):
        prepare("ml-10m", output=Path("unused"))
    for name in ("kuairand-pure", "kuairand-1k", "kuairand-27k", "custom"):
        with pytest.raises(UnavailableError, match=f"dataset {name!r} is not available in this version"):
            prepare(name, output=Path("unused"))


def test_fetch_archive_checks_the_md5(tmp_path):
    published = tmp_path / "ml-x.zip"
    published.write_bytes(b"content")
    url = published.as_uri()
    (tmp_path / "to").mkdir()
    md5 = hashlib.md5(b"content").hexdigest()
    assert fetch_archive(Archive(url=url, md5=md5), tmp_path / "to").read_bytes() == b"content"
    with pytest.raises(FetchError, match="its md5 is"):
        fetch_archive(Archive(url=url, md5="0" * 32), tmp_path / "to")
    with pytest.raises(FetchError, match=r"missing.zip"):
        fetch_archive(Archive(url=url.replace("ml-x", "missing"), md5=md5), tmp_path / "to")


def test_fetch_wheel_unpacks_only_the_data(tmp_path, monkeypatch):
    def download(command, **_options):
        assert "--no-deps" in command and command[1:4] == ["-m", "pip", "download"]
        with zipfile.ZipFile(tmp_path / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("recbole/dataset_example/ml-100k/ml-100k.inter", "rows")
            wheel.writestr("recbole/__init__.py", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", download)
    folder = fetch_wheel(Wheel(requirement="recbole==1.2.1", folder="recbole/dataset_example/ml-100k"), tmp_path)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"ml-100k.inter": "rows"}


def test_fetch_wheel_reports_pip(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for y")
    monkeypatch.setattr(sources.subprocess, "run", lambda *_args, **_options: failed)
    with pytest.raises(FetchError, match=r"recbole==1.2.1: ERROR: No matching distribution found for y"):
        fetch_wheel(Wheel(requirement="recbole==1.2.1", folder="x"), tmp_path)


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "examples" / "prepare_data.py"
    spec = importlib.util.spec_from_file_location("prepare_data", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_line(write_source, tmp_path, capsys, script):
    arguments = ["--dataset", "ml-1m", "--output", str(tmp_path / "out"), "--holdout", "1"]
    assert script.main([*arguments, "--source", str(write_source("ml-1m"))]) == 0
    assert "4 users, 5 items, 9 events" in capsys.readouterr().out
    assert script.main(["--dataset", "nothing", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: dataset is 'nothing'") and error.count("\n") == 1
    with pytest.raises(DataError):
        script.main(["--dataset", "nothing", "--output", str(tmp_path / "out"), "--debug"])
