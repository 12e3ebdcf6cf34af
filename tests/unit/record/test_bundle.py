"""Bundles: what they hold, what is masked, and what is not unpacked."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from launchpad.errors import UsageError
from launchpad.job.masking import TextMask
from launchpad.record import bundle


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record with secrets in its events and in its output, and files that don't belong to it."""
    folder = tmp_path / "8f2a"
    (folder / "attempt_0" / "1").mkdir(parents=True)
    (folder / "events.jsonl").write_text('{"event": "Stalled", "why": "hunter22", "time": 12345678}\n{"event": "JobOv')
    (folder / "attempt_0" / "1" / "stdout.log").write_bytes(b"\xff hunter22 http://me:password@host/\nend")
    (folder / "attempt_0" / "1" / "stdout.2.log").write_bytes(b"tail")
    (folder / "attempt_0" / "1" / "model.pt").write_bytes(b"of the user's")
    (folder / "console.1.jsonl").write_text("shown")
    (folder / "stacks_1.txt").symlink_to("/etc/hostname")
    return folder


def test_the_copy_has_the_parts_of_a_record_masked(record: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    bundle.copy(str(record), str(copied), TextMask({"API_KEY": "hunter22", "SOME_TOKEN": "12345678"}))
    found = {str(path.relative_to(copied)): path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    assert found.pop("events.jsonl").splitlines() == [
        b'{"event": "Stalled", "why": "********", "time": 12345678}',
        b'{"event": "JobOv',
    ]
    assert found == {
        "attempt_0/1/stdout.log": b"\xff ******** http://me:********@host/\nend",
        "attempt_0/1/stdout.2.log": b"tail",
    }


def test_what_was_packed_is_unpacked_while_it_is_read(record: Path, tmp_path: Path) -> None:
    copied, path = tmp_path / "scratch" / "8f2a", str(tmp_path / "job.tar.gz")
    copied.parent.mkdir()
    bundle.copy(str(record), str(copied), TextMask({}))
    bundle.write(str(copied), path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with bundle.opened(path, {}) as folder:
        assert os.path.basename(folder) == "8f2a"
        assert Path(folder, "attempt_0/1/stdout.log").read_bytes() == b"\xff hunter22 http://me:********@host/\nend"
        assert bundle.shown(path, folder) == path
    assert not os.path.exists(folder)


def packed(path: Path, *entries: tuple[str, bytes | str]) -> str:
    """A bundle of these files; a text is where a link leads."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return str(path)


def test_only_parts_of_one_record_are_unpacked(tmp_path: Path) -> None:
    path = packed(
        tmp_path / "b.tgz",
        ("8f2a/events.jsonl", b"{}\n"),
        ("../events.jsonl", b"out"),
        ("/8f2a/events.jsonl", b"out"),
        ("8f2a/../../events.jsonl", b"out"),
        ("8f2a/attempt_0/0/stdout.log", "/etc/passwd"),
        ("8f2a/attempt_0", "/tmp"),
        ("8f2a/.bashrc", b"out"),
        ("other/events.jsonl", b"out"),
    )
    with bundle.opened(path, {}) as folder:
        assert [str(one.relative_to(folder)) for one in Path(folder).parent.rglob("*") if not one.is_dir()] == [
            "events.jsonl"
        ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"text", "not a whole bundle (not a gzip file)"),
        ({"8f2a/job.json": b"{}"}, "no record of a job is in it"),
        ({"8f2a/events.jsonl": b"1", "8f2a/job.json": b"22"}, "it holds more than"),
        ({"8f2a/events.jsonl": b"1", "./8f2a/events.jsonl": b""}, ""),
    ],
    ids=["none", "text", "no events", "too large", "odd name"],
)
def test_what_is_no_bundle_is_refused_in_a_sentence(
    content: bytes | dict[str, bytes] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.tar.gz"
    if isinstance(content, dict):
        packed(path, *content.items())
        monkeypatch.setattr(bundle, "MOST_BYTES", 2)
    elif content is not None:
        path.write_bytes(content)
    if message:
        with pytest.raises(UsageError) as caught, bundle.opened(str(path), {}):
            pass
        assert str(caught.value).startswith(f"{path}: {message}")
        assert str(caught.value).endswith("; name a file that `launchpad bundle` wrote")
    else:
        with bundle.opened(str(path), {}) as folder:
            assert json.loads(Path(folder, "events.jsonl").read_bytes()) == 1
    assert not list(tmp_path.glob(".launchpad-bundle-*"))


def test_a_bundle_that_can_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.tar.gz").mkdir()
    (tmp_path / "8f2a").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        bundle.write(str(tmp_path / "8f2a"), str(tmp_path / "taken.tar.gz"))
    assert not list(tmp_path.glob(".launchpad-bundle-*"))


def test_a_part_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "b.tgz", ("8f2a/events.jsonl", b"{}\n"), ("8f2a/events.jsonl", b"{}\n"))
    with pytest.raises(UsageError, match="File exists"), bundle.opened(path, {}):
        pass
