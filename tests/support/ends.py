"""How jobs end."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.command import wait_until


def enter(members: Path) -> None:
    """Move the calling process into a cgroup, where the kernel kills it only after all that asked to go first.

    While a killed process is still giving its memory back, the kernel may kill the next largest one as well.
    """
    with suppress(PermissionError):  # needs CAP_SYS_RESOURCE
        Path("/proc/self/oom_score_adj").write_text("-1000")
    members.write_text(str(os.getpid()))


@pytest.fixture
def memory_limit() -> object:
    """A cgroup with 64 MiB, as a function that puts the calling process into it."""
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
        yield partial(enter, members)
        wait_until(lambda file=members: not file.read_text(), "the cgroup to be empty")
        folder.rmdir()
        return
    pytest.skip("needs a memory cgroup that may be written to (root)")
