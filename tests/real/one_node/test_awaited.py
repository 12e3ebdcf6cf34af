"""What a rank waits for is explained: by its children, threads, locks and tasks."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.command import Launchpad, wait_until

pytestmark = pytest.mark.usefixtures("from_image")

IN_BUSY = r"in busy at .*awaits.py:\d+: time.sleep\(1000\)"

# By case: what is said of its rank; of two ranks with one case, what is said of one of them.
SAYS = {
    "command": r"its child `sh -c sleep 1000; true` \(pid \d+\), which waits for `sleep 1000` \(pid \d+\), which",
    "output": r"the output of its child `sleep 1001` \(pid \d+\), which is asleep; the rank is in output at",
    "server": r"data from rank \d+'s process \d+, which is stopped by a signal; the rank is in server at",
    "pool": rf"its pool; process \d+ is {IN_BUSY}; the rank is in pool at",
    "lost": r"its pool; its worker \d+ was killed by SIGKILL, and what it had to do is lost; the rank is in lost",
    "executor": rf"its process pool; process \d+ is {IN_BUSY}",
    "threads": rf"its pool of threads; thread 'ThreadPoolExecutor-0_0' is {IN_BUSY}",
    "process": rf"its child process 'encoder' \(pid \d+\), which is {IN_BUSY}",
    "forkserver": r"its child process 'encoder' \(pid \d+\), which is (in busy at |asleep)",  # without py-spy
    "fork": rf"its child process \(pid \d+\), which is {IN_BUSY}",
    "messages": rf"an item in a multiprocessing.Queue; process \d+ is {IN_BUSY}",
    "join": rf"its thread 'writer', which is {IN_BUSY}",
    "lock": rf"a threading.Lock; thread 'writer' is {IN_BUSY}; the rank is in lock at .*: with mutex:",
    "rlock": rf"a threading.RLock that thread 'writer' has, which is {IN_BUSY}",
    "itself": r"a threading.Lock; no other thread is in the program's code: it may have the lock itself;",
    "item": rf"an item in a queue.Queue; thread 'writer' is {IN_BUSY}",
    "nothing": r"an item in a queue.Queue; no other thread is in the program's code;",
    "file": r"the lock on \S*shared.lock, which rank \d+ \(pid \d+\) has; the rank is in file at",
    "database": r"\S*shared.db, which it has open and rank \d+ \(pid \d+\) has locked; the rank is in database at",
    "tasks": r"its task Task-1 \(main\), which awaits task fetch-3, which is in fetch at .*:\d+ \(in wait\): await gate"
    r".wait\(\); task metrics is in idle at .*: await asyncio.sleep\(1000\); the rank is in tasks at",
}
TWICE = ("file", "database")


def started(launchpad: Launchpad, cases: list[str]) -> subprocess.Popen[bytes]:
    """A job whose ranks can be asked what they wait for."""
    process = launchpad.start("run", "-n", len(cases), "--stall-timeout", 600, "--grace", 1, "awaits.py", *cases)
    assert process.stdout is not None
    for _ in cases:
        assert process.stdout.readline().strip().endswith(b"ready")
    wait_until(lambda: launchpad.sockets, "the job to take questions")
    return process


# As many as are shown at once.
AT_ONCE = 6
NAMES = list(SAYS)


@pytest.mark.parametrize("cases", [NAMES[first : first + AT_ONCE] for first in range(0, len(NAMES), AT_ONCE)])
def test_what_each_rank_waits_for_is_told(launchpad: Launchpad, cases: list[str]) -> None:
    """One after the other gets to where it waits."""
    process = started(launchpad, [case for case in cases for _ in range(1 + (case in TWICE))])
    told = ""

    def missing() -> list[str]:
        nonlocal told
        told = launchpad.run("stacks").stdout
        return [case for case in cases if not re.search(rf"rank \d+ waits for {SAYS[case]}", told)]

    wait_until(lambda: not missing(), "all to be told", show=lambda: f"{missing()}\n{told}")
    process.terminate()
    process.wait()
