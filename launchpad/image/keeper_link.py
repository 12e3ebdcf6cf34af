"""A connection to the keeper of images (`launchpad warm`), to ask it for a guard that is the fork of one."""

import _socket
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .. import linux
from ..named import NamedTuple
from . import Cold, channel, place

Message = dict[str, Any]

# An import of torch from a slow network file system.
IMPORT_SECONDS = 600.0


class ForkRequest(NamedTuple):
    """What the ranks' forkserver would be."""

    python: str  # the ranks' interpreter
    preload: tuple[str, ...]  # what it would import
    environ: Mapping[str, str]  # the user's own variables, on top of the guard's
    defaults: Mapping[str, str]  # where those are unset
    forks: bool  # whether ranks are forked at all
    program: Sequence[str] = ()  # what runs in place of a guard, in the ranks' environment: Python code, its arguments
    more: bool = False  # whether the guard will be asked for further agents (agent/zygote.py)


class KeeperLink:
    """A connection to the keeper. It lasts as long as the job: what was missing is made ready after that."""

    def __init__(self, connection: _socket.socket) -> None:
        """Raises Cold if it doesn't greet."""
        self._connection = connection
        connection.settimeout(channel.ANSWER_SECONDS)
        self.asks: _socket.socket | None = None  # over which the guard can be asked for more, if that was requested
        self._request: ForkRequest | None = None
        self._cores = 0

    @property
    def cores(self) -> int:
        """The cores that an agent finds here. Raises Cold."""
        if not self._cores:
            self._cores = int(self._answer()[0]["cores"])
        return self._cores

    def want(self, request: ForkRequest) -> None:
        """Say what the coming agents are for; before that, none is forked."""
        self._request = request

    def ask_to_fork(
        self,
        commands: int,
        events: int,
        stderr: int,
        stdin_fd: int | None,
        shown: Sequence[str],
        environ: Mapping[str, str],
        folder: str = ".",
    ) -> None:
        """Ask for a guard with these ends of the link, in this folder; `forked` gives the answer. Raises Cold."""
        request = self._request
        if request is None:
            raise Cold("such a job starts cold")
        self.await_image()
        here = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        fds = {"commands": commands, "events": events, "stderr": stderr, "folder": here}
        if stdin_fd is not None:
            fds["stdin"] = stdin_fd
        asked = None
        try:
            if request.more:
                self.asks, asked = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
                fds["asked"] = asked.fileno()
            message = {**self._message(request, shown, environ), "fds": ["caller", *fds]}
            self.ask({"run": message}, [*fds.values()])
        except (Cold, OSError, KeyError) as error:
            self._ask_no_more()
            raise error if isinstance(error, Cold) else Cold(f"it can't be asked ({error})") from None
        finally:
            os.close(here)
            if asked is not None:
                asked.close()

    def await_image(self) -> None:
        """Wait for an image that is being made (job_image.py). Raises Cold."""

    def forked(self) -> int:
        """Wait until the guard has been forked that was asked for; returns a pidfd of it. Raises Cold."""
        try:
            answer, received = self._answer()
            if "guard" not in answer or len(received) != 1:
                raise Cold(str(answer.get("cold", "it gave no answer")))
        except Cold:
            self._ask_no_more()
            raise
        return received[0]

    def _ask_no_more(self) -> None:
        """There is no guard that could be asked."""
        if self.asks is not None:
            self.asks.close()
            self.asks = None

    @staticmethod
    def variables(request: ForkRequest, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of the ranks' forkserver, where these are the guard's."""
        return {**request.defaults, **environ, **request.environ}

    def _message(self, request: ForkRequest, shown: Sequence[str], environ: Mapping[str, str]) -> Message:
        ranks = self.variables(request, environ)
        with open("/proc/thread-self/personality") as file:
            personality = file.read()
        return {
            "python": request.python,
            "preload": request.preload,
            "ranks": ranks,
            "forks": request.forks,
            "environ": ranks if request.program else dict(environ),
            "program": list(request.program),
            "shown": list(shown),
            "thread": threading.get_native_id(),
            "personality": personality,
            "blocked": [int(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "files": linux.files_at_start(),
        }

    def ask(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a request. Raises Cold."""
        try:
            _ = self.cores
            channel.send(self._connection, message, fds)
        except (OSError, ValueError) as error:
            raise Cold(f"it can't be asked ({error})") from None

    def answer(self, seconds: float | None = channel.ANSWER_SECONDS) -> Message:
        """The answer to `ask`. Raises Cold."""
        self._connection.settimeout(seconds)
        return self._answer()[0]

    def why_no_image(self, seconds: float) -> str:
        """The answer to {"warm": settings}, for which an image is made: why there is none, or "". Raises Cold."""
        answer = self.answer(seconds)
        return str(answer.get("off") or answer.get("cold") or "")

    def _answer(self) -> tuple[Message, list[int]]:
        try:
            answer = channel.receive_in_time(self._connection)
        except TimeoutError:
            raise Cold("it doesn't answer") from None
        except (OSError, ValueError) as error:
            raise Cold(f"it doesn't answer ({error})") from None
        if answer is None:
            raise Cold("it has ended")
        return answer

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def connect(environ: Mapping[str, str]) -> KeeperLink | None:
    """A connection to the keeper of this installation, if the user has typed `launchpad warm`."""
    return connect_at(place.path(environ))


def connect_at(path: str) -> KeeperLink | None:
    """A connection to the keeper that listens there, which may be that of another installation."""
    connection = channel.connect(path)
    return None if connection is None else KeeperLink(connection)


def tell_lack(python: str, preload: Sequence[str], environ: Mapping[str, str], why: str) -> _socket.socket | None:
    """Tell the keeper of which image this node's agent had need: it is made once the connection that this returns ends.

    `environ`: of the ranks' forkserver; `why`: what was wrong with the image that was there.
    """
    connection = channel.connect(place.path(os.environ))
    if connection is not None:
        lack = {"python": python, "preload": list(preload), "ranks": dict(environ)}
        try:
            channel.send(connection, {"lack": {**lack, "why": why, "thread": threading.get_native_id()}})
        except OSError:  # it has ended
            pass
    return connection
