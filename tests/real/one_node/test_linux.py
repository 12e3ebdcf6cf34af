"""launchpad/linux.py: other processes, and what prctl sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launchpad import linux

DEADLINE = 30.0


def test_another_process_opens_what_we_have_open() -> None:
    fd = os.memfd_create("test")
    linux.write_all(fd, b"in memory")
    told = subprocess.run(["cat", linux.path_of(fd)], capture_output=True, check=True, timeout=DEADLINE).stdout
    os.close(fd)
    assert told == b"in memory"


def test_prctl_sets_what_it_can() -> None:
    no_new_privileges = 38
    code = f"from launchpad import linux; linux.prctl({no_new_privileges}, 1); print(open('/proc/self/status').read())"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=DEADLINE)
    assert "NoNewPrivs:\t1" in told.stdout
    with pytest.raises(OSError, match="Invalid argument"):
        linux.prctl(-1, 0)


def test_a_process_as_proc_shows_it() -> None:
    process = subprocess.Popen(["sleep", "600"])
    first = linux.stat(process.pid)
    assert first[1] == str(os.getpid())
    assert int(linux.stat("self")[linux.STARTED]) <= int(first[linux.STARTED])
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert linux.stat(process.pid)[0] == "Z"
    assert not linux.is_gone(process.pid), "a zombie is there"
    process.wait()
    assert linux.is_gone(process.pid)
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        linux.stat(process.pid)
