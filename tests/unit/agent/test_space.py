"""agent/host/space: which file system had no room."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from launchpad.agent.host import space

REMEDY = "; docker run --shm-size gives a container more"
MB = 1 << 20


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """(size, free) of the file systems that there are, in MiB."""
    found = {"/dev/shm": (8192, 8192), "/tmp": (1000, 900), "/home": (200 << 10, 1 << 10)}
    monkeypatch.delenv("TMPDIR", raising=False)

    def look(place: str) -> os.statvfs_result:
        for path, (total, free) in found.items():
            if place == path or place.startswith(f"{path}/"):
                return os.statvfs_result((MB, MB, total, free, free, 0, 0, 0, 0, 255))
        raise FileNotFoundError(place)

    monkeypatch.setattr(os, "statvfs", look)
    return found


def why(message: str, **more: Any) -> str:
    recorded = {"type": "OSError", "message": message, **more}
    space.explain(recorded, "/home/me")
    return str(recorded.get("why", ""))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("[Errno 28] No space left on device", "/home/me is full (200.0 GiB, 1.0 GiB free)"),
        ("[Errno 28] No space left on device: '/tmp/a/b'", "/tmp/a has only 1000 MiB (900 MiB free now)"),
        ("[Errno 28] No space left on device: '/gone/b'", ""),
        ("unable to write to file </torch_1_2_3>: No space left on device (28)", f"8.0 GiB (8.0 GiB free now{REMEDY})"),
        ("no space in the tensor", ""),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. … out of shared memory.", ""),
    ],
)
@pytest.mark.usefixtures("room")
def test_the_file_system_that_an_exception_means(message: str, told: str) -> None:
    found = why(message)
    assert found.endswith(told)
    assert bool(found) == bool(told)


def test_a_bus_error_means_shared_memory_that_is_full_or_small(room: dict[str, tuple[int, int]]) -> None:
    assert [space.explain_exit(code) for code in (-signal.SIGBUS, 128 + signal.SIGBUS, -signal.SIGSEGV, 1)] == [""] * 4
    room["/dev/shm"] = (64, 64)
    assert space.explain_exit(-signal.SIGBUS) == f"/dev/shm has only 64 MiB (64 MiB free now{REMEDY})"
    assert why("[Errno 28] No space left on device") == "/home/me is full (200.0 GiB, 1.0 GiB free)"
    room["/dev/shm"] = (8192, 40)
    assert space.explain_exit(135) == f"/dev/shm is full (8.0 GiB, 40 MiB free{REMEDY})"
    child = "its child process 7 was killed by SIGBUS"
    assert why("", why=child) == f"{child}; /dev/shm is full (8.0 GiB, 40 MiB free{REMEDY})"


def test_the_cause_of_an_exception_is_explained_too(room: dict[str, tuple[int, int]]) -> None:
    room["/tmp"] = (1000, 0)
    cause: dict[str, Any] = {"message": "No space left on device: '/tmp/it'"}
    assert why("no checkpoint", cause=cause) == ""
    assert cause["why"] == "/tmp is full (1000 MiB, 0 MiB free)"
