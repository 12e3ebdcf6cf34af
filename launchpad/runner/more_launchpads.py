"""Starts further launchpads on a node that has joined: each world of the job there has one of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from launchpad import linux
from launchpad.console.message import say_on_stderr
from launchpad.job.world import place
from launchpad.transport import CLOSE_SECONDS

# How long one tries to reach the head, which listens.
_DIAL_SECONDS = 60.0


class MoreLaunchpads:
    """Those of one node. They end by themselves when the job does, as the head tells them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int, head: tuple[str, int], secret: bytes, key: str) -> None:
        """Start so many. `key`: that of this node's own launchpad, by which the head knows whose they are."""
        shared = os.memfd_create("launchpad-secret")
        linux.write_all(shared, secret)
        argv = [sys.executable, "-P", "-m", "launchpad", "join", "--quiet", f"--beside={key}"]
        argv += [f"--rdzv-secret-file=/dev/fd/{shared}", f"--rdzv-conf=join_timeout={_DIAL_SECONDS:g}", place(*head)]
        try:
            for _ in range(count):
                # In a session of its own, as Ctrl-C is for this launchpad, which tells the head.
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[shared], start_new_session=True)
                self._processes.append(process)
        except OSError as error:
            say_on_stderr(f"another launchpad can't be started here: {error.strerror}", bad=True)
        finally:
            os.close(shared)

    def close(self) -> None:
        """Wait until they have ended; end those that don't."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLOSE_SECONDS)
            if process.poll() is None:
                process.kill()
                process.wait()
