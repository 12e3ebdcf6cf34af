"""Collects the stacks of this node's ranks without stopping them or blocking the agent.

A rank (rank/stack_server.py) answers over its socket, or writes its stacks when it gets the signal. The signal would
kill any other process, so it is sent only to single ranks that have our file open and catch the signal according to
/proc, never to a process group.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import time
from collections.abc import Callable, Iterable

from ... import linux
from ...protocol.commands import DumpStacks
from ...protocol.events import NO_HANDLER, SILENT, Entered, Frame, StackDump, ThreadStack
from ...protocol.stacks import is_library
from ...rank.stack_server import FILE, signal_number
from .. import PACKAGE
from ..host import procfs, receiving, traffic
from ..outbox import Listener
from ..poll import Poll, earliest
from ..ranks.rank import Rank
from . import spinning, spy
from .debug_channel import DebugChannel, RankThread

SIGNAL = signal_number()
MEMFD = f"/memfd:{FILE} (deleted)"

# A rank that has not answered by then is reported without stacks: it is stopped, or stuck in the kernel.
ANSWER_SECONDS = 2.0
# A rank that has not answered by then is sent the signal: C code is holding the GIL.
SOCKET_SECONDS = 0.4
# Both may be so many times as long where more threads want a processor than there are.
_MOST_SLACK = 4.0

# Interval between checks for written stacks, first and longest.
_FIRST_LOOK = 0.002
_LAST_LOOK = 0.05

# After so long the agent does something else before it reports more ranks: to look at those in MPI takes time.
_BATCH_SECONDS = 0.3

# How long py-spy may take for a rank: as long as the head waits for each (head/stack_requests.py).
NATIVE_SECONDS = 6.0

_MOST_BYTES = 1 << 20
_MOST_FRAMES = 100
_MOST_SOURCE = 4 << 20

NO_PYTHON = "no stacks: not a Python rank, or one without hooks"

_OURS = tuple(os.path.join(PACKAGE, room, "") for room in ("rank", "forkserver"))
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))")


class _PendingRank:
    """A rank whose stacks were requested."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.why = ""
        self.signalled = False
        self.file = ""
        self.blocked: set[str] = set()  # threads that had the signal blocked beforehand
        self.threads: list[ThreadStack] = []
        self.native = ""


