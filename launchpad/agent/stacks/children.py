"""Looks where the processes that descend from a rank are, one after the other: forks of it share its file of stacks.

Forks are sent the rank's own signal. Of other Python processes that the rank waits for, py-spy may tell. Of all, /proc
says what they wait in.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection

from ...protocol.events import ChildStack, Frame
from ..host import processes, procfs
from ..poll import Poll
from . import spy
from .signalled import SignalledProcess
from .source_lines import SourceLines

# So many are told of, and so many of those are asked for stacks; the ones that the rank waits for come first.
MOST_CHILDREN = 16
MOST_ASKED = 8
MOST_SPIED = 2

# How long one may take to answer, all of them together, and py-spy.
ANSWER_SECONDS = 0.3
ALL_SECONDS = 1.5
SPY_SECONDS = 3.0

MOST_FRAMES = 40
MOST_COMMAND = 200


class ChildStacks:
    """The descendants of one rank; `found` is complete once `tick` returns True."""

    def __init__(self, poll: Poll, pid: int, awaited: Collection[int], insists: bool, now: float) -> None:
        """`pid`: the rank's, or 0 for nobody. `awaited`: pids that it waits for. `insists`: they may be interrupted."""
        self.found: list[ChildStack] = []
        self.own: set[int] = set()  # pids of py-spy
        self._poll = poll
        self._awaited = awaited
        self._insists = insists
        self._command = processes.name_of(pid) if pid else ""
        self._todo = _descendants(pid, awaited) if pid else []
        self._asked: SignalledProcess | None = None
        self._until = now
        self._end = now + ALL_SECONDS
        self._to_spy: list[ChildStack] | None = None  # those that are left; None: not looked for yet
        self._spy: spy.Spy | None = None

    def tick(self, now: float) -> bool:
        """Take answers, and ask the next. Returns whether that is all."""
        while self._todo:
            pid, parent = self._todo[0]
            if self._asked is None and self._insists and len(self.found) < MOST_ASKED and now < self._end:
                self._asked = SignalledProcess(pid)
                self._until = now + ANSWER_SECONDS
            threads = self._asked.threads() if self._asked is not None else []
            if threads is None and now < self._until:
                return False
            self._add(pid, parent, threads[0]["frames"] if threads else [])
            self._todo.pop(0)
            self._asked = None
        if self._spy is not None:
            self._spy.tick(now)
            return False
        return not self._spies_on_next()

    def _add(self, pid: int, parent: int, frames: list[Frame]) -> None:
        command = processes.name_of(pid)
        self.found.append(
            {
                "pid": pid,
                "parent": parent,
                "command": "" if command == self._command else command[:MOST_COMMAND],
                "state": procfs.state(pid),
                "sleeps_in": procfs.wchan(pid) or procfs.system_call(pid),
                "frames": frames[:MOST_FRAMES],
            }
        )

    def _spies_on_next(self) -> bool:
        """Have py-spy look at a Python process that the rank waits for and that has no handler, if there is one."""
        if self._to_spy is None:
            unknown = [one for one in self.found if one["pid"] in self._awaited and not one["frames"]]
            pythons = [one for one in unknown if procfs.executable(one["pid"]).startswith("python")]
            self._to_spy = pythons[:MOST_SPIED] if self._insists else []
        path = spy.find() if self._to_spy else None
        if path is None:
            return False
        child = self._to_spy.pop(0)
        argv = [path, "dump", "--json", "--pid", str(child["pid"])]
        try:
            self._spy = spy.Spy(self._poll, argv, SPY_SECONDS, lambda said: self._spied(child, said))
        except OSError:
            return False
        self.own.add(self._spy.pid)
        return True

    def _spied(self, child: ChildStack, said: str) -> None:
        self._spy = None
        try:
            threads = json.loads(said[said.index("[\n") :])
            main = next((one for one in threads if one["thread_name"] == "MainThread"), threads[0])
            frames = [(str(one["filename"]), int(one["line"]), str(one["name"])) for one in main["frames"]]
        except (ValueError, KeyError, TypeError, IndexError):  # py-spy may not look into it
            return
        sources = SourceLines(f"/proc/{child['pid']}/cwd")
        child["frames"] = [sources.with_source(*frame) for frame in frames[:MOST_FRAMES]]

    def end(self) -> None:
        """Ask no more."""
        self._todo = []
        if self._spy is not None:
            self._spy.end()
            self._spy = None


def _descendants(pid: int, awaited: Collection[int]) -> list[tuple[int, int]]:
    """Each with its parent; without the helpers of Python and torch. Those that the rank waits for come first."""
    deadline = time.monotonic() + ANSWER_SECONDS
    within = itertools.takewhile(lambda _: time.monotonic() < deadline, procfs.descendants(pid))
    found = list(itertools.islice(within, 10 * MOST_CHILDREN))
    names = {child: processes.name_of(child) for child, _ in found}
    # What a forkserver has forked has the forkserver's name.
    helpers = [child for child, parent in found if processes.is_helper(names[child]) and parent == pid]
    found = [(child, parent) for child, parent in found if child not in helpers]
    return sorted(found, key=lambda one: one[0] not in awaited)[:MOST_CHILDREN]
