"""Lets another terminal query and stop a running job, over a Unix socket in a folder that only this user can enter.

A request is a line of JSON; the response is text, up to end of file. The folder is in the user's state folder, which
several hosts and containers may share, even some with the same hostname. A socket is therefore named
JOB@BOOT.NAMESPACE.PID.START after the launchpad that listens, and is removed only if that process is certainly gone.
"""

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
from launchpad.errors import UsageError
from launchpad.job.outcome import signal_name
from launchpad.job.state import state_folder
from launchpad.protocol.events import DebugRequested, ProfileRequested, SampleRequested, StacksRequested, StopRequested

if TYPE_CHECKING:
    import socket

# Nobody queries a job that has just started, so short jobs need not pay for the socket.
FIRST_SECONDS = 0.3

# Timeouts for a request, and for a response, which may take long: native frames of many ranks.
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 600.0

# Its thread, which has been woken, ends within moments; it is not waited for any longer.
CLOSE_SECONDS = 1.0

# What can be asked of a job.
Request = StacksRequested | DebugRequested | ProfileRequested | SampleRequested | StopRequested


def folder() -> str:
    """Where the sockets are."""
    return os.path.join(state_folder(os.environ), "running")


class Control:
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
            path = os.path.join(place, f"{self._job}@{'.'.join((*_here(), str(os.getpid()), _start(os.getpid())))}")
            linux.by_short_path(path, listener.bind)
            listener.listen(16)
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
        return StopRequested(now, int(request["signum"]))
    if request["what"] == "sample":
        return SampleRequested(now, asker)
    return StacksRequested(now, asker, bool(request["native"]), bool(request["full"]), int(request.get("rank", -1)))


def _here() -> tuple[str, str]:
    """The ids of this boot and of our PID namespace; empty if /proc doesn't give them."""
    try:
        return linux.boot_id().replace("-", ""), linux.namespace("pid").strip("pid:[]")
    except OSError:
        return "", ""


def _start(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if unknown."""
    try:
        return linux.stat(pid)[linux.STARTED] if linux.shows_our_pids() else ""
    except OSError:
        return ""


def _is_gone(listener: str) -> bool:
    """Whether the launchpad with this BOOT.NAMESPACE.PID.START is certainly gone."""
    boot, namespace, pid, start = [*listener.split("."), "", "", ""][:4]
    if not (boot and start and pid.isdecimal()) or (boot, namespace) != _here():
        return False
    try:
        if linux.is_gone(int(pid)):
            return True
    except OverflowError:
        return False
    return _start(int(pid)) not in ("", start)


class NoAnswer(UsageError):
    """The job is there, and doesn't answer."""


def ask(job: str, what: str, **details: float) -> str:
    """Ask a running job: `what` is "stacks", with `native` and `full`, perhaps `rank`, "debug", with `rank` and `port`,
    "profile", with `rank`, -1 for all, and `seconds`, or "sample".

    `job`: an id, the start of one, or "" for the latest running job. Raises UsageError if no job matches, or several
    do, and if the job doesn't answer.
    """
    return _ask(job, REQUEST_SECONDS if what == "sample" else ANSWER_SECONDS, {"what": what, **details})


def send_signal(job: str, signum: int) -> str:
    """Have a running job act as if launchpad had got this signal; returns what was done, in words.

    `job`: as in `ask`. Raises UsageError likewise, and if the job doesn't answer.
    """
    return _ask(job, REQUEST_SECONDS, {"what": "signal", "signum": signum})


def _ask(job: str, seconds: float, request: dict[str, Any]) -> str:
    with _call(job) as line:
        line.settimeout(seconds)
        try:
            line.sendall(json.dumps(request).encode() + b"\n")
            return line.makefile("rb").read().decode(errors="replace")
        except TimeoutError:
            raise NoAnswer("the job doesn't answer; its launchpad may be suspended") from None
        except OSError:  # nobody took the connection
            return ""


def _call(job: str) -> socket.socket:
    import socket

    found: dict[str, tuple[float, socket.socket]] = {}
    with suppress(FileNotFoundError, PermissionError):
        for entry in os.scandir(folder()):
            name, _, listener = entry.name.rpartition("@")
            if not name.startswith(job):
                continue
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                linux.by_short_path(entry.path, line.connect)
                found[name] = (entry.stat(follow_symlinks=False).st_mtime, line)
            except OSError:  # on another machine, or left behind by a launchpad that was killed
                line.close()
                if _is_gone(listener):
                    with suppress(OSError):
                        os.unlink(entry.path)
    if not found:
        which = f"job {job}…" if job else "job"
        raise UsageError(f"you have no running {which} on {socket.gethostname()}; `launchpad jobs` lists all jobs")
    chosen = job if job in found else max(found, key=lambda name: found[name][0])
    if job and job != chosen and len(found) > 1:
        raise UsageError(
            f"job {job}: {len(found)} running jobs match ({', '.join(sorted(found))}); type more of the id"
        )
    for name, (_, line) in found.items():
        if name != chosen:
            line.close()
    return found[chosen][1]