class StackDumper:
    """Handles one request at a time; a new one replaces the old."""

    def __init__(self, poll: Poll, outbox: Listener, channel: DebugChannel) -> None:
        self._poll = poll
        self._outbox = outbox
        self._channel = channel
        self._question = DumpStacks(0, False, False, False)
        self._pending: list[_PendingRank] = []
        self._begun = self._look = 0.0
        self._slack = 1.0  # how many times as long the ranks may take, as the node's load is high
        self._sockets: dict[str, int] | None = None  # what its connections have carried; None: not looked up yet
        self._pause = _FIRST_LOOK
        self._ranks: Iterable[Rank] = ()  # those running now
        self._native: list[_PendingRank] = []  # ranks waiting for their native frames
        self._spy: spy.Spy | None = None
        self.own: set[int] = set()  # pids of py-spy, which are not orphans of a rank

    def begin(self, question: DumpStacks, ranks: Iterable[Rank]) -> None:
        """Ask the ranks; `ranks` is a live view of those that are running."""
        self.end()
        self._ranks = ranks
        self._question = question
        self._pending = [_PendingRank(rank.rank, rank.pid) for rank in ranks]
        self._begun = time.monotonic()
        self._slack = min(_MOST_SLACK, max(1.0, procfs.load() / (os.cpu_count() or 1)))
        self._sockets = None
        self._pause, self._look = _FIRST_LOOK, self._begun
        for target in self._pending:
            self._channel.ask(target.pid, question.number, everything=question.everything)
        self.tick(self._begun)

    def _signal(self, target: _PendingRank) -> None:
        pid = target.pid
        target.signalled = True
        target.file = linux.descriptor(pid, (MEMFD,))
        if not target.file:
            target.why = NO_PYTHON
        elif not procfs.has_signal(procfs.status(pid), "SigCgt", SIGNAL):
            target.why = NO_HANDLER
        else:
            target.blocked = _blocked(pid)
            try:
                os.truncate(target.file, 0)
                os.kill(pid, SIGNAL)
            except OSError as error:
                target.why = f"its stacks can't be requested: {error.strerror}"

    def _has_answered(self, target: _PendingRank, now: float) -> bool:
        """Take the rank's answer, if any. Returns whether it is complete."""
        if target.signalled:
            if not target.why and _written(target):
                target.threads = _read(target)
                target.why = "" if target.threads else SILENT
                return True
            return bool(target.why)
        said = self._channel.answer(target.pid, self._question.number)
        if said and (threads := said.get("threads")):
            target.threads = _with_sources(threads, target.pid)
            return True
        if procfs.state(target.pid) == "T":  # it would answer only once it is continued
            target.why = SILENT
            return True
        if said is None and now < self._begun + SOCKET_SECONDS * self._slack:
            return False
        if not self._question.insists:  # a routine check must not interrupt a rank with a signal
            target.why = SILENT
            return True
        self._signal(target)
        return bool(target.why)

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        return earliest((self._look if self._pending else None, self._spy.deadline if self._spy else None))

    def tick(self, now: float) -> None:
        """Report the ranks that have answered."""
        if self._spy:
            self._spy.tick(now)
        if not self._pending or now < self._look:
            return
        late = now >= self._begun + ANSWER_SECONDS * self._slack
        for target in list(self._pending):
            if time.monotonic() > now + _BATCH_SECONDS:
                break
            answered = self._has_answered(target, now)
            if not late and not (answered and (target.threads or procfs.state(target.pid) not in ("Z", "X"))):
                continue  # of a rank that is exiting, its exit tells more
            if not answered:
                target.why = SILENT
            self._pending.remove(target)
            if self._question.native:
                self._native.append(target)
            else:
                self._report(target)
        self._pause = min(2 * self._pause, _LAST_LOOK)
        self._look = now + self._pause
        self._spy_on_next()

    def _report(self, target: _PendingRank) -> None:
        pid = target.pid
        if self._sockets is None:
            self._sockets = traffic.by_socket()
        seconds, busy, moved = procfs.use(pid, self._sockets)
        said = self._channel.answer(pid, self._question.number) or {}
        known = said.get("collectives", Entered())
        unanswered = self._channel.unanswered(pid)
        if unanswered:
            known["unanswered"] = unanswered
        if receives := receiving.waits(pid, self._sockets, said.get("thread", 0)):
            known["receives"] = receives
        if procfs.maps(pid, "/mpi4py/"):
            known["mpi"] = True
        if asleep := procfs.sleep(pid):
            known["asleep"] = asleep
        if target.why == NO_PYTHON and (spins := spinning.look(pid)):
            known["spins"] = spins
        state = procfs.state(pid)
        sleeps_in = procfs.wchan(pid) or procfs.system_call(pid)
        self._outbox.say(
            StackDump(
                *(time.monotonic_ns(), target.rank, self._question.number, pid, target.why, target.threads, state),
                *(sleeps_in, seconds, busy, moved, said.get("beats", -1), known, target.native),
            )
        )

    # Native frames: one rank at a time, because each takes a second of CPU time.

    def _spy_on_next(self) -> None:
        while self._native and self._spy is None:
            target = self._native.pop(0)
            command = spy.find()
            if command is None:
                target.native = "py-spy is not installed on this node (pip install py-spy)"
            elif target.pid not in [rank.pid for rank in self._ranks]:  # the pid may have been reused
                target.native = "it has exited"
            else:
                try:
                    argv = [command, "dump", "--native", "--pid", str(target.pid)]
                    self._spy = spy.Spy(self._poll, argv, NATIVE_SECONDS, functools.partial(self._spied, target))
                    self.own.add(self._spy.pid)
                    return
                except OSError as error:
                    target.native = f"{command} can't be started: {error.strerror}"
            self._report(target)

    def _spied(self, target: _PendingRank, said: str) -> None:
        self._spy = None
        target.native = said
        self._report(target)
        self._spy_on_next()

    def end(self) -> None:
        """Drop the request: the ranks are gone, or there is a newer one."""
        self._pending, self._native = [], []
        if self._spy:
            self._spy.end()
            self._spy = None


