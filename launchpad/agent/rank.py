"""One rank's process: start it in a session of its own, with pipes for its output, and signal its group."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from typing import NamedTuple

from . import processes

# A pipe this large lets a rank print on while the agent serves others. The default of 64 KiB serves where the
# user's share of pipe memory (fs.pipe-user-pages-soft) is used up.
PIPE_BYTES = 1 << 20


class Rank:
    """A started rank."""

    def __init__(self, rank: int, pid: int, status_fd: int | None) -> None:
        self.rank = rank
        self.pid = pid
        self.status_fd = status_fd  # end-of-file: the program was loaded; bytes: why it was not; None: it was forked

    def signal(self, signum: int) -> None:
        """Signal the rank's process group. Only for a rank that was not reaped: its pid is still its own."""
        if not 0 < signum < signal.NSIG:
            raise ValueError(f"there is no signal {signum}")
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:  # it has not come as far as setsid
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                pass
        except PermissionError:  # all of the group has become another user (sudo)
            pass


class Outlets(NamedTuple):
    """The agent's ends and the rank's ends of its output."""

    stdout: int
    stderr: int
    rank_stdout: int
    rank_stderr: int
    rank_link: int = -1  # what the rank gets as its descriptor 3, if anything


def open_outlets(terminal: list[int]) -> Outlets:
    """Two pipes; where `terminal` is [rows, columns], stdout is a terminal of that size instead.

    Line editing (readline, so breakpoint()) is had only where standard input and output are both terminals.
    """
    stdout, rank_stdout = _open_terminal(*terminal) if terminal else _open_pipe()
    stderr, rank_stderr = _open_pipe()
    return Outlets(stdout, stderr, rank_stdout, rank_stderr)


def _open_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass
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
    attributes[1] &= ~termios.OPOST  # newlines are to arrive as they were written
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return reader, writer


def start(
    rank: int,
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    stdin: int,
    outlets: Outlets,
    files: tuple[int, int],
) -> Rank:
    """Fork and execute `argv`. What goes wrong in the child is told through the rank's status descriptor.

    `stdin` is the descriptor that becomes the rank's standard input; `files` its limit of open files (soft, hard).
    """
    status_fd, status_writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        step = "start"
        try:
            os.setsid()
            processes.die_with_parent(parent)
            for number, fd in enumerate((stdin, outlets.rank_stdout, outlets.rank_stderr)):
                os.dup2(fd, number)
            if outlets.rank_link >= 0:  # 3 is in use in an agent: it is none of those that are needed below
                os.dup2(outlets.rank_link, 3)
                os.set_inheritable(3, True)
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
            # Python ignores these two from its start; a program expects the defaults.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            step = f"enter {cwd}"
            os.chdir(cwd)
            step = f"execute {argv[0]}"
            os.execvpe(argv[0], argv, environ)
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            os.write(status_writer, f"can't {step}: {reason}".encode("utf-8", "surrogateescape"))
        finally:
            os._exit(127)
    os.close(status_writer)
    return Rank(rank, pid, status_fd)
