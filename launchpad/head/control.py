"""How another terminal reaches a job that runs: a Unix socket in a folder that only this user can enter.

A question is a line of JSON, the answer is text up to the end. The folder is under the user's state folder; a socket's
name is JOB@HOST, as the home folder may be shared by hosts.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from launchpad.errors import UsageError
from launchpad.job.state import state_folder
from launchpad.stacks import StacksAsked

if TYPE_CHECKING:
    import socket

# Who has started a job a moment ago asks nothing yet: a short one doesn't pay for this.
FIRST_SECONDS = 0.3
# For a question; and for an answer, with native frames of many ranks.
QUESTION_SECONDS = 5.0
ANSWER_SECONDS = 600.0


def folder() -> str:
    """Where the sockets are."""
    return os.path.join(state_folder(os.environ), "running")


class Control:
    """A sink, for its deadline: takes questions, in threads of its own; `answer` gives what the loop has found."""

    def __init__(self, job: str, post: Callable[[StacksAsked], None]) -> None:
        self._job = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)
        self._post = post
        self._answers: dict[int, tuple[threading.Event, list[str]]] = {}
        self._socket: socket.socket | None = None
        self._path = ""
        self._lock = threading.Lock()
        self._closed = False
        self.deadline: float | None = time.monotonic() + FIRST_SECONDS

    def on(self, event: object) -> bool:  # noqa: ARG002
        """Nothing."""
        return False

    def tick(self, now: float) -> None:  # noqa: ARG002
        """Begin to take questions."""
        self.deadline = None
        with suppress(RuntimeError):  # no room for a thread: then nobody can ask
            threading.Thread(target=self._serve, name="control", daemon=True).start()

    def _serve(self) -> None:
        try:
            listener = self._listen()
        except OSError:  # no home, no room: the job runs all the same
            return
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
            path = os.path.join(place, f"{self._job}@{socket.gethostname()}")
            with suppress(FileNotFoundError):
                os.unlink(path)
            _by_short_path(path, listener.bind)
            listener.listen(16)
            self._path, self._socket = path, listener
        return listener

    def _talk(self, caller: socket.socket, asker: int) -> None:
        with caller, suppress(OSError, ValueError, TypeError):
            caller.settimeout(QUESTION_SECONDS)
            asked = json.loads(caller.makefile("rb").readline(1000))
            done: tuple[threading.Event, list[str]] = (threading.Event(), [])
            self._answers[asker] = done
            self._post(StacksAsked(time.monotonic_ns(), asker, bool(asked["native"]), bool(asked["full"])))
            done[0].wait(ANSWER_SECONDS)
            del self._answers[asker]
            caller.settimeout(ANSWER_SECONDS)
            caller.sendall("".join(done[1]).encode(errors="backslashreplace"))

    def answer(self, asker: int, text: str) -> None:
        """What one has asked for."""
        found = self._answers.get(asker)
        if found:
            found[1].append(text)
            found[0].set()

    def close(self) -> None:
        """Take no more questions."""
        self.deadline = None
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with suppress(OSError):
                    os.unlink(self._path)
                with suppress(OSError):
                    self._socket.shutdown(2)  # wakes the thread that waits for callers
                self._socket.close()
                self._socket = None


def _by_short_path(path: str, do: Callable[[str], None]) -> None:
    """By way of /proc, as a socket's path may have 107 bytes at most."""
    inside = os.open(os.path.dirname(path), os.O_PATH)
    try:
        do(f"/proc/self/fd/{inside}/{os.path.basename(path)}")
    finally:
        os.close(inside)


def ask(job: str, *, native: bool, full: bool) -> str:
    """Ask a running job where its ranks are. `job`: an id, the beginning of one, or "" for the latest.

    Raises UsageError where there is none, or several.
    """
    with _call(job) as line:
        line.settimeout(ANSWER_SECONDS)
        line.sendall(json.dumps({"native": native, "full": full}).encode() + b"\n")
        return line.makefile("rb").read().decode(errors="replace")


def _call(job: str) -> socket.socket:
    import socket

    found: dict[str, tuple[float, socket.socket]] = {}
    here = socket.gethostname()
    with suppress(FileNotFoundError, PermissionError):
        for entry in os.scandir(folder()):
            name, _, host = entry.name.rpartition("@")
            if host != here or not name.startswith(job):
                continue
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _by_short_path(entry.path, line.connect)
                found[name] = (entry.stat(follow_symlinks=False).st_mtime, line)
            except ConnectionRefusedError:  # left by a launchpad that was killed
                with suppress(OSError):
                    os.unlink(entry.path)
            except OSError:
                continue
    if not found:
        which = f"no job {job}… of yours" if job else "no job of yours"
        raise UsageError(f"{which} runs on {here}")
    chosen = job if job in found else max(found, key=lambda name: found[name][0])
    if job and job != chosen and len(found) > 1:
        raise UsageError(f"{job} could be {', '.join(sorted(found))}: write more of it")
    for name, (_, line) in found.items():
        if name != chosen:
            line.close()
    return found[chosen][1]