def _blocked(pid: int) -> set[str]:
    """The threads that have the signal blocked, including one that is in our handler."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {task for task in tasks if procfs.has_signal(procfs.status(f"{pid}/task/{task}"), "SigBlk", SIGNAL)}


def _written(target: _PendingRank) -> bool:
    """Whether the handler has finished. It has started if the file is not empty."""
    try:
        if os.stat(target.file).st_size == 0:
            return False
    except OSError:  # the rank is gone
        return True
    pending = procfs.has_signal(procfs.status(target.pid), "ShdPnd", SIGNAL)
    return not pending and _blocked(target.pid) <= target.blocked


def _read(target: _PendingRank) -> list[ThreadStack]:
    try:
        with open(target.file, "rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
        os.truncate(target.file, 0)
    except OSError:
        return []
    return parse(text, SourceLines(f"/proc/{target.pid}/cwd").line)


def _with_sources(threads: list[RankThread], pid: int) -> list[ThreadStack]:
    """The threads that a rank reported, with the source line of each frame."""
    sources = SourceLines(f"/proc/{pid}/cwd")

    def with_source(file: str, line: int, function: str) -> Frame:
        return file, line, function, "" if is_library(file) else sources.line(file, line)

    return [{"name": one["name"], "frames": [with_source(*frame) for frame in one["frames"]]} for one in threads]


def parse(text: str, line_of: Callable[[str, int], str]) -> list[ThreadStack]:
    """Parse faulthandler's text into threads. It prints the main thread last; we put it first."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            threads.append({"name": head[2] or head[1], "frames": []})
            continue
        frame = _FRAME.match(line)
        if frame and threads and len(threads[-1]["frames"]) < _MOST_FRAMES:
            path, number = unescaped(frame[1]), int(frame[2]) if frame[2].isdigit() else 0
            if path.startswith(_OURS):
                if frame[3] == "_answer":  # our own thread, which serves the socket
                    threads.pop()
                continue
            source = "" if is_library(path) else line_of(path, number)
            threads[-1]["frames"].append((path, number, unescaped(frame[3]), source))
    return threads[-1:] + threads[:-1]


def unescaped(text: str) -> str:
    """Undo faulthandler's escapes of non-ASCII characters: \\xNN, \\uNNNN and \\UNNNNNNNN."""
    return _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


class SourceLines:
    """Source lines for the frames of stacks."""

    def __init__(self, folder: str) -> None:
        """`folder`: what paths are relative to."""
        self._folder = folder
        self._lines: dict[str, list[str]] = {}

    def line(self, path: str, number: int) -> str:
        """A line without its indentation; "" if it can't be read."""
        if path not in self._lines:
            self._lines[path] = self._load(path)
        lines = self._lines[path]
        return lines[number - 1].strip()[:200] if 0 < number <= len(lines) else ""

    def _load(self, path: str) -> list[str]:
        try:
            fd = os.open(os.path.join(self._folder, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, encoding="utf-8", errors="replace") as file:
                found = os.fstat(fd)
                regular = stat.S_ISREG(found.st_mode) and found.st_size < _MOST_SOURCE
                return file.read().split("\n") if regular else []  # splitlines: a form feed, too
        except (OSError, ValueError):
            return []
