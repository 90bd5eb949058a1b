"""What is renamed into place is on the disk before."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from genrec.data import files
from genrec.data.files import link_atomically, sync_tree, write_atomically
from genrec.data.prepare import prepare


@pytest.fixture
def disk_order(monkeypatch):
    """What reaches the disk in which order: ("sync", path) and ("rename", from, to)."""
    order = []
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor):
        order.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noting_rename(self, target):
        order.append(("rename", self, Path(target)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    return order


def test_a_prepared_dataset_is_on_the_disk_before_it_has_its_name(tmp_path, write_source, disk_order):
    output = tmp_path / "prepared"
    prepare("ml-1m", output=output, source=write_source("ml-1m"))
    (renamed,) = [place for place, event in enumerate(disk_order) if event[0] == "rename"]
    fresh = disk_order[renamed][1]
    synced = {event[1] for event in disk_order[:renamed]}
    written = {fresh / path.relative_to(output) for path in (output, *output.rglob("*"))}
    assert any(path.suffix == ".parquet" for path in written) and written <= synced
    assert ("sync", tmp_path) in disk_order[renamed:]


def test_sync_tree_reaches_every_depth(tmp_path, disk_order):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    sync_tree(tmp_path)
    assert {event[1] for event in disk_order} == {tmp_path, *tmp_path.rglob("*")}


def test_files_and_links_are_replaced(tmp_path):
    for text in ("one", "two"):
        write_atomically(tmp_path / "file", text)
        link_atomically(tmp_path / "link", f"to_{text}")
        assert (tmp_path / "file").read_text() == text
        assert os.readlink(tmp_path / "link") == f"to_{text}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_of_what_cannot_be_written_nothing_is_left(tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", "old")

    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_atomically(tmp_path / "file", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_lock_where_there_are_none_is_told_and_other_errors_are_raised(tmp_path, monkeypatch, caplog):
    for number in (errno.ENOLCK, errno.EIO):

        def refuse(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "lockf", refuse)
        if number == errno.EIO:
            with pytest.raises(OSError, match=os.strerror(errno.EIO)), files.locked(tmp_path / ".lock"):
                pass
        else:
            with files.locked(tmp_path / ".lock"):
                assert f"{tmp_path} has no locks" in caplog.text
