"""The agent: starts, watches, drains and kills the ranks of its node. It has no policy of its own: the head decides.

One thread, one loop: wait for commands, children and output (poll.py), then send events and output (outbox.py).
"""

from __future__ import annotations

import _socket
import errno
import functools
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from .. import linux
from ..protocol import wire
from ..protocol.commands import (
    Credit,
    Fence,
    Finish,
    Hello,
    HoldPort,
    HoldPorts,
    Ping,
    Signal,
    SignalAgent,
    SignalRank,
    Start,
    StartMore,
    StdinData,
)
from ..protocol.events import (
    AgentFailed,
    AgentReady,
    Crashed,
    Drained,
    LeftBehind,
    OrphansKilled,
    Pong,
    PortHeld,
    RankExited,
    RankRaised,
    StartFailed,
    Suspended,
)
from ..protocol.printable import printable
from .host import processes, resources, space
from .net import port
from .outbox import Outbox
from .part import AgentHub
from .parts import Parts
from .poll import Poll, earliest
from .ranks import rank, rundir, shared_memory
from .ranks.input import Input
from .ranks.leftovers import Leftovers
from .ranks.signals import Signals
from .ranks.starter import Starter
from .ranks.store import Store

if TYPE_CHECKING:
    from .ranks.forkserver_client import KeptFork

# An error file is read up to this size: it holds a traceback, not a log.
ERROR_FILE_BYTES = 256 << 10

# The head says Hello once it has reached all hosts; until then it may be asking the user for passwords.
HELLO_SECONDS = 600.0

# If we look for a sign of the head later than this, it may have stood still with us (a paused machine): it then gets
# this part of the heartbeat timeout more, in which it pings at least once.
PUNCTUAL_SECONDS = 0.01
MORE_PATIENCE = 1 / 4

# How long a failing agent tries to send the reason to a head that does not read.
FLUSH_SECONDS = 2.0

# How many signs of life the head gets within its heartbeat timeout while we end processes.
SIGNS_OF_LIFE = 4

# How a rank may end that could not read what a broken disk or memory has.
_CRASHES = (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT)

# System errors that point to a bug in the caller, not to a full disk or a missing permission.
_CALLER_ERRORS = (errno.EBADF, errno.EINVAL, errno.EFAULT, errno.ENOTSOCK)


