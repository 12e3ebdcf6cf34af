"""The files of a record: what is opened, and what is refused."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from launchpad.record import files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record; beside it is what doesn't belong to it."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "stdout.log").write_text("secret")
    found = tmp_path / "0a1b"
    (found / "attempt_0" / "0").mkdir(parents=True)
    (found / "attempt_0" / "0" / "stdout.log").write_text("out\n")
    return found


def test_a_file_is_read_in_pieces(folder: Path) -> None:
    name = "attempt_0/0/stdout.log"
    assert files.read(str(folder), name) == b"out\n"
    assert files.read(str(folder), name, 1, 2) == b"ut"
    assert (found := files.status(str(folder), name)) is not None
    assert found.st_size == 4


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert files.read(str(folder.parent / "link"), "attempt_0/0/stdout.log") == b"out\n"


def test_what_is_gone_is_empty(folder: Path) -> None:
    for name in ("none.log", "attempt_7/0/stdout.log"):
        assert files.read(str(folder), name) == b""
        assert files.status(str(folder), name) is None
        with pytest.raises(FileNotFoundError):
            files.open_file(str(folder), name)


@pytest.mark.parametrize(
    "name", ["../secret", "attempt_0/../../secret", "/etc/passwd", "attempt_0//0", "./events.jsonl", "", "a\0b"]
)
def test_names_that_lead_out_of_the_folder_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(files.Unreadable, match="is not in its folder"):
        files.open_file(str(folder), name)


@pytest.mark.parametrize(
    ("kind", "why"), [("link", "a link"), ("pipe", "a pipe"), ("socket", "a socket"), ("folder", "a folder")]
)
def test_what_is_no_file_is_refused(kind: str, why: str, folder: Path) -> None:
    path = folder / "events.jsonl"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        match kind:
            case "link":
                path.symlink_to("../secret")
            case "pipe":
                os.mkfifo(path)
            case "socket":
                listener.bind(str(path))
            case "folder":
                path.mkdir()
        with pytest.raises(files.Unreadable, match=rf"job 0a1b: its record is unreadable: events.jsonl is {why}"):
            files.open_file(str(folder), "events.jsonl")
        assert files.read(str(folder), "events.jsonl") == b""
        assert files.status(str(folder), "events.jsonl") is None


def test_links_on_the_way_to_a_file_are_refused(folder: Path) -> None:
    (folder / "attempt_1").symlink_to("../elsewhere")
    (folder / "attempt_2").write_text("")
    for name, why in (("attempt_1/stdout.log", "attempt_1 is a link"), ("attempt_2/stdout.log", "attempt_2 is a file")):
        with pytest.raises(files.Unreadable, match=why):
            files.open_file(str(folder), name)
        assert files.read(str(folder), name) == b""


def test_numbered_files_are_in_the_order_of_their_numbers(folder: Path) -> None:
    for name in (
        "stdout.2.log",
        "stdout.10.log",
        "stdout.x.log",
        "stdout.log",
        "stdoutx3.log",
        f"stdout.{'9' * 5000}.log"[:200],
    ):
        (folder / "attempt_0" / "0" / name).touch()
    assert files.numbered(str(folder), "attempt_0/0/stdout.*.log") == [
        (2, "attempt_0/0/stdout.2.log"),
        (10, "attempt_0/0/stdout.10.log"),
    ]
    assert files.numbered(str(folder), "attempt_5/0/stdout.*.log") == []
