"""Runs calls one after the other, in a rank that stays for them, and sends back what each has come to.

They come over a socket to the head or, on another machine, to the agent. A call and its outcome are files in memory,
in the format of pickling.py, and are passed as descriptors. At the end of the socket the rank exits like a program that
has come to its end. An outcome is

    (what call.py leaves, or ("interrupted",),
     whether the call may have written to a file or pipe,
     how many operations this rank has begun in each of its process groups, by the group's name)

Functions of the caller's `__main__` run in the rank's own `__main__`: a global that a call sets is there for the next
one. From then on it is the rank's, whatever value the caller has for that name.
"""

from __future__ import annotations

import os
import sys

from . import call, exceptions, pickling
from .passing import receive, send

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

# The messages: a rank's number on a new connection, a call or an outcome (with a descriptor), and the order to exit as
# the last call would have done if it had been the only one.
CALL = b"c"
OUTCOME = b"o"
END = b"x"

# How many random bytes are in a socket's name.
NAME_BYTES = 16

_OURS = (__file__, call.__file__)

_calling = False  # a function runs, which Ctrl-C ends


def admitted(line: Any) -> int:
    """The number of the rank that has connected, -1 if it is none of this user's. Waits for what it says."""
    import _socket

    _, uid, _ = (
        int.from_bytes(line.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[at : at + 4], sys.byteorder)
        for at in (0, 4, 8)
    )
    message = line.recv(64) if uid == os.getuid() else b""
    return int(message) if message.isdigit() else -1


def serve() -> None:
    """Make the process group, and run calls until there are no more."""
    about, _, result = call.begin()
    name = os.environ.pop("LAUNCHPAD_CALL_LINE")
    group = None
    if about["backend"] is not None:
        try:
            group = call.Group(about["backend"] or None)
        except call.Refused as refused:
            pickling.dump(("refused", *refused.args), result)
            call.end(call.CANNOT)
        except Exception as error:
            exceptions.keep_last(error, ours=_OURS)
            pickling.dump(call.in_words(error, _OURS), result)
            call.end(1)
    os.close(result)
    _heed_interrupts()
    session = _CallLoop(_connected(name))
    session.answer(("returned", None), False)
    while session.next_call():
        pass
    if group is not None:
        group.end()


def _connected(name: str) -> Any:
    import _socket

    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    line.connect(f"\0{name}")
    line.send(os.environ["RANK"].encode())
    return line


def _heed_interrupts() -> None:
    signal = __import__("_signal")

    def interrupt(*_: object) -> None:
        if _calling:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


class _CallLoop:
    """Takes the calls."""

    def __init__(self, line: Any) -> None:
        self._line = line
        self._globals = vars(sys.modules["__main__"])
        self._own: set[str] = set()  # the globals that calls have set here
        self._failure: Exception | None = None  # of the last call
        try:
            self._counters = os.open("/proc/self/io", os.O_RDONLY)
        except OSError:
            self._counters = -1
        self._written = self._count()

    def _count(self) -> bytes:
        """How much this process and its children that have ended have written; b"" if it is not known."""
        try:
            lines = os.pread(self._counters, 512, 0).split(b"\n") if self._counters >= 0 else []
        except OSError:
            return b""
        return next((line for line in lines if line.startswith(b"wchar:")), b"")

    def next_call(self) -> bool:
        """Wait for a call and answer it. False if there are no more."""
        try:
            message, fd = receive(self._line)
        except ConnectionError:
            return False
        if message == END and self._failure is not None:
            exceptions.keep_last(self._failure, ours=_OURS)
            call.end(1)
        if fd < 0:
            return False
        self._failure = None
        outcome = self._outcome(fd)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the program has closed it
                pass
        written = self._count()
        self.answer(outcome, not written or written != self._written)
        return True

    def _outcome(self, fd: int) -> tuple[Any, ...]:
        global _calling
        given = pickling.map_file(fd, shared=False)
        os.close(fd)
        try:
            try:
                _calling = True
                value = self._run(given)
            finally:
                _calling = False  # a late Ctrl-C must not interrupt what follows
        except KeyboardInterrupt:
            return ("interrupted",)
        except call.Refused as refused:
            return ("refused", *refused.args)
        except Exception as error:
            call.explain(error)
            trace = error.__traceback__
            words = call.in_words(error, _OURS)
            self._failure = error.with_traceback(trace)
            return words
        return "returned", value

    def _run(self, given: memoryview) -> Any:
        about, given = pickling.load(given)
        call.prepare(about)
        function, arguments = self._load(given)
        arguments = arguments or call.arguments_for(function, about["name"])
        before = dict(self._globals)
        try:
            return function(*arguments)
        finally:
            self._own.update(name for name, one in self._globals.items() if before.get(name, before) is not one)

    def _load(self, given: memoryview) -> Any:
        kept = {name: self._globals[name] for name in self._own if name in self._globals}
        loaded = call.load_function(given)
        self._globals.update(kept)
        return loaded

    def answer(self, outcome: tuple[Any, ...], wrote: bool) -> None:
        """Send what a call has come to."""
        for _ in range(2):
            file = os.memfd_create("launchpad-result")
            try:
                pickling.dump((outcome, wrote, _places()), file)
                send(self._line, OUTCOME, file)
                break
            except OSError as error:
                why = f"can't save what rank {os.environ['RANK']} returned: {error.strerror}"
                outcome = ("refused", "UsageError", why)
            except Exception:
                outcome = call.unpicklable(outcome[1])
            finally:
                os.close(file)
        self._written = self._count()


def _places() -> dict[str, int]:
    """How many operations this rank has begun in each of its process groups, by the group's name."""
    from . import groups

    found: dict[str, int] = {}
    for group, name, _ in groups.known():
        try:
            found[name] = int(group._get_sequence_number_for_group())
        except Exception:  # this kind of group does not count
            continue
    return found
