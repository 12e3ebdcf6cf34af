"""Entry point of the console script: everything that must happen before heavy imports."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launchpad.image.keeper_link import KeeperLink

# With these options the ranks usually run elsewhere, or the head is a process to come: no agent is started here yet.
_NO_AGENT_YET = ("-H", "--host", "--enter", "--detach")

_NEEDS_LINUX = "launchpad needs Linux, and this is {}: run it on a Linux machine, or in a Linux container or VM (WSL 2)"


def main() -> None:
    """Start this node's guard and agent, which come up while click is imported; then run the command."""
    if sys.platform != "linux":
        sys.stderr.write(f"launchpad: error: {_NEEDS_LINUX.format(sys.platform)}\n")
        raise SystemExit(2)
    collect_rarely()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, children can't be waited for
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job installs its handler, Ctrl-C just kills us
    _open_standard_descriptors()
    link = keeper = None
    if sys.argv[1:2] in (["run"], ["launch"]) and not any(word.startswith(_NO_AGENT_YET) for word in sys.argv):
        keeper = _keeper()
        if keeper is None:
            from launchpad.transport.local import LocalLink

            try:
                link = LocalLink()
            except (OSError, RuntimeError):  # the command tries again and reports the reason
                pass
    from launchpad.cli.main import main as run_command

    run_command(link, keeper)


def collect_rarely() -> None:
    """Have the garbage collector look for cycles less often: almost all that imports and a large job make is to stay.

    By default it looked 50 times among what a run imports, for 7% of the time until the first rank started; with 10 000
    nodes, it took a quarter of the head's time to restart the ranks.
    """
    gc.set_threshold(50_000)


def _keeper() -> KeeperLink | None:
    """The keeper of images, if there is one: its agent is forked when it is known for what."""
    from launchpad.image import place

    if not place.exists(os.environ):
        return None
    from launchpad.image.keeper_link import connect

    return connect(os.environ)


def _open_standard_descriptors() -> None:
    """Open 0, 1 and 2 if they were closed, or one of our pipes would get that number and be mistaken for it."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w"))  # noqa: SIM115
