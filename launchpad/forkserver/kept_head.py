"""The kept head: an interpreter that has loaded the command `launchpad`, forked to run it for a process of the user's.

That process, the caller, has handed over its command line, descriptors and the rest (cli/hand_over.py). The image
forks a minder, which forks the head. The minder tells the caller the head's exit code, stops it when the head has
stopped (so that a shell sees that), and kills the head when the caller has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ..agent.host import processes
from ..image import channel, loaded
from ..rank import own_process
from .kept_image import Fork, Imports, serve, set_environ

# The first descriptors of a request: the caller's connection and its working folder. Those that it inherited follow.
ORDER = ("caller", "folder")


def keep(link: socket.socket, rehearse: str, main: str, watched_by: Callable[[], str]) -> NoReturn:
    """Get ready, and fork for each request.

    `rehearse`, `main`: "module:function". The first is called here, the second in each fork with the caller's pid.
    `watched_by`: which tool or library watches this process.
    """
    imports = Imports(lambda: watched_by() or _get_ready(rehearse, main))
    request, fds = serve(link, imports, lambda: None)
    _HeadFork(request, dict(zip(ORDER, fds, strict=False)), link).run(imports, main, fds[len(ORDER) :])


def _get_ready(rehearse: str, main: str) -> str:
    _function(rehearse)()
    _function(main)
    return "an import started a thread" if own_process.threads() > 1 else ""


class _HeadFork(Fork):
    """The fork for one run, which becomes the minder, and forks the head."""

    def run(self, imports: Imports, main: str, inherited: list[int]) -> NoReturn:
        """Run the command. `inherited`: the caller's descriptors of the numbers in the request."""
        first = self.request["path"][0]
        if first and (shadow := loaded.shadow(first, imports.asked, imports.found)):
            self._decline(f"{shadow} comes first on the path")
        self.take_over()
        numbers = self.request["fds"]
        processes.close_inherited(keep=(*inherited, *self.fds.values(), self.link.fileno()))
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= max(numbers) + len(numbers) + 1:
            self._decline("the limit of open files is too low")
        set_environ(self.request["environ"])
        own_process.show_as([os.fsencode(word) for word in self.request["command"]], dict(os.environb))
        minder = os.getpid()
        # What comes for the head before it is ready would be lost in the fork, or raise KeyboardInterrupt.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
        try:
            own, others = os.pipe()
            # One of our own, as the keeper holds the other connection open too.
            ours, callers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            head = os.fork()
        except OSError as error:
            self._decline(f"its fork failed ({error.strerror})")
        if head == 0:
            own_process.die_with_parent(minder)
            # Not a session of its own, whose leader would get any terminal that it opens. The minder stays in another
            # group of this session: else a head that is stopped would be sent HUP when its image ends.
            os.setpgid(0, 0)
            os.close(others)
            if not os.read(own, 1):
                os._exit(0)
            _number(inherited, numbers)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _run(self.request, main)
        os.close(own)
        try:
            with socket.socket(fileno=self.fds["caller"]) as caller, callers:
                channel.send(caller, {"head": head}, [os.pidfd_open(head), callers.fileno()])
            os.write(others, b".")
        except OSError as error:
            os.close(others)
            os.waitpid(head, 0)
            self._decline(f"its caller can't be told of it ({error.strerror})")
        self.say({"job": minder})
        _watch(head, ours, self.request["caller"][0])

    def _decline(self, why: str) -> NoReturn:
        self.say({"cold": why})
        os._exit(0)


def _watch(head: int, caller: socket.socket, pid: int) -> NoReturn:
    """Be the minder until the head has ended. `pid`: the caller's."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    processes.close_inherited(keep=(caller.fileno(),))
    wakeup = processes.wakeup_on_exit()
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(caller, 0)  # reports only a hang-up
    stopped = False  # the caller, by us
    while True:
        changed, status = os.waitpid(head, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if changed and os.WIFSTOPPED(status) != stopped:
            stopped = not stopped
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        if changed and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            break
        if changed:
            continue
        for fd, _ in poll.poll():
            if fd == wakeup:
                os.read(wakeup, 4096)
            else:
                poll.unregister(caller)
                os.kill(head, signal.SIGKILL)
    try:
        channel.send(caller, {"code": os.waitstatus_to_exitcode(status)})
    except OSError:  # it has gone
        pass
    os._exit(0)


def _number(fds: list[int], numbers: list[int]) -> None:
    """Give these descriptors these numbers, and close all others."""
    free = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    processes.close_inherited(keep=numbers)


def _run(request: dict[str, Any], main: str) -> NoReturn:
    """Be the head."""
    sys.executable = request["python"]
    sys.path[:], sys.argv[:], sys.orig_argv[:] = request["path"], request["argv"], request["command"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _text(getattr(sys, name), number, f"<{name}>")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    code = 1
    try:
        _function(main)(request["caller"][0])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except OSError:  # nobody reads it
            pass
    os._exit(code)


def _function(name: str) -> Callable[..., object]:
    module, _, function = name.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), function)
    return found


def _text(before: Any, fd: int, name: str) -> io.TextIOWrapper:
    """A standard stream as an interpreter makes it; `before`: the image's, of the same encoding."""
    raw = io.FileIO(fd, "r" if fd == 0 else "w", closefd=False)
    raw.name = name
    buffer = io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)
    lines = fd == 2 or raw.isatty()
    made = io.TextIOWrapper(buffer, before.encoding, before.errors, "\n" if fd else None, line_buffering=lines)
    made.mode = raw.mode[0]  # type: ignore[misc]
    return made
