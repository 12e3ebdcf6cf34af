"""record/checkpoint: what is refused, and how files are cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchpad._version import __version__
from launchpad.errors import UsageError
from launchpad.record import checkpoint
from launchpad.record.checkpoint import Checkpoint
from launchpad.record.journal import JournalState


def of(folder: Path, **sizes: int) -> Checkpoint:
    """A checkpoint of a job in its second attempt."""
    journal = JournalState(1, {}, 0, set(), {})
    return Checkpoint(b"head", None, {"journal": journal}, {str(folder / name): size for name, size in sizes.items()})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert checkpoint.last(str(tmp_path)) is None
    checkpoint.write(str(tmp_path), of(tmp_path))
    checkpoint.write(str(tmp_path), of(tmp_path, a=3))
    assert checkpoint.read(str(tmp_path)) == of(tmp_path, a=3)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert os.stat(tmp_path / "checkpoint").st_mode & 0o777 == 0o600
    checkpoint.remove(str(tmp_path))
    with pytest.raises(UsageError, match="No such file"):
        checkpoint.read(str(tmp_path))


def test_another_launchpads_is_refused(tmp_path: Path) -> None:
    checkpoint.write(str(tmp_path), of(tmp_path))
    path = tmp_path / "checkpoint"
    path.write_bytes(path.read_bytes().replace(__version__.encode(), b"0.0.1", 1))
    with pytest.raises(UsageError, match=r"was started by launchpad 0\.0\.1, and this is .*; resume it with"):
        checkpoint.read(str(tmp_path))


def test_one_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    """It is code for whoever reads it."""
    checkpoint.write(str(tmp_path), of(tmp_path))
    (tmp_path / "checkpoint").chmod(0o660)
    with pytest.raises(UsageError, match="others can read it"):
        checkpoint.read(str(tmp_path))


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    checkpoint.write(str(tmp_path), of(tmp_path))
    path = tmp_path / "checkpoint"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="can't be read"):
        checkpoint.read(str(tmp_path))


def test_files_are_cut(tmp_path: Path) -> None:
    """To what they were; newer ones are empty, and what is certainly older, or no log, stays."""
    contents = {
        "events.jsonl": b"12345",
        "attempt_0/0/stdout.log": b"old",
        "attempt_1/0/stdout.log": b"abcdef",
        "attempt_1/0/error.json": b"{}",
        "attempt_1/0/stdout.1.log": b"new",
        "attempt_2/0/stdout.log": b"newer",
        "console.1.jsonl": b"shown",
    }
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    sizes = {"events.jsonl": 3, "attempt_1/0/stdout.log": 4, "attempt_1/0/stderr.log": 7}
    for _ in range(2):  # whoever did it may have been killed
        checkpoint.cut(str(tmp_path), of(tmp_path, **sizes))
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents | {
        "events.jsonl": b"123",
        "attempt_1/0/stdout.log": b"abcd",
        "attempt_1/0/stdout.1.log": b"",
        "attempt_2/0/stdout.log": b"",
        "console.1.jsonl": b"",
    }


def test_a_file_that_is_too_short_is_told(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"12")
    with pytest.raises(UsageError, match=r"events\.jsonl is shorter than launchpad has left it"):
        checkpoint.cut(str(tmp_path), of(tmp_path, **{"events.jsonl": 3}))


@pytest.mark.parametrize(
    ("since", "left"), [("nothing", b"123"), ("rotated", b"others"), ("cut", b"1"), ("removed", None)]
)
def test_a_file_of_the_users_is_cut_if_it_is_still_the_same(tmp_path: Path, since: str, left: bytes | None) -> None:
    """Otherwise it stays as it is."""
    record, path = tmp_path / "record", tmp_path / "all.jsonl"
    record.mkdir()
    path.write_bytes(b"12345")
    found = checkpoint.inode(str(path))
    assert found
    if since == "rotated":
        path.rename(tmp_path / "all.jsonl.1")
        path.write_bytes(b"others")
    elif since == "cut":
        path.write_bytes(b"1")
    elif since == "removed":
        path.unlink()
    checkpoint.cut(str(record), of(tmp_path, **{"all.jsonl": 3})._replace(inodes={str(path): found}))
    assert (path.read_bytes() if path.exists() else None) == left


def test_a_folder_of_logs_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "attempt_1").mkdir(parents=True)
    (tmp_path / "real" / "attempt_1" / "stdout.log").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("real")
    checkpoint.cut(str(tmp_path / "link"), of(tmp_path / "link", **{"attempt_1/stdout.log": 3}))
    assert (tmp_path / "real" / "attempt_1" / "stdout.log").read_bytes() == b"123"


def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "events.jsonl").write_bytes(b"12")
    monkeypatch.setattr(os, "ftruncate", fails)
    with pytest.raises(UsageError, match=r"events\.jsonl: Input/output error; the job can't be resumed without it"):
        checkpoint.cut(str(tmp_path), of(tmp_path, **{"events.jsonl": 1}))


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A rank may have made one in its folder of logs."""
    (tmp_path / "other").write_bytes(b"of the user's")
    (tmp_path / "attempt_1").mkdir()
    (tmp_path / "attempt_1" / "stdout.log").symlink_to(tmp_path / "other")
    with pytest.raises(UsageError, match="the job can't be resumed without it"):
        checkpoint.cut(str(tmp_path), of(tmp_path))
    assert (tmp_path / "other").read_bytes() == b"of the user's"
