"""Collects the stacks of this node's ranks without stopping them or blocking the agent.

A rank (rank/stack_server.py) answers over its socket, or writes its stacks when it gets a signal (signalled.py). Then
the processes that descend from it are looked at (children.py), and what it waits for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

from ...protocol.commands import DumpStacks
from ...protocol.events import SILENT, Awaited, Entered, StackDump, ThreadStack
from ...protocol.stacks import together
from ..host import procfs, receiving, traffic
from ..outbox import Listener
from ..poll import Poll, earliest
from ..ranks.rank import Rank
from . import outside, served, spinning, spy
from .children import ChildStacks
from .debug_channel import DebugChannel, RankThread
from .signalled import NO_PYTHON, SignalledProcess
from .source_lines import SourceLines

# A rank that has not answered by then is reported without stacks: it is stopped, or stuck in the kernel.
ANSWER_SECONDS = 2.0
# A rank that has not answered by then is sent the signal: C code is holding the GIL.
SOCKET_SECONDS = 0.4

# Interval between checks for written stacks, first and longest.
_FIRST_LOOK = 0.002
_LAST_LOOK = 0.05

# After so long the agent does something else before it reports more ranks: to look at those in MPI takes time.
_BATCH_SECONDS = 0.3

# How long py-spy may take for a rank: as long as the head waits for each (head/stack_requests.py).
NATIVE_SECONDS = 6.0


class _PendingRank:
    """A rank whose stacks were requested."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.why = ""
        self.signalled: SignalledProcess | None = None
        self.threads: list[ThreadStack] = []
        self.awaits = Awaited()
        self.children: ChildStacks | None = None
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
        self._sockets: dict[str, traffic.Connection] | None = None  # None: not looked up yet
        self._pause = _FIRST_LOOK
        self._ranks: Iterable[Rank] = ()  # those running now
        self._known: list[StackDump] = []  # what is about to be told
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
        self._slack = procfs.slack()
        self._sockets = None
        self._pause, self._look = _FIRST_LOOK, self._begun
        for target in self._pending:
            self._channel.ask(target.pid, question.number, everything=question.everything)
        self.tick(self._begun)

    def _has_answered(self, target: _PendingRank, now: float) -> bool:
        """Take the rank's answer, if any. Returns whether it is complete."""
        if target.signalled is not None:
            threads = target.signalled.threads()
            target.threads, target.why = threads or [], target.signalled.why
            return threads is not None
        said = self._channel.answer(target.pid, self._question.number)
        if said and (reported := said.get("threads")):
            sources = SourceLines(f"/proc/{target.pid}/cwd")
            target.threads = _with_sources(reported, sources)
            target.awaits = _awaited(said.get("awaits", Awaited()), sources)
            return True
        if procfs.state(target.pid) == "T":  # it would answer only once it is continued
            target.why = SILENT
            return True
        if said is None and now < self._begun + SOCKET_SECONDS * self._slack:
            return False
        if not self._question.insists:  # a routine check must not interrupt a rank with a signal
            target.why = SILENT
            return True
        target.signalled = SignalledProcess(target.pid)
        target.why = target.signalled.why
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
            if target.children is None:
                answered = self._has_answered(target, now)
                if not late and not (answered and (target.threads or not procfs.is_dying(target.pid))):
                    continue  # of a rank that is exiting, its exit tells more
                if not answered:
                    target.why = SILENT
                target.children = self._children_of(target, now)
            is_whole = target.children.tick(time.monotonic())
            self.own |= target.children.own
            if not is_whole:
                continue
            self._pending.remove(target)
            if self._question.native:
                self._native.append(target)
            else:
                self._report(target)
        self._tell()
        self._pause = min(2 * self._pause, _LAST_LOOK)
        self._look = now + self._pause
        self._spy_on_next()

    def _children_of(self, target: _PendingRank, now: float) -> ChildStacks:
        """The processes that descend from a rank, which has answered. A routine check leaves them alone."""
        if not self._question.everything:
            return ChildStacks(self._poll, 0, (), False, now)
        if not target.awaits:
            target.awaits = outside.awaited(target.pid)
        awaited = target.awaits.get("pids") or target.awaits.get("near") or ()
        return ChildStacks(self._poll, target.pid, awaited, self._question.insists, now)

    def _report(self, target: _PendingRank) -> None:
        pid = target.pid
        children = target.children.found if target.children else []
        if self._question.everything:
            ranks = {one.pid: one.rank for one in self._ranks}
            target.awaits |= outside.file_lock(pid, target.awaits, ranks)
            target.awaits |= {} if target.awaits else served.awaited(pid, ranks)
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
        if port := receiving.reads_port(pid, self._sockets):
            known["reads_port"] = port
        if procfs.maps(pid, "/mpi4py/"):
            known["mpi"] = True
        if asleep := procfs.sleep(pid):
            known["asleep"] = asleep
        if target.why == NO_PYTHON and (spins := spinning.look(pid)):
            known["spins"] = spins
        state = procfs.state(pid)
        sleeps_in = procfs.wchan(pid) or procfs.system_call(pid)
        self._known.append(
            StackDump(
                *(time.monotonic_ns(), target.rank, self._question.number, pid, target.why, target.threads, state),
                *(sleeps_in, seconds, busy, moved, said.get("beats", -1), known, target.native),
                awaits=target.awaits,
                children=children,
            )
        )

    def _tell(self) -> None:
        if self._known:
            self._outbox.say(together(self._known))
            self._known = []

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
            self._tell()

    def _spied(self, target: _PendingRank, said: str) -> None:
        self._spy = None
        target.native = said
        self._report(target)
        self._tell()
        self._spy_on_next()

    def end(self) -> None:
        """Drop the request: the ranks are gone, or there is a newer one."""
        for target in self._pending:
            if target.children:
                target.children.end()
        self._pending, self._native = [], []
        if self._spy:
            self._spy.end()
            self._spy = None


def _with_sources(threads: Iterable[RankThread | ThreadStack], sources: SourceLines) -> list[ThreadStack]:
    """The threads that a rank reported, with the source line of each frame."""
    return [
        {"name": one["name"], "frames": [sources.with_source(*frame[:3]) for frame in one["frames"]]} for one in threads
    ]


def _awaited(said: Awaited, sources: SourceLines) -> Awaited:
    """What a rank waits for, with the source lines of tasks."""
    if "chain" in said:
        said["chain"] = _with_sources(said["chain"], sources)
    if "tasks" in said:
        said["tasks"] = _with_sources(said["tasks"], sources)
    return said
