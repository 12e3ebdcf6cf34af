"""The Link to the local node: guard and agent as child processes, frames over two pipes."""

from __future__ import annotations

import _socket  # socket takes 3 ms to import
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from launchpad import caller, linux
from launchpad.image import Cold
from launchpad.protocol import wire
from launchpad.protocol.commands import Command
from launchpad.transport import CLOSE_SECONDS, READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class Forker(Protocol):
        """What can fork the guard and its agent: an image; or an agent, and guard it: a zygote."""

        asks: _socket.socket | None  # over which the guard that it has forked can be asked for more agents

        def ask_to_fork(
            self, commands: int, events: int, stderr: int, stdin_fd: int | None, shown: Sequence[str],
            environ: Mapping[str, str],
        ) -> None:  # fmt: skip
            """Ask for one with these ends of the link; `forked` gives the answer. Raises Cold."""

        def forked(self) -> int:
            """Wait until it has been forked; returns a pidfd of the guard, or the zygote's agent. Raises Cold."""


_AGENT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "agent", "__main__.py")

# The variable with the secret by which nodes join a job (transport/join/). Ranks don't get it.
SECRET = "LAUNCHPAD_SECRET"


class LocalLink:
    """A Link to an agent on this machine. Creating it starts the guard; the agent then waits for its Hello.

    Where they are to be forked, creating the link asks for that, and `wait` has to be called.
    """

    name = ""
    remote = False

    def __init__(self, forker: Forker | None = None, *, leaves: bool = False) -> None:
        """A rank will read our stdin, unless that is a terminal in which we are in the background.

        `forker`: what is to fork them; `why_cold` says why that was not done. `leaves`: we are about to leave
        the terminal, and whoever started us may wait for the end of our stderr. Raises OSError.
        """
        self.why_cold = ""
        stdin_fd = _stdin_for_a_rank(leaves)
        stderr = os.open(os.devnull, os.O_WRONLY) if leaves else 2
        self._open_pipes(stderr, stdin_fd)
        self.asks: _socket.socket | None = None  # over which the guard can be asked for more agents
        self._pid, self._forked = 0, -1  # the guard's pid if it was started, a pidfd of what was forked
        self._asked: Forker | None = None  # has not answered yet
        self._open = True
        self._read = threading.Event()  # nobody is reading
        self._read.set()
        self._sending = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None  # once the pipe has been full
        if forker is not None:
            try:
                forker.ask_to_fork(*self._ends, guard_command(), guard_environ())
                self._asked = forker
                return
            except Cold as reason:
                self.why_cold = str(reason)
        try:
            self._start_cold()
        except OSError:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until what was asked for has been forked; if that can't be, start a guard. Raises OSError."""
        forker, self._asked = self._asked, None
        if forker is not None:
            try:
                self._forked = forker.forked()
                self.asks = forker.asks
                self._close_ends()
            except Cold as reason:
                self.why_cold = str(reason)
                self._leave_pipes()
                self._start_cold()

    def _open_pipes(self, stderr: int, stdin_fd: int | None) -> None:
        commands_in, self._out = os.pipe()
        self._in, events_out = os.pipe()
        linux.widen_pipe(events_out)  # a control frame has to wait behind the output in it
        os.set_blocking(self._out, False)
        self._ends: tuple[int, int, int, int | None] = (commands_in, events_out, stderr, stdin_fd)

    def _leave_pipes(self) -> None:
        """Use others: what is forked too late finds nobody at the ends that were sent for it, and exits."""
        commands, events, stderr, stdin_fd = self._ends
        left = (commands, events, self._out, self._in)
        self._open_pipes(stderr, stdin_fd)
        for fd in left:
            os.close(fd)

    def _start_cold(self) -> None:
        try:
            self._pid, self.asks = _start_guard(*self._ends)
        finally:
            self._close_ends()

    def _close_ends(self) -> None:
        commands, events, stderr, _ = self._ends
        for fd in (commands, events, *([stderr] if stderr > 2 else [])):
            os.close(fd)

    def send(self, command: Command) -> None:
        """Send a command. What doesn't fit is for a thread: an agent that doesn't read must not block the head."""
        frame = memoryview(wire.encode(command))
        with self._sending:
            if not self._open:
                return
            if self._writer is None and (frame := self._write_now(frame)):
                os.set_blocking(self._out, True)
                self._writer = threading.Thread(target=self._write, name="local-link-writer", daemon=True)
                self._writer.start()
            if frame:
                self._outbox.put(frame)

    def _write_now(self, frame: memoryview) -> memoryview:
        """Write what fits; returns the rest."""
        try:
            while frame:
                frame = frame[os.write(self._out, frame) :]
        except BlockingIOError:
            return frame
        except OSError:  # the agent is gone; the reader reports it
            pass
        return memoryview(b"")

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                linux.write_all(self._out, frame)
            except OSError:  # the agent is gone; the reader reports it
                return

    def messages(self) -> Iterator[Any]:
        """The agent's events, until end-of-file."""
        decoder = wire.Decoder()
        self._read.clear()
        try:
            while data := os.read(self._in, READ_BYTES):
                yield from decoder.feed(data)
        finally:
            self._read.set()

    def close(self) -> None:
        """Hang up, unless already done, and wait for the guard, which exits by itself after its agent."""
        with self._sending:
            if not self._open:
                return
            self._open = False
            self._outbox.put(None)
        if self.asks is not None:
            self.asks.close()
        if self._asked is not None:  # nobody has waited for its answer
            with contextlib.suppress(Cold):
                self._forked = self._asked.forked()
            self._close_ends()
        if self._writer is not None:
            self._writer.join(timeout=1.0)
        os.close(self._out)
        self._continue()
        if self._forked >= 0:
            linux.wait_for(self._forked, CLOSE_SECONDS)
            os.close(self._forked)
        elif self._pid:
            _reap(self._pid)
        self._read.wait(timeout=1.0)  # another file may get the descriptor's number
        os.close(self._in)

    def _continue(self) -> None:
        """A rank may have stopped it."""
        with contextlib.suppress(ProcessLookupError):
            if self._forked >= 0:
                signal.pidfd_send_signal(self._forked, signal.SIGCONT)
            elif self._pid:
                os.kill(self._pid, signal.SIGCONT)

    def abandon(self) -> None:
        """A no-op: the agent is on this machine and will exit, so `close` is enough."""


