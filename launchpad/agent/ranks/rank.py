"""One rank's process: starts it with pipes for input and output, and signals its process group."""

import fcntl
import os
import resource
import select
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ... import linux
from ...protocol.events import StdinTaken
from ..host import processes
from ..outbox import Outbox
from ..poll import Poll

# What a terminal takes for the end of input (Ctrl-D), where it is in line mode.
_END_OF_INPUT = b"\x04"


class Rank:
    """A started rank."""

    def __init__(self, rank: int, pid: int, status_fd: int | None) -> None:
        self.rank = rank
        self.pid = pid
        self.status_fd = status_fd  # EOF: the exec succeeded; bytes: why it failed; None: a forked rank
        self.has_terminal = False  # the user's: its input and output

    def signal(self, signum: int) -> None:
        """Signal the rank's process group. Only for a rank that was not reaped: its pid can't have been reused."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:  # it has no group yet
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                pass
        except PermissionError:  # the whole group runs as another user (sudo)
            pass


class Outlets(NamedTuple):
    """Both ends of a rank's output: the agent's and the rank's."""

    stdout: int
    stderr: int
    rank_stdout: int
    rank_stderr: int
    rank_link: int = -1  # becomes the rank's descriptor 3; -1 for none


def open_outlets(terminal: list[int]) -> Outlets:
    """Two pipes; if `terminal` is [rows, columns], stdout is a pseudo-terminal of that size instead.

    Line editing (readline, and so breakpoint()) works only if standard input and output are both terminals.
    """
    stdout, rank_stdout = _open_terminal(*terminal) if terminal else _open_pipe()
    try:
        stderr, rank_stderr = _open_pipe()
    except OSError:
        os.close(stdout)
        os.close(rank_stdout)
        raise
    return Outlets(stdout, stderr, rank_stdout, rank_stderr)


def _open_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    linux.widen_pipe(writer)
    return reader, writer


def _open_terminal(rows: int, columns: int) -> tuple[int, int]:
    import struct
    import termios

    try:
        reader, writer = os.openpty()
    except OSError:  # no /dev/pts, or none left
        return _open_pipe()
    os.set_blocking(reader, False)
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # keep newlines as they were written
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return reader, writer


class StdinFeed:
    """Standard input for a rank whose head is on another machine: writes what arrives in frames.

    The head sends more bytes once it hears that the previous ones were written.
    """

    def __init__(self, poll: Poll, outbox: Outbox, terminal: Outlets | None = None) -> None:
        """`terminal`: the outlets of the rank that is to read what is written, if they are a pseudo-terminal.

        Otherwise `reader` is the end of a pipe, for one rank after the other.
        """
        self._poll = poll
        self._outbox = outbox
        if terminal is None:
            self.reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._end = b""
        else:
            self.reader = -1
            self._writer = os.dup(terminal.stdout)
            self._end = _END_OF_INPUT
        self._backlog: deque[memoryview] = deque()

    def take(self, data: bytes) -> None:
        """Write these bytes as room permits. Empty data is the end, once the backlog is written."""
        if self._writer >= 0:
            self._backlog.append(memoryview(data or self._end))
            self._write()

    def close(self) -> None:
        """Write no more."""
        if self._writer < 0:
            return
        self._poll.unwatch(self._writer)
        os.close(self._writer)
        self._writer = -1
        self._backlog.clear()

    def _write(self) -> None:
        taken = 0
        while self._backlog:
            data = self._backlog[0]
            if not data:
                self.close()
                break
            try:
                written = os.write(self._writer, data)
            except BlockingIOError:
                if self._writer not in self._poll:
                    self._poll.watch(self._writer, lambda _: self._write(), select.EPOLLOUT)
                break
            except OSError:  # the rank has closed its terminal
                written = len(data)
            taken += written
            self._backlog[0] = data[written:]
            if written == len(data):
                self._backlog.popleft()
        else:
            self._poll.unwatch(self._writer)
        if taken:
            self._outbox.say(StdinTaken(time.monotonic_ns(), taken))


def start(
    rank: int,
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    stdin: int,
    outlets: Outlets,
    files: tuple[int, int],
    bound: Sequence[Sequence[int]] | None = None,
    *,
    own_session: bool = True,
) -> Rank:
    """Fork and execute `argv`. The child reports errors through the rank's status descriptor.

    `stdin` becomes the rank's standard input; `files` is its limit of open files (soft, hard); `bound`: as in Start.
    Without a session of its own it stays in ours.
    """
    if bound:
        from ...protocol import cpulist
        from ...rank import affinity
    status_fd, status_writer = os.pipe()
    parent = os.getpid()
    mask = processes.hold_signals()  # one that comes before the child heeds it would be lost
    try:
        pid = os.fork()
    except OSError:
        processes.release_signals(mask)
        os.close(status_fd)
        os.close(status_writer)
        raise
    if pid == 0:
        step = "start"
        try:
            processes.heed_signals()
            processes.release_signals(mask)
            if own_session:
                os.setsid()
            else:
                os.setpgid(0, 0)
            processes.die_with_parent(parent)
            _take_descriptors(stdin, outlets)
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
            # Python ignores these two from the start; other programs expect the defaults.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            if bound:
                step = f"bind it to the CPUs {cpulist.written(bound[0])}"
                affinity.bind(*bound)
            step = f"enter {cwd}"
            os.chdir(cwd)
            step = f"execute {argv[0]}"
            os.execvpe(argv[0], argv, environ)
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            os.write(status_writer, f"can't {step}: {reason}".encode("utf-8", "surrogateescape"))
        finally:
            os._exit(127)
    processes.release_signals(mask)
    os.close(status_writer)
    return Rank(rank, pid, status_fd)


def _take_descriptors(stdin: int, outlets: Outlets) -> None:
    """In the child: make these its standard streams and, if it has a link, its descriptor 3."""
    for number, fd in enumerate((stdin, outlets.rank_stdout, outlets.rank_stderr)):
        os.dup2(fd, number)
    if outlets.rank_link >= 0:  # overwrites the agent's descriptor 3, which the child doesn't need
        os.dup2(outlets.rank_link, 3)
        os.set_inheritable(3, True)
