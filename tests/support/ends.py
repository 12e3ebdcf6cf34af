"""How jobs end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.command import wait_until

# While a killed process is still giving its memory back, the kernel may kill the next one as well.
DECOYS = 4


def enter(members: Path) -> None:
    """Move the calling process into a cgroup."""
    members.write_text(str(os.getpid()))


def decoy(members: Path) -> subprocess.Popen[bytes]:
    """A process in the cgroup that the kernel takes before those that have not asked to go first."""
    process = subprocess.Popen(["sleep", "600"])
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    members.write_text(str(process.pid))
    return process


@pytest.fixture
def memory_limit() -> Iterator[Callable[[], None]]:
    """A cgroup with 64 MiB, as a function that puts the calling process into it.

    Whoever uses the memory up asks to go first (oom_score_adj), so that launchpad is not what the kernel takes.
    """
    name = f"launchpad-test-{os.getpid()}"
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(base, name)
        try:
            folder.mkdir()
            (folder / limit).write_text(str(64 << 20))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        members = folder / "cgroup.procs"
        decoys = [decoy(members) for _ in range(DECOYS)]
        yield partial(enter, members)
        for process in decoys:
            process.kill()
            process.wait()
        wait_until(lambda file=members: not file.read_text(), "the cgroup to be empty")
        folder.rmdir()
        return
    pytest.skip("needs a memory cgroup that may be written to (root)")
