"""An image for one job only, whose worlds then import once between them. It ends when its agents have been forked.

Its keeper stays, to reap their guard.
"""

import _socket
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

from .. import linux
from . import Cold, place
from .keeper_link import IMPORT_SECONDS, ForkRequest, KeeperLink

# How long a job waits for its image, in seconds. Until then it has no record, no time limit, and no other rank runs.
PATIENCE_SECONDS = 30.0

# How long the keeper may take to end, in seconds.
_END_SECONDS = 5.0


class JobImage(KeeperLink):
    """A connection to a keeper of our own, which makes an image when it knows for what (`want`)."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start the keeper. `environ`: the guard's. Raises OSError."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self.begun = time.monotonic_ns()
        self._environ = environ
        self._why_not: str | None = None  # until the image is ready
        self._patient_until = time.monotonic() + PATIENCE_SECONDS
        try:
            pid = os.posix_spawn(
                sys.executable,
                [*place.keeper_command("serve_one"), "launchpad-image"],
                environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setsid=True,  # out of reach of the terminal's signals
                setsigmask=(),
                setsigdef=[signal.SIGCHLD],
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._keeper = pid, os.pidfd_open(pid)
        self._open = True
        super().__init__(ours)

    def want(self, request: ForkRequest) -> None:
        """Say what the coming agents are for, and have that imported. Raises Cold."""
        super().want(request)
        self.ask(
            {
                "warm": {
                    "seconds": IMPORT_SECONDS,
                    "python": request.python,
                    "preload": list(request.preload),
                    "extra": [],
                    "brings": False,
                    "ranks": self.variables(request, self._environ),
                    "head": None,
                    "thread": threading.get_native_id(),
                }
            }
        )

    def await_image(self) -> None:
        """Wait until it has imported. Raises Cold."""
        if self._why_not is None:
            self._why_not = self.why_no_image(max(0.001, self._patient_until - time.monotonic()))
        if self._why_not:
            raise Cold(self._why_not)

    def abandon(self) -> None:
        """Have a thread that waits for the image go on without it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(_socket.SHUT_RDWR)

    def dismiss(self) -> None:
        """Let the image end. The agents that it has forked go on; the keeper ends after their guard, and reaps it."""
        super().close()

    def close(self) -> None:
        """The same, and wait for the keeper, once the agents have ended."""
        self.dismiss()
        if self._open:
            self._open = False
            pid, ended = self._keeper
            linux.wait_for(ended, _END_SECONDS)
            os.close(ended)
            with contextlib.suppress(ChildProcessError):  # other code in this process reaps all children
                os.waitpid(pid, 0)