def guard_command(passed: Sequence[int] = ()) -> list[str]:
    """The guard's command line. `passed`: descriptors, as in agent/__main__.py."""
    return [sys.executable, "-I", "-S", _AGENT, *map(str, passed)]


def guard_environ() -> dict[str, str]:
    """The guard's environment, and the ranks'."""
    return {name: value for name, value in os.environ.items() if name and name != SECRET}


def _start_guard(commands_in: int, events_out: int, stderr: int, stdin_fd: int | None) -> tuple[int, _socket.socket]:
    """The guard's pid, and the socket over which it can be asked for further agents. Raises OSError."""
    asks, asked = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    passed = [os.dup(fd) for fd in (asked.fileno(), stdin_fd) if fd is not None]
    asked.close()
    try:
        for fd in passed:
            os.set_inheritable(fd, True)
        return _spawn(guard_command(passed), (commands_in, events_out, stderr)), asks
    except OSError:
        asks.close()
        raise
    finally:
        for fd in passed:
            os.close(fd)


def _spawn(argv: list[str], standard: Sequence[int]) -> int:
    # dup2 in the child makes copies that survive exec; the guard itself closes what else it inherits.
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(standard)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pid = os.posix_spawn(
        sys.executable,
        argv,
        guard_environ(),
        file_actions=actions,
        setsid=True,  # out of reach of the terminal's signals; the head decides what they mean for the ranks
        # We may have been started with SIGCHLD blocked or ignored, and guard and agent depend on it.
        setsigmask=mask - {signal.SIGCHLD},
        setsigdef=[signal.SIGCHLD],
    )
    linux.lower_file_limit(pid)  # the ranks get the guard's
    return pid


def _reap(guard: int) -> None:
    """Wait for a guard, which exits by itself after its agents."""
    deadline = time.monotonic() + CLOSE_SECONDS
    try:
        while os.waitpid(guard, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(guard, signal.SIGKILL)
                os.waitpid(guard, 0)
                break
            time.sleep(0.001)
    except ChildProcessError:  # other code in this process reaps all children
        pass


def _stdin_for_a_rank(leaves: bool) -> int | None:
    try:
        if os.isatty(0) and (leaves or not caller.in_foreground(0)):
            return None
    except OSError:  # a terminal, but not ours
        return None
    return 0
