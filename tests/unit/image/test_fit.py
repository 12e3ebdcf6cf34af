"""What a kept image must have in common with the process that asks for it."""

from __future__ import annotations

import os
import socket
import sys
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchpad.api.job import prepare
from launchpad.forkserver.keeper import Keeper, _Kept
from launchpad.image import Cold, channel, fit, loaded, pressure
from launchpad.image.keeper_link import KeeperLink
from launchpad.image.seen import ALL, Seen

PLAIN = fit.Image("/p", (), (), {"A": "1", "LANG": "C"}, "3", "8", frozenset())
TORCH = PLAIN._replace(preload=("torch", "more"), extra=("more",), reads=frozenset({"READ"}))


@pytest.mark.parametrize(
    ("image", "cold", "reason"),
    [
        (PLAIN, {}, ""),
        (PLAIN, {"environ": {"A": "2", "LANG": "C", "OMP_NUM_THREADS": "5"}}, ""),
        (PLAIN, {"environ": {"LANG": "C.UTF-8"}}, "LANG"),
        (PLAIN, {"environ": {"LANG": "C", "PYTHONHASHSEED": "1"}}, "PYTHONHASHSEED"),
        (PLAIN, {"affinity": "1"}, ""),
        (PLAIN, {"python": "/q"}, "/q"),
        (PLAIN, {"stack": "9"}, "stack"),
        (PLAIN, {"preload": ("torch",)}, "torch"),
        (TORCH, {}, "torch"),
        (TORCH, {"preload": ("torch",)}, ""),
        (TORCH, {"preload": ("torch", "another")}, "another"),
        (TORCH, {"preload": ("more",)}, "torch"),
        (TORCH, {"preload": ("torch", "torch._dynamo")}, ""),
        (TORCH._replace(preload=("torch", "torch._dynamo", "more")), {"preload": ("torch",)}, "torch._dynamo"),
        (TORCH, {"preload": ("torch",), "affinity": "1"}, "affinity"),
        (TORCH, {"preload": ("torch",), "environ": {"LANG": "C", "OMP_NUM_THREADS": "5"}}, "OMP_NUM_THREADS"),
        (TORCH, {"preload": ("torch",), "environ": {"LANG": "C", "NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG"),
        (TORCH, {"preload": ("torch",), "environ": {"LANG": "C", "READ": ""}}, "READ"),
        (TORCH, {"preload": ("torch",), "environ": {"LANG": "C", "TERM": "vt100"}}, ""),
        (TORCH._replace(reads=frozenset({ALL})), {"preload": ("torch",), "environ": {"LANG": "C"}}, "A"),
    ],
)
def test_what_fits(image: fit.Image, cold: dict[str, object], reason: str) -> None:
    wanted = fit.ColdStart("/p", (), PLAIN.environ, "3", "8")._replace(**cold)
    found = fit.misfit(image, wanted)
    assert bool(found) == bool(reason)
    assert reason in found


def test_a_relative_folder_on_the_path_is_not_known_before() -> None:
    wanted = fit.ColdStart("/p", (), {"PYTHONPATH": "/a:b"}, "3", "8")
    assert "PYTHONPATH" in fit.cannot(wanted)
    assert not fit.cannot(wanted._replace(environ={"PYTHONPATH": "/a:/b"}))
    assert not fit.cannot(wanted._replace(environ={}))


class _Name(StrEnum):
    READ = "READ"


def test_names_in_an_enumeration_are_plain_for_messages() -> None:
    """marshal writes no subclass of str."""
    seen = Seen()
    seen.begin()
    try:
        os.environ.get(_Name.READ)
    finally:
        seen.end()
    spec = prepare("true", 1, None, None, {_Name.READ: "1"}, None, sync=False, ssh_config=None, bind="none").spec
    assert "READ" in seen.variables
    assert "READ" in spec.environ
    assert {type(name) for name in (*seen.variables, *spec.environ)} == {str}


def test_what_imports_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESENT", "1")
    before = type(os.environ).__getitem__, type(os.environ).__iter__, [*sys.meta_path]
    seen = Seen()
    seen.begin()
    try:
        os.environ.get("ABSENT"), os.getenv("PRESENT"), "ASKED" in os.environ
        assert ALL not in seen.variables
        with pytest.raises(ImportError):
            __import__("there_is_no_such_module")
    finally:
        seen.end()
    assert seen.variables >= {"ABSENT", "PRESENT", "ASKED"}
    assert "there_is_no_such_module" in seen.modules
    assert before == (type(os.environ).__getitem__, type(os.environ).__iter__, sys.meta_path)
    seen.begin()
    try:
        dict(os.environ)
    finally:
        seen.end()
    assert ALL in seen.variables


@pytest.mark.parametrize("name", ["os.py", "os.cpython-311.so", "os/__init__.py", "tried.py", "tried/data"])
def test_what_comes_first_on_the_path_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "os.txt").touch()
    (tmp_path / "json").mkdir()  # no package, so the library's is found
    asked, found = {"os", "json", "tried"}, {"os", "json"}
    assert loaded.shadow(str(tmp_path), asked, found) == ""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert loaded.shadow(str(tmp_path), asked, found) == str(tmp_path / name.partition("/")[0])


def test_a_change_of_a_file_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("a = 1\n")
    marks = {str(path): loaded.mark(str(path)) for path in (file, tmp_path / "none", tmp_path)}
    assert loaded.changed(marks) == ""
    before = file.stat()
    for change in (
        lambda: os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1)),
        lambda: file.write_text("a = 12\n"),
        lambda: file.rename(tmp_path / "old"),
    ):
        marks = {str(file): loaded.mark(str(file))}
        change()
        assert loaded.changed(marks) == str(file)


