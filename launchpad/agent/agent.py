"""The agent: runs, watches, drains and kills the ranks of its node. It holds no policy: the head decides.

One thread, one loop: wait for commands, children and output (poll.py), then send what there is to say (outbox.py).
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from .. import wire
from ..commands import (
    BarrierOut,
    Call,
    Credit,
    Examine,
    Finish,
    Hello,
    Input,
    Listen,
    MpiReply,
    Piece,
    Ping,
    Reach,
    Signal,
    Start,
    StartMore,
    Survey,
    Sync,
    World,
)
from ..commands import Hold as HoldPort
from ..events import (
    RESULT,
    AgentFailed,
    AgentReady,
    Drained,
    Event,
    Held,
    NoMpi,
    Pong,
    RankExited,
    RankRaised,
    StartFailed,
    StraysEnded,
    Suspended,
    Taken,
)
from ..failures import Crashed
from . import memory, node, processes, rank, scratch
from .answers import Answers
from .outbox import Outbox, Stream
from .poll import Poll
from .starter import Starter

if TYPE_CHECKING:
    from .copy import Copy
    from .examine import Examiner
    from .meeting import Meeting
    from .mpi import Mpi

# The most that is taken from an error file: a traceback, not a log.
ERROR_FILE_BYTES = 256 << 10

# The head greets its agents when it has reached all hosts, and until then it may ask its user for passwords.
GREETING_SECONDS = 600.0


class Agent:
    """Serves one link: commands come from `link_in`, events leave through `link_out`."""

    def __init__(self, link_in: int, link_out: int, stdin_fd: int | None, folder: str) -> None:
        self._link_in = link_in
        self._link_out = link_out
        self._scratch = folder
        self._decoder = wire.Decoder()
        self._ranks: dict[int, rank.Rank] = {}  # by pid, until reaped
        self._poll = Poll()
        self._outbox = Outbox(link_out, self._poll)
        self._finishing = False  # all ranks are gone; what they wrote is being sent
        self._leaving = False  # and when it is, so are we
        self._head_gone = False
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._starter = Starter(self._poll, self._outbox, folder, stdin_fd, self._files, self._begun)
        self._meeting: Meeting | None = None
        self._copy: Copy | None = None
        self._mpi: Mpi | None = None
        self._answers: Answers | None = None
        self._examiner: Examiner | None = None
        self._silence = GREETING_SECONDS  # without a word from the head, which mean its end; 0: no limit
        self._heard_at = time.monotonic()
        self._suspended = False  # the head stands still, and says nothing until it goes on

    def run(self) -> int:
        """Serve until told to finish, or until the head is gone. Returns the process's exit code."""
        processes.become_subreaper()
        guard = os.getppid()
        self._poll.watch(processes.wakeup_on_exit(), self._on_child)
        self._raise_file_limit()
        self._memory_kills = memory.kills()
        os.set_blocking(self._link_in, False)
        os.set_blocking(self._link_out, False)
        self._poll.watch(self._link_in, self._on_link_in)
        while not (self._head_gone or self._outbox.broken or (self._leaving and self._outbox.empty)):
            self._poll.wait(self._patience())
            if self._examiner:
                self._examiner.pump()
            self._outbox.pump()
            if self._finishing and not self._leaving and self._outbox.drained:
                self._finishing = False
                self._outbox.say(Drained(time.monotonic_ns()))
                self._outbox.pump()
        if self._head_gone:  # or is the guard, which has held the link open for us?
            reason = "its agent heard no more of us" if os.getppid() == guard else "its guard was killed"
            self._outbox.say(AgentFailed(time.monotonic_ns(), reason))
            self._outbox.pump()
        if self._copy:
            self._copy.close()
        processes.sweep(self._reap)
        if self._mpi:
            self._mpi.close()
        scratch.remove(self._scratch)
        return 0

    def _patience(self) -> float:
        """Seconds to wait for events at most, -1 for any time. Finds out whether the head has been silent too long."""
        own = self._outbox.patience
        if self._examiner and self._examiner.patience >= 0:
            own = min(own, self._examiner.patience) if own >= 0 else self._examiner.patience
        if not self._silence or self._suspended:
            return own
        left = self._heard_at + self._silence - time.monotonic()
        if left <= 0 and not select.select([self._link_in], [], [], 0)[0]:  # what came while we were busy is a word too
            self._head_gone = True
        return max(0.0, left if own < 0 else min(own, left))

    # Getting ready.

    def _raise_file_limit(self) -> None:
        _, hard = self._files
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass

    # Commands.

    def _on_link_in(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._head_gone = True
        self._heard_at = time.monotonic()
        try:
            for command in self._decoder.feed(data):
                self._obey(command)
        except (
            wire.WireError,
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            OSError,
        ) as error:  # no head of ours speaks like this
            sys.stderr.write(f"launchpad: the agent was asked for nonsense: {error}\n")
            self._outbox.say(AgentFailed(time.monotonic_ns(), f"its agent can't do what it was asked: {error}"))
            self._head_gone = True

    def _obey(self, command: Any) -> None:
        match command:
            case Hello():
                self._hello(command)
            case Survey():
                from .survey import survey

                found = survey(command)
                self._starter.brings_launchpad = command.torch and not found.launchpad
                self._outbox.say(found)
            case Sync():
                from .copy import Copy

                self._copy = Copy(command)
                self._say_all(self._copy.begin())
            case Piece() if self._copy:
                self._say_all(self._copy.take(command))
            case Call(data):
                scratch.add_to_call(self._scratch, data)
                self._starter.has_call = True
                self._outbox.say(Taken(time.monotonic_ns(), len(data)))
            case Listen() | Reach():
                self._meet(command)
            case HoldPort(address, port):
                self._outbox.say(Held(time.monotonic_ns(), self._starter.hold_port(port, address)))
            case Ping(at):
                self._outbox.say(Pong(time.monotonic_ns(), at))
            case Start():
                if self._meeting:
                    self._meeting.close()
                self._answers = self._answers or Answers(self._poll, self._scratch)
                self._starter.start(command, self._reap, self._answers.path)
            case Signal(signum):
                for started in self._ranks.values():
                    started.signal(signum)
                self._starter.signal(signum)
                if signum == signal.SIGSTOP:
                    self._outbox.say(Suspended(time.monotonic_ns()))
                if signum in (signal.SIGSTOP, signal.SIGCONT):
                    self._suspended = signum == signal.SIGSTOP
            case Input(data):
                self._starter.take_input(data)
            case Credit(number, stream, size):
                self._outbox.credit(number, stream, size)
            case World():
                self._join(command)
            case BarrierOut() if self._mpi:
                self._mpi.barrier_out(command)
            case StartMore(ranks):
                self._starter.start_more(ranks)
            case MpiReply(number, line) if self._mpi:
                self._mpi.reply(number, line)
            case Finish(leave):
                self._finish(leave)
            case Examine() if self._answers:
                from .examine import Examiner

                self._examiner = self._examiner or Examiner(self._poll, self._outbox, self._answers)
                self._examiner.begin(command, self._ranks.values())

    def _say_all(self, events: list[Event]) -> None:
        for event in events:
            self._outbox.say(event)

    def _meet(self, command: Listen | Reach) -> None:
        from .meeting import Meeting

        self._meeting = self._meeting or Meeting(self._poll, self._outbox)
        if isinstance(command, Listen):
            self._meeting.listen(command)
        else:
            self._meeting.reach(command)

    def _join(self, world: World) -> None:
        from .mpi import Mpi

        self._mpi = self._starter.mpi = self._mpi or Mpi(self._poll, self._outbox, self._scratch)
        self._mpi.add(world)

    def _hello(self, hello: Hello) -> None:
        self._silence = hello.silence
        self._outbox.say(
            AgentReady(
                time=time.monotonic_ns(),
                wall=time.time(),
                pid=os.getpid(),
                hostname=socket.gethostname(),
                cores=node.usable_cores(),
                gpus=node.visible_gpus() if hello.count_gpus else -1,
                visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
                open_files=node.open_file_limit(),
                processes=node.process_limit(),
                port=self._starter.hold_port(hello.port),
            )
        )

    def _begun(self, started: rank.Rank) -> None:
        self._ranks[started.pid] = started
        if started.status_fd is not None:
            self._poll.watch(started.status_fd, lambda fd: self._on_status(fd, started))

    def _finish(self, leave: bool) -> None:
        """All ranks are gone: kill what they left behind, then send what all of them wrote."""
        self._finishing = True
        self._leaving = leave
        spared = self._starter.finish(leave)
        killed = processes.sweep(self._reap, self._starter.own, spared)
        if killed:
            self._outbox.say(StraysEnded(time.monotonic_ns(), killed))
        if self._mpi:
            if leave and self._mpi.unused:
                self._outbox.say(NoMpi(time.monotonic_ns()))
            self._mpi.close()
        self._outbox.drain()

    # Children.

    def _on_child(self, fd: int) -> None:
        os.read(fd, 4096)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._ranks:
                self._starter.hear()  # it may have been forked a moment ago
            started = self._ranks.pop(pid, None)
            if started is None:
                self._starter.exited(pid)
            else:
                self._exited(started, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)

    def _exited(self, started: rank.Rank, code: int, largest: int) -> None:
        now = time.monotonic_ns()
        if started.status_fd is not None:
            self._on_status(started.status_fd, started)
        before, self._memory_kills = self._memory_kills, memory.kills() if code else self._memory_kills
        killed = code == -signal.SIGKILL and self._memory_kills > before
        error = scratch.take_error_file(self._scratch, started.rank, ERROR_FILE_BYTES)
        if error:
            self._outbox.say(RankRaised(now, started.rank, error))
        for raised in scratch.take_exceptions(self._scratch, started.rank):
            self._outbox.say(raised)
        crash = scratch.take_crash(self._scratch, started.rank)
        if crash:
            self._outbox.say(Crashed(now, started.rank, crash))
        if self._mpi:
            self._mpi.exited(started.rank, code)
        self._outbox.say(RankExited(now, started.rank, code, largest, killed))
        result = scratch.open_result(self._scratch, started.rank) if self._starter.has_call else -1
        if result >= 0:
            self._outbox.send_file(Stream(started.rank, RESULT, result, self._starter.window))

    def _on_status(self, fd: int, started: rank.Rank) -> None:
        reason = os.read(fd, 4096)
        self._poll.unwatch(fd)
        os.close(fd)
        started.status_fd = None  # the number will be another's
        if reason:
            self._outbox.say(StartFailed(time.monotonic_ns(), started.rank, reason.decode("utf-8", "surrogateescape")))
