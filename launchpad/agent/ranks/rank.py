"""One rank's process: starts it with pipes for input and output, and signals its process group."""

import fcntl
import os
import resource
import signal
from collections.abc import Sequence

from ... import linux
from ...named import NamedTuple
from ..host import processes


class Rank:
    """A started rank."""

    def __init__(self, rank: int, pid: int, status_fd: int | None) -> None:
        self.rank = rank
        self.pid = pid
        self.status_fd = status_fd  # EOF: the exec succeeded; bytes: why it failed; None: a forked rank
        self.typed = False  # whether a person can type what it reads

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
