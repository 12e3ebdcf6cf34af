"""Readers of output that are slow, and what the head holds then."""

from __future__ import annotations

import contextlib
import subprocess

import psutil

from tests.support.command import wait_until


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """Resident bytes of the head, the guard and the agent."""
    launcher = psutil.Process(process.pid)
    guard = [child for child in launcher.children() if "agent" in " ".join(child.cmdline())]
    return sum(p.memory_info().rss for p in [launcher, *guard, *(a for g in guard for a in g.children())])


def wait_until_blocked(process: subprocess.Popen[bytes], word: str) -> None:
    """Wait until rank 0, whose command line has this word, can't write any more."""
    found: list[psutil.Process] = []

    def is_running() -> bool:  # rank 0 may still be a shell when another rank has printed its first line
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a rank that leaves
                if word in child.cmdline() and child.environ().get("RANK") == "0":
                    found.append(child)
        return bool(found)

    wait_until(is_running, "rank 0 to run")
    blocked = found[0]
    # A pipe that is full: the rank sleeps in write() and its counter of written bytes stands still.
    seen = [-1]

    def stands_still() -> bool:
        now = blocked.io_counters().write_chars
        before, seen[0] = seen[0], now
        return before == now and blocked.status() == psutil.STATUS_SLEEPING

    wait_until(stands_still, "the rank to block")