def test_another_link_is_no_change(tmp_path: Path) -> None:
    """uv links a package into each environment that has it, and perf what it has looked at into its cache."""
    file, elsewhere = tmp_path / "a" / "m.py", tmp_path / "b"
    for folder in (file.parent, elsewhere):
        folder.mkdir()
    file.write_text("a = 1\n")
    marks = {str(file): loaded.mark(str(file))}
    os.link(file, elsewhere / "m.py")
    assert loaded.changed(marks) == ""


def test_memory_is_short_when() -> None:
    calm = "some avg10=1.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
    assert pressure.judge(calm, 50, 100, [(10, 100), (5, 0)]) == ""
    assert "wait" in pressure.judge(calm.replace("1.00", "40.00"), 50, 100, [])
    assert "machine" in pressure.judge("", 1, 100, [])
    assert "cgroup" in pressure.judge("", 50, 100, [(99, 100)])
    assert pressure.judge("", 0, 0, []) == ""


def test_a_guard_that_comes_too_late_finds_nobody() -> None:
    """Otherwise there would be two on one link: it, and the one that was started instead."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        link = KeeperLink(ours)
        channel.send(theirs, {"cores": 1})
        link.ask({"run": {}})
        with pytest.raises(Cold, match="doesn't answer"):
            link.answer(0.01)
        with pytest.raises(BrokenPipeError):
            channel.send(theirs, {"guard": 1})
        link.close()


# Keepers of their own: without torch, which takes a second.


def test_an_image_whose_output_has_been_read_already() -> None:
    """Its streams and its last word may come in the same round."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    image = _Kept.__new__(_Kept)
    with open(reader), open(writer):
        assert image.read(1, reader)


def test_an_answer_of_a_fork_is_for_who_asked_for_it() -> None:
    """Two forks look around at the same time, and the second one is done first."""
    told: list[str] = []
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    callers = {number: SimpleNamespace(say=lambda said, of=number: told.append(f"{of} {said}")) for number in (1, 2)}
    image = SimpleNamespace(link=near, waiting=callers, jobs=set(), uses=0, used=0.0)
    keeper = Keeper.__new__(Keeper)
    keeper._head = None
    with near, far:
        for answer in ({"cold": "why", "number": 2}, {"job": 71, "number": 1}):
            channel.send(far, answer)
            keeper._hear_image(image)  # type: ignore[arg-type]
    assert (told, image.jobs, image.waiting) == (["2 {'cold': 'why'}"], {71}, {})
