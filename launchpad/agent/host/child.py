"""Runs what may take long in a child process, with a time limit: the agent's loop goes on meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ... import linux
from ..part import AgentHub, AgentPart
from ..poll import Poll, earliest
from . import processes

# As a shell has it.
NOT_FOUND, NOT_EXECUTABLE = 127, 126

# How often to look for processes that were started while we killed.
_KILL_ROUNDS = 5


class ChildEnded(NamedTuple):
    """How the child ended."""

    code: int | None  # its exit code, -n for signal n; None: it took too long, and was killed
    output: bytes  # the last of what it wrote


class Task(NamedTuple):
    """What a child is for."""

    run: Callable[[], object]  # in the child
    seconds: float  # how long it may take
    keep: int  # so many bytes of its output
    errors: bool = True  # what it writes to stderr, too


class Child:
    """One child, in a session of its own. What it starts ends with it. `report` is called once, unless `end` is."""

    def __init__(self, poll: Poll, task: Task, report: Callable[[ChildEnded], None]) -> None:
        """Start it. Raises OSError if there can be no child."""
        self._poll = poll
        self._report = report
        self._keep = task.keep
        self._read = b""
        self._output, writer = os.pipe()
        mask = processes.hold_signals()  # one that comes before the child heeds it would be lost
        try:
            self.pid = os.fork()
        except OSError:
            processes.release_signals(mask)
            os.close(self._output)
            os.close(writer)
            raise
        if self.pid == 0:
            _become(task, writer, mask)
        processes.release_signals(mask)
        os.close(writer)
        os.set_blocking(self._output, False)
        self.deadline = time.monotonic() + task.seconds
        self.over = False
        poll.watch(self._output, self._on_output)

    def _on_output(self, _: int) -> None:
        self._take()

    def _take(self) -> bool:
        """Read what is there. Returns whether there may be more."""
        data = linux.read_now(self._output, 1 << 16)
        self._read = (self._read + (data or b""))[-self._keep :]
        if data == b"":
            self._poll.unwatch(self._output)
        return bool(data)

    def reaped(self, code: int) -> None:
        """It has exited. What it has left behind holds its output open, and must not hold us up."""
        while self._take():
            pass
        self._end(ChildEnded(code, self._read))

    def tick(self, now: float) -> None:
        """Kill it if its time is up."""
        if now >= self.deadline:
            self._end(ChildEnded(None, self._read))

    def _end(self, ended: ChildEnded) -> None:
        if not self.over:
            self.end()
            self._report(ended)

    def end(self) -> None:
        """Kill it, with all that it has started."""
        if self.over:
            return
        self.over = True
        self._poll.unwatch(self._output)
        os.close(self._output)
        for _ in range(_KILL_ROUNDS):
            found = _alive(self.pid)
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            if not found:
                return


class PartWithChildren(AgentPart):
    """A part that has children at work."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._at_work: list[Child] = []
        self._pids: set[int] = set()  # of all that there have been

    def begin(self, task: Task, report: Callable[[ChildEnded], None]) -> None:
        """Start one. Raises OSError."""
        child = Child(self._hub.poll, task, report)
        self._at_work = [*(one for one in self._at_work if not one.over), child]
        self._pids.add(child.pid)

    @property
    def deadline(self) -> float | None:
        """When the first one's time is up."""
        return earliest(child.deadline for child in self._at_work if not child.over)

    def tick(self, now: float) -> None:
        """End those that take too long."""
        for child in self._at_work:
            child.tick(now)

    def reaped(self, pid: int, code: int) -> None:
        """It may have been one of them."""
        for child in self._at_work:
            if child.pid == pid:
                child.reaped(code)

    def end(self) -> Collection[int]:
        """Nobody waits for them any more."""
        for child in self._at_work:
            child.end()
        return self._pids


def _become(task: Task, writer: int, mask: set[int]) -> None:
    """Be the child: never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        processes.heed_signals()
        processes.release_signals(mask)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(writer, 1)
        os.dup2(writer if task.errors else nothing, 2)
        processes.close_inherited(())
        task.run()
        code = 0
    finally:
        os._exit(code)


def execute(words: Sequence[str], cwd: str, environ: Mapping[str, str]) -> None:
    """In a child: become this program, in this folder if it can be entered. Doesn't return."""
    try:
        os.chdir(cwd)
    except OSError:
        pass
    program = os.path.expanduser(words[0])
    try:
        os.execvpe(program, [program, *words[1:]], environ)
    except (FileNotFoundError, NotADirectoryError):
        os._exit(NOT_FOUND)
    except OSError as error:
        os.write(2, f"{program}: {error.strerror}\n".encode())
        os._exit(NOT_EXECUTABLE)


def _alive(leader: int) -> list[int]:
    """The live processes that this child has started, and itself: by session, and by descent."""
    if not linux.shows_our_pids():
        return [leader] if processes.has_group(leader) else []
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            state, parent, _, session = linux.stat(name)[:4]
        except (OSError, ValueError):  # it has just gone
            continue
        if state not in "ZX":
            parents[int(name)] = int(parent)
            if int(session) == leader:
                found.add(int(name))
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found)
