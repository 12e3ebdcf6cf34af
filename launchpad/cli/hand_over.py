"""Has a kept head (`launchpad warm`) run the command in our place: we pass signals on to it, and end as it does.

It imports little, as a kept head is there to save imports.
"""

from __future__ import annotations

import _socket
import os
import sys

from launchpad.image import channel, place

TYPE_CHECKING = False  # as in entry.py
if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from typing import Any, NoReturn
else:
    import _signal as signal

# More descriptors, or higher ones, are not handed over.
_MOST_DESCRIPTORS = 16
_HIGHEST_DESCRIPTOR = 255

_MOST_TOOLS = 6  # of PEP 669

# How late a signal may be passed on that came just before a wait.
_LOOK_SECONDS = 0.5

# These mean this very process: faults, what Python ignores, and the terminal's answer to a read or write of ours.
_OURS = "SIGSEGV SIGBUS SIGFPE SIGILL SIGTRAP SIGSYS SIGABRT SIGPIPE SIGXFSZ SIGCHLD SIGKILL SIGSTOP SIGTTIN SIGTTOU"


_connections: list[_socket.socket] = []


def hand_over() -> None:
    """Returns only if the command has to run here."""
    # The image was started without options of Python; it has those that variables set.
    if sys.orig_argv[1:] not in (sys.argv, ["-m", "launchpad", *sys.argv[1:]]) or _is_watched():
        return
    try:
        inherited = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_inheritable(fd)]
    except FileNotFoundError:  # /proc is not mounted
        return
    if len(inherited) > _MOST_DESCRIPTORS or max(inherited) > _HIGHEST_DESCRIPTOR:
        return
    connection = channel.connect(place.path(os.environ))
    if connection is not None:
        _Handover(connection, inherited).run()
        # Stays open while the command runs here: a kept head for such commands is made when it is over.
        _connections.append(connection)


def _is_watched() -> bool:
    """Whether a tracer, profiler or other tool would miss what another process does."""
    monitoring = getattr(sys, "monitoring", None)  # new in Python 3.12
    tools = () if monitoring is None else map(monitoring.get_tool, range(_MOST_TOOLS))
    return bool(sys.gettrace() or sys.getprofile() or any(tools))


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor of the listing itself
        return False


class _Handover:
    def __init__(self, connection: _socket.socket, fds: Sequence[int]) -> None:
        self._connection = connection
        self._fds = fds
        self._head = -1  # a pidfd
        self._end = -1  # a socket for its end
        self._early: list[int] = []  # signals that came before there was a head

    def run(self) -> None:
        """Returns only if there is no head for us; then it was as if we had not asked."""
        ours = {getattr(signal, name) for name in _OURS.split()}
        passed_on = [one for one in signal.valid_signals() - ours if signal.getsignal(one) != signal.SIG_IGN]
        before = [(signum, signal.signal(signum, self._pass_on)) for signum in passed_on]
        try:
            self._head, self._end = self._ask()
        except (OSError, ValueError):
            pass
        if self._head < 0:
            for signum, handler in before:
                signal.signal(signum, handler)
            for early in self._early:
                os.kill(os.getpid(), early)
            return
        for early in self._early:
            self._pass_on(early)
        ended = self._await_end()
        _leave(-signal.SIGKILL if ended is None else ended[0]["code"])  # None: it was killed with its minder

    def _await_end(self) -> tuple[dict[str, Any], list[int]] | None:
        end = _socket.socket(fileno=self._end)
        # A signal that comes just before the wait doesn't interrupt it: Python calls its handler afterwards.
        end.settimeout(_LOOK_SECONDS)
        while True:
            try:
                return channel.receive(end)
            except TimeoutError:
                continue

    def _pass_on(self, signum: int, _: object = None) -> None:
        if self._head < 0:
            self._early.append(signum)
            return
        try:
            signal.pidfd_send_signal(self._head, signum)
        except ProcessLookupError:  # it has just ended
            pass

    def _ask(self) -> tuple[int, int]:
        """A pidfd of the head and a socket for its end; -1 if there is none for us. Raises OSError, ValueError."""
        self._connection.settimeout(channel.ANSWER_SECONDS)
        folder = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            channel.send(self._connection, {"head": _description() | {"fds": self._fds}}, [folder, *self._fds])
        finally:
            os.close(folder)
        channel.receive(self._connection)  # its greeting
        answer = channel.receive_in_time(self._connection)
        if answer is None or "head" not in answer[0]:
            return -1, -1
        head, end = answer[1]
        return head, end


def _description() -> dict[str, Any]:
    with open("/proc/thread-self/personality") as file:
        personality = file.read()
    return {
        "python": sys.executable,
        "command": sys.orig_argv,
        "argv": sys.argv,
        "path": sys.path,
        "environ": {name: value for name, value in os.environ.items() if name},  # no environment can be given others
        "thread": os.getpid(),  # we have only one
        "personality": personality,
        "blocked": [int(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "files": None,
    }


def _leave(code: int) -> NoReturn:
    """End with this exit code, or for -n by signal n."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
