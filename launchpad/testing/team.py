"""Forks the ranks of one test, and looks after them until all have ended: deaths, time limits, the store, MPI."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from typing import Any

import pytest

from launchpad import linux
from launchpad.agent.host import processes
from launchpad.agent.mpi.node_worlds import NodeWorlds
from launchpad.agent.net import port
from launchpad.agent.poll import Poll, earliest
from launchpad.agent.ranks.rank import Rank
from launchpad.agent.stacks.debug_channel import DebugChannel
from launchpad.agent.stacks.dump import StackDumper
from launchpad.diagnosis import stack_summary
from launchpad.job import mpi
from launchpad.protocol.commands import DumpStacks, MpiWorld
from launchpad.protocol.events import Event, MpiRequest, RankFailed, StackDump, StackDumps, StacksTaken
from launchpad.protocol.stacks import separate
from launchpad.rank import own_process, store
from launchpad.testing import member, messages, shared
from launchpad.testing.capturing import Captured, is_pytests
from launchpad.testing.outcome import STOPPED, TIMEOUT, WAITED, RankEnd, TestEnd

# When a rank has failed, the others have this long to end, too; those that wait for it are ended earlier.
AFTER_FAILURE = 5.0
# How often it is looked whether they wait.
LOOK_SECONDS = 1.0

_NO_NAMES = "rc=1 msg=not_served_to_tests"


class _TestRank:
    """One rank, seen from here."""

    def __init__(self, rank: int) -> None:
        self.end = RankEnd(rank)
        self.captured = Captured()
        self.line, self.far_end = socket.socketpair()
        self.incoming = messages.Incoming()
        self.pid = 0
        self.gone = False
        self.failed = False  # not passed, whatever the reason
        self.deadline: float | None = None  # of its call, as pytest-timeout wants it


class Team:
    """The ranks of one test."""

    def __init__(
        self,
        item: pytest.Item,
        size: int,
        limit: float | None,
        folder: str,
        link: socket.socket,
        backend: str,
        with_mpi: bool,
    ) -> None:
        """`folder`: a private one; `link`: to pytest, watched for its end."""
        self._item = item
        self._limit = limit
        self._folder = folder
        self._link = link
        self._backend = backend
        self._poll = Poll()
        self._spared: list[int] = []  # our children that are no ranks
        self._members = [_TestRank(rank) for rank in range(size)]
        self._port = port.Port(0)
        self._bell = port.Bell(folder)
        self._store: Any = None
        self._channel = DebugChannel(self._poll, folder)
        self._dumper = StackDumper(self._poll, self, self._channel)
        self._worlds = NodeWorlds(self._poll, self, folder) if with_mpi or backend == "mpi" else None
        self._dumps: list[StackDump] = []
        self._taken = 0  # how many times stacks were asked for
        self._why = ""  # why they are being taken: TIMEOUT or WAITED
        self._deadline = self._look = self._last = float("inf")
        self._terminal: _TestRank | None = None
        self._queue: list[_TestRank] = []  # who waits for the terminal
        self._first: _TestRank | None = None  # who has had it for --pdb
        self._paused = 0.0
        self._interrupted = False
        self._end = TestEnd(limit=limit, ranks=[one.end for one in self._members])

    def run(self) -> TestEnd:
        """Run the test. Raises OSError if pytest is gone."""
        self._spared = processes.children()
        wakeup = processes.wakeup_on_exit()
        signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        try:
            self._poll.watch(wakeup, _empty)
            self._poll.watch(self._link.fileno(), lambda _: self._lost())
            self._poll.watch(self._bell.fileno(), lambda _: self._bell.answer(self._serve_store()))
            self._start()
            if shared.uses(self._item, "process_group"):
                self._serve_store()
            while not all(one.gone for one in self._members):
                self._poll.wait(self._next())
                self._reap()
                self._look_around(time.monotonic())
            return self._end
        finally:
            self._close(wakeup)

    # The beginning.

    def _start(self) -> None:
        if self._worlds is not None:
            size = len(self._members)
            name = f"test-{os.getpid()}-{secrets.token_hex(6)}"
            ranks = list(range(size))
            mapping = mpi.process_mapping([size])
            self._worlds.add(MpiWorld(0, name, size, 0, ranks, [0] * size, [""], [size], mapping, [], {}, "", "mpich"))
        environ = self._environ()
        seed = secrets.randbits(64)
        served = [port.ADDRESS, self._port.number, self._bell.path] if self._port.number > 0 else []
        threads = _torch_threads(len(self._members))
        here = os.getpid()
        for one in self._members:
            rank = one.end.rank
            own = {**environ, **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}}
            pmi = -1
            if self._worlds is not None:
                pmi = self._worlds.open(rank)
                size = len(self._members)
                own |= {**mpi.environ(mpi.MpiSeat(rank, size, rank, size, "")), "PMI_FD": str(pmi)}
            removed = frozenset(os.environ.keys() - own.keys())
            place = member.Place(rank, own, removed, served, self._channel.path, seed, threads)
            try:
                one.pid = os.fork()
            except OSError as error:
                self._end.error = f"rank {rank} can't be forked: {error.strerror}"
                one.gone = True
                one.far_end.close()
                self._kill(STOPPED)
                continue
            if one.pid == 0:
                self._drop(one)
                member.run(self._item, place, one.far_end, one.captured, here)
            one.far_end.close()
            if pmi >= 0:
                os.close(pmi)
            self._poll.watch(one.line.fileno(), lambda _, one=one: self._read(one))  # type: ignore[misc]
            one.line.setblocking(False)
        if self._limit is not None:
            self._deadline = time.monotonic() + self._limit

    def _drop(self, kept: _TestRank) -> None:
        """In a rank: close what is the team's."""
        self._link.close()
        self._poll.close()
        self._port.close()
        for one in self._members:
            one.line.close()
            if one is not kept and one.far_end.fileno() >= 0:
                one.far_end.close()

    def _environ(self) -> dict[str, str]:
        """The variables of all ranks: torchrun's contract, and what pytest has."""
        size = str(len(self._members))
        environ = dict(os.environ)
        if self._worlds is not None:
            self._worlds.prepare(environ)
        environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
        environ |= {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": port.ADDRESS,
            "MASTER_PORT": str(self._port.number),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": f"pytest-{os.getpid()}",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        environ.pop("TORCHELASTIC_ERROR_FILE", None)
        environ.setdefault("OMP_NUM_THREADS", str(_cores_each(len(self._members))))
        if self._backend:
            environ["LAUNCHPAD_BACKEND"] = self._backend
        return environ

    def _serve_store(self) -> bool:
        """Serve the store, unless it is served. Returns whether it is.

        Its thread is here only while the ranks run, so no process is ever forked beside it.
        """
        if self._store is None and "torch.distributed" in sys.modules and self._port.number > 0 and self._port.listen():
            self._store = store.serve_here(os.dup(self._port.fileno()), port.ADDRESS, self._port.number)
        return self._store is not None

    # While they run.

    def _next(self) -> float | None:
        """When something is due; None: never."""
        own = [one.deadline for one in self._members if one.deadline is not None and not one.gone]
        due = min([self._deadline, self._look, self._last, *own])
        return earliest((due if due < float("inf") and self._terminal is None else None, self._dumper.deadline))

    def _interrupt(self) -> None:
        """Ctrl-C, handed on by pytest: for the rank at the terminal, or else for all."""
        if self._terminal is not None:
            os.kill(self._terminal.pid, signal.SIGINT)
        else:
            self._end.interrupted = True
            self._kill(STOPPED)

    def _lost(self) -> None:
        """pytest is gone: it sends nothing while a test runs."""
        raise BrokenPipeError

    def _read(self, one: _TestRank) -> None:
        data = linux.read_now(one.line.fileno(), 1 << 20)
        if data is None:
            return
        if not data:
            self._poll.unwatch(one.line.fileno())
            return
        for message in one.incoming.feed(data):
            self._take(one, message)

    def _take(self, one: _TestRank, message: Any) -> None:
        end = one.end
        match message:
            case "report", report:
                end.reports.append(report)
                skipped_part = report["outcome"] == "skipped" and report.get("_report_type") == "SubTestReport"
                if report["outcome"] != "passed" and not skipped_part:
                    self._fails(one)
            case "warning", warning:
                end.warnings.append(warning)
            case "left", left:
                end.left += left
            case "limit", seconds:
                one.deadline = None if seconds is None else time.monotonic() + seconds
                self._end.limit = seconds or self._end.limit
            case "stop", text, code:
                end.stop = (text, code)
            case ("interrupted",):
                self._end.interrupted = True
                self._kill(STOPPED)
            case "broken", text:
                end.broken = text
                self._fails(one)
            case ("done",):
                end.done = True
                if self._worlds is not None and all(other.end.done or other.gone for other in self._members):
                    self._let_finalize()
            case (("first" | "enter") as what,):
                self._wants_terminal(one, only_first=what == "first")
            case ("leave",):
                self._leaves_terminal(one)

    def _let_finalize(self) -> None:
        """All ranks have reported. Where one has failed, MPI_Finalize would wait for it."""
        if any(one.failed for one in self._members):
            self._kill(STOPPED)

    def _fails(self, one: _TestRank) -> None:
        one.failed = True
        now = time.monotonic()
        if self._last == float("inf"):
            self._last = now + AFTER_FAILURE
            self._look = now + LOOK_SECONDS

    # The terminal, for --pdb and breakpoint().

    def _wants_terminal(self, one: _TestRank, only_first: bool) -> None:
        if self._terminal is one:
            one.line.send(member.GO)
        elif only_first and self._first not in (None, one):
            one.line.send(member.NO)
        elif self._terminal is None:
            self._first = self._first or (one if only_first else None)
            self._terminal, self._paused = one, time.monotonic()
            one.line.send(member.GO)
        else:
            self._queue.append(one)

    def _leaves_terminal(self, one: _TestRank) -> None:
        if self._terminal is not one:
            return
        self._terminal = None
        held = time.monotonic() - self._paused
        self._deadline += held
        self._last += held
        self._look += held
        for other in self._members:
            other.deadline = None if other.deadline is None else other.deadline + held
        while self._queue and self._terminal is None:
            following = self._queue.pop(0)
            if not following.gone:
                self._wants_terminal(following, only_first=False)

    # Ends, and what is done about those that don't come.

    def _reap(self) -> None:
        for one in self._members:
            if one.gone or one.pid == 0:
                continue
            pid, status = os.waitpid(one.pid, os.WNOHANG)
            if pid:
                self._has_ended(one, os.waitstatus_to_exitcode(status))

    def _has_ended(self, one: _TestRank, code: int) -> None:
        if one.line.fileno() in self._poll:
            self._read(one)  # what it has said at last
            self._poll.unwatch(one.line.fileno())
        one.gone = True
        one.end.code = code
        self._leaves_terminal(one)
        if one.end.died():
            self._fails(one)
        if self._worlds is not None:
            self._worlds.exited(one.end.rank, code)

    def _look_around(self, now: float) -> None:
        if self._dumper.deadline is not None:
            self._dumper.tick(now)
            if self._dumper.deadline is None:
                self._stacks_taken()
            return
        if self._terminal is not None or all(one.gone for one in self._members):
            return
        late = any(one.deadline is not None and now >= one.deadline for one in self._members if not one.gone)
        if now >= self._deadline or late:
            self._take_stacks(TIMEOUT)
        elif now >= min(self._look, self._last):
            self._look = now + LOOK_SECONDS
            self._take_stacks(WAITED)

    def _take_stacks(self, why: str) -> None:
        self._why = why
        self._taken += 1
        self._dumps = []
        live = [Rank(one.end.rank, one.pid, None) for one in self._members if not one.gone]
        self._dumper.begin(DumpStacks(self._taken, True, True, False), live)
        if self._dumper.deadline is None:
            self._stacks_taken()

    def _stacks_taken(self) -> None:
        now = time.monotonic()
        live = [one.end.rank for one in self._members if not one.gone]
        dumps = [dump for dump in self._dumps if dump.rank in live]
        if self._why == WAITED and now < self._last:
            groups = stack_summary.grouped(dumps)
            if not groups or not all(group.where.waits_in for group in groups):
                return
        taken = StacksTaken(time.monotonic_ns(), "asked", 0, False, live, dumps)
        self._end.stacks = stack_summary.merged(taken, os.getcwd(), {})
        self._deadline = self._look = self._last = float("inf")
        for one in self._members:
            one.deadline = None
        self._kill(self._why)

    def say(self, event: Event) -> None:
        """Take an event from the agent's parts."""
        match event:
            case StackDumps():
                dumps = separate(event, {})
                self._dumps += [dump._replace(threads=_without_pytest(dump.threads)) for dump in dumps]
            case RankFailed(rank=rank, reason=reason):
                one = self._members[rank]
                if not one.end.reason and not one.failed and not one.end.ended:
                    one.end.reason = reason
                    self._fails(one)
                    self._kill(WAITED)  # a world that a rank has aborted or left is over
            case MpiRequest(rank=rank, lines=lines):
                assert self._worlds is not None
                verb = lines[0].partition("cmd=")[2].partition(" ")[0].removesuffix("_name")
                self._worlds.reply(rank, f"cmd={verb}_result {_NO_NAMES}")

    def _kill(self, why: str) -> None:
        exiting = all(one.end.done or one.gone for one in self._members)
        for one in self._members:
            if one.pid and not one.gone:
                # One that is done may only wait in MPI_Finalize for those that hang in the test.
                one.end.ended = one.end.ended or (why if exiting or not one.end.done else STOPPED)
                Rank(one.end.rank, one.pid, None).signal(signal.SIGKILL)

    def _close(self, wakeup: int) -> None:
        """End everything that the ranks have left, and note it where they ended well."""
        self._kill(STOPPED)
        for one in self._members:
            if one.pid and not one.gone:
                os.waitpid(one.pid, 0)
        self._store = None
        left = processes.sweep(self._reap_orphans, spared=self._spared)
        if all(one.end.done and not one.failed for one in self._members):
            self._end.left = [f"the process {one.replace(' ', ' (', 1)})" for one in processes.shown(left)]
        if self._worlds is not None:
            self._worlds.close()
        for one in self._members:
            one.end.output = one.captured.read()
            one.end.crash = one.captured.read_crash()
            one.captured.close()
            one.line.close()
        self._dumper.end()
        self._channel.close()
        self._bell.close()
        self._port.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        writer = signal.set_wakeup_fd(-1)
        self._poll.close()
        os.close(wakeup)
        os.close(writer)

    def _reap_orphans(self) -> None:
        for pid in processes.children():
            if pid not in self._spared:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass


def _empty(fd: int) -> None:
    os.read(fd, 4096)


def _without_pytest(threads: list[Any]) -> list[Any]:
    """The threads without pytest's own frames, which are outside of a test's."""
    kept = []
    for thread in threads:
        frames = thread["frames"]
        end = next((place for place, frame in enumerate(frames) if is_pytests(frame[0])), len(frames))
        kept.append({**thread, "frames": frames[:end] or frames})
    return kept


def _cores_each(size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // size)


def _torch_threads(size: int) -> int:
    """How many threads torch may use in a rank: one, if OpenMP's threads have been started before the fork."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    try:
        alone = own_process.threads() == 1
    except OSError:
        alone = False
    if not alone:
        return 1
    return int(wanted) if wanted.isdecimal() and int(wanted) else _cores_each(size)
