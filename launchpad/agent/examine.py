"""Find out where the ranks of this node are, without stopping them, and without a wait that holds the agent up.

A rank (nursery/answering.py) answers by its socket, or writes its stacks when the signal comes. The signal would end
any other process: so it goes only to a rank that has our file open and says in /proc that it catches it, and to no
group.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..commands import Examine
from ..stacks import NO_HANDLER, SILENT, Examined, is_library
from . import facts
from .answers import Answers
from .outbox import Outbox
from .poll import Poll
from .rank import Rank

# As nursery/answering.py has them.
SIGNAL = signal.SIGRTMIN + 5
FILE = "/memfd:launchpad-stacks (deleted)"

# A rank that has not answered by then is told of without its stacks: it is stopped, or stuck in the kernel.
ANSWER_SECONDS = 2.0
# Who has not answered by then is sent the signal: C code keeps the GIL.
SOCKET_SECONDS = 0.4

# Between two looks whether the stacks are written.
_FIRST_LOOK = 0.002
_LAST_LOOK = 0.05

_MOST_BYTES = 1 << 20
_MOST_FRAMES = 100
_MOST_SOURCE = 4 << 20
_MOST_NATIVE = 30_000

NO_PYTHON = "not a Python program that launchpad has started"

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "nursery", "")
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class _Asked:
    """A rank that was asked."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.why = ""
        self.signalled = False
        self.file = ""
        self.blocked: set[str] = set()  # threads that had the signal blocked before
        self.threads: list[Any] = []
        self.native = ""