class Agent:
    """Serves one link: commands come from `link_in`, events leave through `link_out`."""

    def __init__(
        self,
        link_in: int,
        link_out: int,
        stdin_fd: int | None,
        folder: str,
        heartbeats: int,
        kept: KeptFork | None = None,
        why_cold: str = "",
    ) -> None:
        """`heartbeats`: an eventfd, to be written to if the head is going to listen for heartbeats.

        `kept`: the forkserver that a kept image provides; `why_cold`: why there is none.
        """
        self._link_in = link_in
        self._link_out = link_out
        self._rundir = folder
        self._heartbeats = heartbeats
        self._decoder = wire.Decoder()
        self._poll = Poll()
        self._outbox = Outbox(link_out, self._poll)
        self._hub = AgentHub(self._poll, self._outbox, folder)
        self._parts = Parts(self._hub)
        self._ranks = self._hub.ranks
        self._signals = Signals(self._ranks, self._outbox.say)
        self._leftovers = Leftovers(self._outbox.say)
        self._finishing = False  # all ranks are gone; the rest of their output is being sent
        self._leaving = False  # exit once that is done
        self._head_gone = False
        self._file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._ports = port.FreePorts()
        self._store = Store(self._hub)
        self._input = Input(self._hub, stdin_fd)
        self._starter = Starter(
            *(self._hub, self._parts, self._store, self._input, self._file_limit, self._on_started),
            *(kept, why_cold),
        )
        self._heartbeat_timeout = HELLO_SECONDS  # a head that is silent this long is taken for gone; 0: no limit
        self._last_heard = time.monotonic()
        self._patience = 0.0  # seconds that the head gets more, as it was silent when we looked, but we looked late
        self._begun = time.time()
        self._attempt_began = time.monotonic()
        self._broken: str | None = None  # an error of this node's hardware in this attempt, once it was looked for
        self._reaped: set[int] = set()  # ranks, and what they have left
        self._suspended = False  # the head is stopped, and silent until it is continued

    def run(self) -> int:
        """Serve until the head says to leave or is gone. Returns the process's exit code."""
        processes.become_subreaper()
        guard = os.getppid()
        self._poll.watch(processes.wakeup_on_exit(), self._on_child)
        self._raise_file_limit()
        self._memory_kills = self._kills_before = resources.oom_kills()
        os.set_blocking(self._link_in, False)
        os.set_blocking(self._link_out, False)
        self._poll.watch(self._link_in, self._on_link_in)
        try:
            self._serve()
        except Exception as error:
            self._outbox.say(failure_of(error))
            self._outbox.flush(FLUSH_SECONDS)
        if self._head_gone:  # the head, or the guard, which held the link open
            reason = "its agent lost contact with the head" if os.getppid() == guard else "its guard was killed"
            self._outbox.say(AgentFailed(time.monotonic_ns(), reason))
            self._outbox.write()
        if not linux.shows_our_pids():  # the sweep can't find them
            for started in self._ranks.values():
                started.signal(signal.SIGKILL)
        self._sweep()
        shared_memory.remove(self._reaped, self._begun)
        for part in self._parts:
            part.close()
        rundir.remove(self._rundir)
        if os.getppid() == guard:  # it holds the link open, and a rank may have stopped it
            os.kill(guard, signal.SIGCONT)
        return 0

    def _serve(self) -> None:
        while not (self._head_gone or self._outbox.broken or (self._leaving and self._outbox.empty)):
            deadlines = (self._silence_ends, self._parts.deadline, self._leftovers.deadline, self._outbox.deadline)
            self._poll.wait(earliest(deadlines))
            now = time.monotonic()
            self._check_silence(now)
            self._parts.tick(now)
            self._leftovers.tick(now)
            self._outbox.tick(now)
            if self._finishing and not self._leaving and self._outbox.drained:
                self._finishing = False
                self._outbox.say(Drained(time.monotonic_ns()))
                self._outbox.write()

    @property
    def _silence_ends(self) -> float | None:
        """When a head that goes on being silent is taken for gone."""
        if not self._heartbeat_timeout or self._suspended:
            return None
        return self._last_heard + self._heartbeat_timeout + self._patience

    def _check_silence(self, now: float) -> None:
        ends = self._silence_ends
        if ends is None or now < ends:
            return
        if select.select([self._link_in], [], [], 0)[0]:  # data that came while we were busy counts
            return
        if now <= ends + PUNCTUAL_SECONDS or self._patience:
            self._head_gone = True
        else:
            self._patience = now - ends + self._heartbeat_timeout * MORE_PATIENCE

    def _raise_file_limit(self) -> None:
        _, hard = self._file_limit
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass

    # Commands.

    def _on_link_in(self, fd: int) -> None:
        data = linux.read_now(fd, 1 << 16)
        if data is None:
            return
        if not data:
            self._head_gone = True
        self._last_heard, self._patience = time.monotonic(), 0.0
        for command in self._decoder.feed(data):
            self._on_command(command)

    def _on_command(self, command: Any) -> None:
        match command:
            case Hello():
                self._on_hello(command)
            case Fence(number=number):
                self._outbox.fence(number)
            case HoldPort(address=address, port=number):
                self._outbox.say(PortHeld(time.monotonic_ns(), *self._store.hold_port(number, address)))
            case HoldPorts(number=number):
                self._outbox.say(self._ports.hold(number))
            case Ping(time=at):
                self._outbox.say(Pong(time.monotonic_ns(), at))
            case Start():
                self._attempt_began, self._broken = time.monotonic(), None
                self._starter.start(command, self._reap)
            case StartMore(ranks=ranks):
                self._starter.start_more(ranks)
            case StdinData(data=data):
                self._input.take(data)
            case Credit(rank=number, stream=stream, size=size):
                self._outbox.credit(number, stream, size)
            case Signal():
                self._on_signal(command)
            case SignalRank(rank=number, signum=signum):
                self._signals.send_to(number, signum)
            case SignalAgent(signum=signum):
                os.kill(os.getpid(), signum)
            case Finish(leave=leave, grace=grace):
                self._finish(leave, grace)
            case _:
                self._parts.on(command)

    def _on_hello(self, hello: Hello) -> None:
        port, holder = self._store.hold_port(hello.port)
        self._heartbeat_timeout = hello.silence
        if hello.silence:
            os.eventfd_write(self._heartbeats, 1)
        self._outbox.say(
            AgentReady(
                time=time.monotonic_ns(),
                wall=time.time(),
                pid=os.getpid(),
                hostname=printable(_socket.gethostname()),
                cores=resources.usable_cores(),
                gpus=_accelerators(hello),
                visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
                open_files=resources.open_file_limit(),
                processes=resources.process_limit(),
                port=port,
                port_holder=holder,
            )
        )

    def _on_signal(self, command: Signal) -> None:
        self._signals.send(command.signum, stops=command.stops, ranks=command.ranks)
        self._starter.signal(command.signum, stops=command.stops)
        if command.signum == signal.SIGKILL:
            self._leftovers.hurry()
        if command.signum == signal.SIGSTOP:
            self._outbox.say(Suspended(time.monotonic_ns()))
        if command.signum in (signal.SIGSTOP, signal.SIGCONT):
            self._suspended = command.signum == signal.SIGSTOP

    def _on_started(self, started: rank.Rank) -> None:
        self._ranks[started.pid] = started
        for part in self._parts:
            part.started(started)
        if started.status_fd is not None:
            self._poll.watch(started.status_fd, lambda fd: self._on_status(fd, started))

    def _finish(self, leave: bool, grace: float) -> None:
        """All ranks are gone: give what they left behind this time, kill it, then send the rest of their output."""
        self._signals.release()
        self._memory_kills = self._kills_before = resources.oom_kills()
        own = self._starter.finish(leave)
        # The store takes a while to go, for which nothing has to wait: the next one listens on the same socket.
        spared = set() if leave else set(own)
        for part in self._parts:
            own.update(part.end())
        clear = functools.partial(self._clear, leave, own, spared)
        if grace:
            self._leftovers.wait({*own, *spared}, grace, clear)
        else:
            clear({})

    def _clear(self, leave: bool, own: Collection[int], spared: Collection[int], killed: dict[int, str]) -> None:
        self._finishing = True
        self._leaving = leave
        killed |= self._sweep(own, spared)
        shared_memory.remove(self._reaped, self._begun)
        self._reaped.clear()
        if killed:
            self._outbox.say(OrphansKilled(time.monotonic_ns(), processes.shown(killed)))
        if leave:
            self._input.report_unused()
        for part in self._parts:
            part.finish(leave)
        self._outbox.drain()

    def _has_left_behind(self) -> bool:
        """Whether a child is neither a rank nor ours."""
        return bool(processes.left_behind(self._ranks.keys() | self._starter.own))

    def _sweep(self, own: Collection[int] = (), spared: Collection[int] = ()) -> dict[int, str]:
        """Kill all descendants. Where that takes seconds, tell the head that we are still here."""
        reap = processes.telling(self._reap, self._heartbeat_timeout / SIGNS_OF_LIFE, self._give_sign_of_life)
        return processes.sweep(reap, own, spared)

    def _give_sign_of_life(self) -> None:
        self._outbox.say(Pong(time.monotonic_ns(), 0))
        self._outbox.write()

    # Children.

    def _on_child(self, fd: int) -> None:
        os.read(fd, 4096)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._reaped.add(pid)
            if pid not in self._ranks:
                self._starter.hear()  # it may have been forked just now
            started = self._ranks.pop(pid, None)
            if started is None:
                self._starter.exited(pid)
                for part in self._parts:
                    part.reaped(pid, os.waitstatus_to_exitcode(status))
            else:
                self._on_exit(started, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
        self._signals.recheck()
        self._leftovers.recheck()

    def _on_exit(self, started: rank.Rank, code: int, peak_memory: int) -> None:
        now = time.monotonic_ns()
        if started.status_fd is not None:
            self._on_status(started.status_fd, started)
        before, self._memory_kills = self._memory_kills, resources.oom_kills() if code else self._memory_kills
        memory_killed: bool | None = False
        if code == -signal.SIGKILL:
            memory_killed = None if before is None or self._memory_kills is None else self._memory_kills > before
        kills = (self._memory_kills or 0) - (self._kills_before or 0) if code else 0
        error = rundir.take_error_file(self._rundir, started.rank, ERROR_FILE_BYTES)
        if error:
            self._outbox.say(RankRaised(now, started.rank, error))
        for raised in rundir.take_exceptions(self._rundir, started.rank, self._starter.cwd):
            self._outbox.say(raised)
        crash = rundir.take_crash(self._rundir, started.rank, self._starter.cwd)
        if crash:
            self._outbox.say(Crashed(now, started.rank, crash))
        for part in self._parts:
            part.exited(started, code)
        if code == 0 and self._has_left_behind():
            self._outbox.say(LeftBehind(now, started.rank))
        why = space.explain_exit(code)
        broken = self._broken_hardware() if code > 0 or -code in _CRASHES else ""
        exited = RankExited(now, started.rank, code, peak_memory, memory_killed, max(0, kills), why, broken)
        self._signals.exited(started.pid, exited)

    def _broken_hardware(self) -> str:
        """What the kernel's log says of it since the attempt began, at its first failure."""
        if self._broken is None:
            from .host.kernel_log import hardware_errors

            self._broken = "".join(hardware_errors(self._attempt_began)[-1:])
        return self._broken

    def _on_status(self, fd: int, started: rank.Rank) -> None:
        reason = os.read(fd, 4096)
        self._poll.unwatch(fd)
        os.close(fd)
        started.status_fd = None  # the descriptor number may be reused
        if reason:
            self._outbox.say(StartFailed(time.monotonic_ns(), started.rank, reason.decode("utf-8", "surrogateescape")))


def _accelerators(hello: Hello) -> int:
    if hello.accelerator:
        return resources.accelerators(hello.accelerator, hello.python or sys.executable)
    return resources.visible_gpus() if hello.count_gpus else -1


def failure_of(error: Exception) -> AgentFailed:
    """The report on what ended the agent: one sentence, and for a bug of our own the traceback."""
    now = time.monotonic_ns()
    if isinstance(error, wire.WireError):
        return AgentFailed(now, f"its agent received invalid data: {error}")
    if isinstance(error, OSError) and error.strerror and error.errno not in _CALLER_ERRORS:
        where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        return AgentFailed(now, f"its agent failed: {error.strerror}{where}")
    import traceback

    what = " ".join("".join(traceback.format_exception_only(error)).split())
    return AgentFailed(
        now, f"its agent crashed because of a bug in launchpad: {what}", "".join(traceback.format_exception(error))
    )
