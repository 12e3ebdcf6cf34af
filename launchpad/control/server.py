"""The job's side: takes requests and signals from other terminals, and sends the answers."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from launchpad import linux
from launchpad.control.sockets import ANSWER_SECONDS, REQUEST_SECONDS, folder, own_name
from launchpad.job.outcome import signal_name
from launchpad.protocol.events import (
    DebugRequested,
    ProfileRequested,
    SampleRequested,
    StacksRequested,
    StopRequested,
    WorldRequested,
)

if TYPE_CHECKING:
    import socket

# Nobody queries a job that has just started, so short jobs need not pay for the socket.
FIRST_SECONDS = 0.3

# Its thread, which has been woken, ends within moments; it is not waited for any longer.
CLOSE_SECONDS = 1.0

# What can be asked of a job.
Request = StacksRequested | DebugRequested | ProfileRequested | SampleRequested | StopRequested | WorldRequested


class ControlServer:
    """Accepts requests in its own threads. The loop responds through `answer`; as this is a sink, it calls `tick`."""

    def __init__(self, job: str, post: Callable[[Request], None]) -> None:
        self._job = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)
        self._post = post
        self._answers: dict[int, tuple[threading.Event, list[str]]] = {}
        self._socket: socket.socket | None = None
        self._path = ""
        self._lock = threading.Lock()
        self._closed = False
        self._accepting: threading.Thread | None = None
        self.deadline: float | None = time.monotonic() + FIRST_SECONDS

    def on(self, event: object) -> bool:  # noqa: ARG002
        """Ignore the event."""
        return False

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Start accepting requests."""
        self.deadline = None
        with suppress(RuntimeError):  # can't start a thread: do without
            self._accept_in_thread(self._serve)

    def begin(self) -> None:
        """Accept requests from now on, instead of a little later. Raises OSError."""
        self.deadline = None
        listener = self._listen()
        self._accept_in_thread(lambda: self._accept(listener))

    def _accept_in_thread(self, accept: Callable[[], None]) -> None:
        thread = threading.Thread(target=accept, name="control", daemon=True)
        thread.start()
        self._accepting = thread

    def _serve(self) -> None:
        with suppress(OSError):  # no home folder, no disk space: the job runs without a socket
            self._accept(self._listen())

    def _accept(self, listener: socket.socket) -> None:
        asker = 0
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            asker += 1
            threading.Thread(target=self._talk, args=(caller, asker), name="control", daemon=True).start()

    def _listen(self) -> socket.socket:
        import socket

        place = folder()
        os.makedirs(place, mode=0o700, exist_ok=True)
        found = os.stat(place)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(place)
        with self._lock:
            if self._closed:
                raise OSError("the job is over")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Not at once by its name: who finds that may connect.
            name = own_name(self._job)
            path, unheard = os.path.join(place, name), os.path.join(place, f".{name}")
            with suppress(FileNotFoundError):  # of a launchpad that looks the same where /proc shows no starts
                os.unlink(unheard)
            linux.by_short_path(unheard, listener.bind)
            listener.listen(16)
            os.rename(unheard, path)
            self._path, self._socket = path, listener
        return listener

    def _talk(self, caller: socket.socket, asker: int) -> None:
        with caller, suppress(OSError, ValueError, TypeError, LookupError):
            caller.settimeout(REQUEST_SECONDS)
            event = _event(asker, json.loads(caller.makefile("rb").readline(1000)))
            if isinstance(event, StopRequested):
                try:  # before the job may end, and this process with it
                    caller.sendall(f"sent {signal_name(event.signum)} to job {self._job}".encode())
                finally:
                    self._post(event)
                return
            done: tuple[threading.Event, list[str]] = (threading.Event(), [])
            with self._lock:
                if self._closed:
                    return
                self._answers[asker] = done
            self._post(event)
            done[0].wait(ANSWER_SECONDS)
            with self._lock:
                del self._answers[asker]
            caller.settimeout(ANSWER_SECONDS)
            caller.sendall("".join(done[1]).encode(errors="backslashreplace"))

    def answer(self, asker: int, text: str) -> None:
        """Respond to a request."""
        found = self._answers.get(asker)
        if found:
            found[1].append(text)
            found[0].set()

    def close(self) -> None:
        """Stop accepting requests, and end those that have no response yet.

        The caller of `launchpad.run` is not left with a thread: from Python 3.12 on, it would be warned if it forks.
        """
        self.deadline = None
        with self._lock:
            self._closed = True
            for responded, _ in self._answers.values():
                responded.set()
            if self._socket is not None:
                with suppress(OSError):
                    os.unlink(self._path)
                with suppress(OSError):
                    self._socket.shutdown(2)  # wakes the thread in accept()
                self._socket.close()
                self._socket = None
        if self._accepting is not None:
            self._accepting.join(CLOSE_SECONDS)


def _event(asker: int, request: dict[str, Any]) -> Request:
    """A request as an event. Raises LookupError, TypeError or ValueError if it is none."""
    now = time.monotonic_ns()
    if request["what"] == "debug":
        return DebugRequested(now, asker, int(request["rank"]), int(request["port"]))
    if request["what"] == "profile":
        return ProfileRequested(now, asker, int(request["rank"]), float(request["seconds"]))
    if request["what"] == "signal":
        return StopRequested(now, int(request["signum"]), asked=True)
    if request["what"] in ("stop", "restart"):
        return WorldRequested(now, asker, request["what"], str(request["role"]))
    if request["what"] == "sample":
        return SampleRequested(now, asker)
    native, full = bool(request["native"]), bool(request["full"])
    return StacksRequested(now, asker, native, full, int(request.get("rank", -1)), str(request.get("role", "")))