class Examiner:
    """One question at a time; a newer one takes the older one's place."""

    def __init__(self, poll: Poll, outbox: Outbox, answers: Answers) -> None:
        self._poll = poll
        self._outbox = outbox
        self._answers = answers
        self._question = Examine(0, False, False, False)
        self._asked: list[_Asked] = []
        self._begun = self._look = 0.0
        self._pause = _FIRST_LOOK
        self._native: list[_Asked] = []  # whose native frames are to be had
        self._spying = False

    def begin(self, question: Examine, ranks: Iterable[Rank]) -> None:
        """Ask these."""
        self._question = question
        self._asked = [_Asked(rank.rank, rank.pid) for rank in ranks]
        self._begun = time.monotonic()
        self._pause, self._look = _FIRST_LOOK, self._begun
        for asked in self._asked:
            self._answers.ask(asked.pid, question.number, everything=question.everything)
        self.pump()

    def _signal(self, asked: _Asked) -> None:
        pid = asked.pid
        asked.signalled = True
        asked.file = facts.descriptor(pid, FILE)
        if not asked.file:
            asked.why = NO_PYTHON
        elif not facts.has_signal(facts.status(pid), "SigCgt", SIGNAL):
            asked.why = NO_HANDLER
        else:
            asked.blocked = _blocked(pid)
            try:
                os.truncate(asked.file, 0)
                os.kill(pid, SIGNAL)
            except OSError as error:
                asked.why = f"it can't be asked: {error.strerror}"

    def _has_answered(self, asked: _Asked, now: float) -> bool:
        """Take what this one has said; whether there is no more to wait for."""
        if asked.signalled:
            if not asked.why and _written(asked):
                asked.threads = _read(asked)
                asked.why = "" if asked.threads else SILENT
                return True
            return bool(asked.why)
        said = self._answers.answer(asked.pid, self._question.number)
        if said and said.get("threads"):
            asked.threads = _with_sources(said["threads"], asked.pid)
            return True
        if said is None and now < self._begun + SOCKET_SECONDS:
            return False
        if not self._question.insists:  # a look in passing: who can't say it without a signal needn't
            asked.why = SILENT
            return True
        self._signal(asked)
        return bool(asked.why)

    @property
    def patience(self) -> float:
        """Seconds until `pump` is to be called; -1 for never."""
        return max(0.0, self._look - time.monotonic()) if self._asked else -1

    def pump(self) -> None:
        """Tell of those who have answered."""
        now = time.monotonic()
        if not self._asked or now < self._look:
            return
        late = now >= self._begun + ANSWER_SECONDS
        for asked in list(self._asked):
            if not self._has_answered(asked, now):
                if not late:
                    continue
                asked.why = SILENT
            self._asked.remove(asked)
            if self._question.native:
                self._native.append(asked)
            else:
                self._tell(asked)
        self._pause = min(2 * self._pause, _LAST_LOOK)
        self._look = now + self._pause
        if self._native and not self._spying:
            self._spy()

    def _tell(self, asked: _Asked) -> None:
        pid = asked.pid
        seconds, busy, moved = facts.use(pid)
        said = self._answers.answer(pid, self._question.number) or {}
        known: dict[str, Any] = {
            name: said[name] for name in ("counts", "waiting", "entries", "groups", "problem") if name in said
        }
        unanswered = self._answers.unanswered(pid)
        if unanswered:
            known["unanswered"] = unanswered
        if facts.maps(pid, "/mpi4py/"):
            known["mpi"] = True
        state = facts.state(pid)
        beats = said.get("beats", -1)
        self._outbox.say(
            Examined(
                *(time.monotonic_ns(), asked.rank, self._question.number, pid, asked.why, asked.threads, state),
                *(facts.wchan(pid), seconds, busy, moved, beats if type(beats) is int else -1, known, asked.native),
            )
        )

    # Native frames, by py-spy: one rank after the other, as each takes a second of the processor.

    def _spy(self) -> None:
        import subprocess

        asked = self._native.pop(0)
        command = _py_spy()
        if command is None:
            asked.native = "py-spy is not installed on this node (pip install py-spy)"
            self._tell(asked)
            if self._native:
                self._spy()
            return
        self._spying = True
        process = subprocess.Popen(
            [command, "dump", "--native", "--pid", str(asked.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        said, pieces = process.stdout, []

        def take(fd: int) -> None:
            pieces.append(os.read(fd, 1 << 16))
            if not pieces[-1]:
                self._poll.unwatch(fd)
                said.close()
                self._spied(asked, b"".join(pieces))

        self._poll.watch(said.fileno(), take)

    def _spied(self, asked: _Asked, said: bytes) -> None:
        asked.native = said.decode(errors="replace")[:_MOST_NATIVE]
        self._spying = False
        self._tell(asked)
        if self._native:
            self._spy()


def _py_spy() -> str | None:
    import sys

    for folder in (*os.get_exec_path(), os.path.dirname(sys.executable)):
        path = os.path.join(folder, "py-spy")
        if os.access(path, os.X_OK):
            return path
    return None


def _blocked(pid: int) -> set[str]:
    """The threads that have the signal blocked: also the one that is in our handler."""
    found = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/status", errors="replace") as file:
                line = next((line for line in file if line.startswith("SigBlk")), "SigBlk: 0")
            if int(line.split()[1], 16) >> (SIGNAL - 1) & 1:
                found.add(task)
    except OSError:
        pass
    return found


def _written(asked: _Asked) -> bool:
    """Whether the handler has come to its end. It has begun when there is something in the file."""
    try:
        if os.stat(asked.file).st_size == 0:
            return False
    except OSError:  # it is gone
        return True
    pending = facts.has_signal(facts.status(asked.pid), "ShdPnd", SIGNAL)
    return not pending and _blocked(asked.pid) <= asked.blocked


def _read(asked: _Asked) -> list[Any]:
    try:
        with open(asked.file, "rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
        os.truncate(asked.file, 0)
    except OSError:
        return []
    return parse(text, _Sources(f"/proc/{asked.pid}/cwd").line)


def _with_sources(threads: list[Any], pid: int) -> list[Any]:
    """The threads that a rank has told of, with the lines that their frames stand for."""
    sources = _Sources(f"/proc/{pid}/cwd")
    try:
        for thread in threads:
            for frame in thread["frames"]:
                frame.append("" if is_library(frame[0]) else sources.line(frame[0], frame[1]))
    except (LookupError, TypeError, AttributeError):  # it is the program's to say, and it may say anything
        return []
    return threads


def parse(text: str, line_of: Callable[[str, int], str]) -> list[Any]:
    """faulthandler's text as threads. It tells the oldest thread last: that is the main one, which we put first."""
    threads: list[Any] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            threads.append({"name": head[2] or head[1], "frames": []})
            continue
        frame = _FRAME.match(line)
        if frame and threads and len(threads[-1]["frames"]) < _MOST_FRAMES:
            path, number = _unescaped(frame[1]), int(frame[2]) if frame[2].isdigit() else 0
            if path.startswith(_OURS):
                continue
            source = "" if is_library(path) else line_of(path, number)
            threads[-1]["frames"].append([path, number, _unescaped(frame[3]), source])
    return threads[-1:] + threads[:-1]


def _unescaped(text: str) -> str:
    """faulthandler writes what is not ASCII as \\xNN, \\uNNNN and \\UNNNNNNNN."""
    return re.sub(r"\\(?:x(..)|u(....)|U(........))", lambda m: chr(int(m[1] or m[2] or m[3], 16)), text)


class _Sources:
    """Lines of the source files that stacks speak of."""

    def __init__(self, folder: str) -> None:
        self._folder = folder  # to which their names are relative
        self._lines: dict[str, list[str]] = {}

    def line(self, path: str, number: int) -> str:
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
                return file.read().splitlines() if regular else []
        except (OSError, ValueError):
            return []
