"""The console script's entry: what has to happen before anything heavy is imported."""

from __future__ import annotations

import os
import signal
import sys

# Where words like these stand, the ranks will run elsewhere, as a rule. Where they don't, the command makes the link.
_NAMES_HOSTS = ("-H", "--host")


def main() -> None:
    """Start this node's guard and agent, whose start-up then passes while click is imported; then run the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as we may have inherited it, no child could be waited for
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job's own handler stands, Ctrl-C just ends us
    _open_standard_descriptors()
    link = None
    if sys.argv[1:2] == ["run"] and not any(word.startswith(_NAMES_HOSTS) for word in sys.argv):
        from launchpad.transport.local import LocalLink

        try:
            link = LocalLink()
        except (OSError, RuntimeError):  # the command tries again, where the reason can be told
            pass
    from launchpad.cli.main import main as run_command

    run_command(link)


def _open_standard_descriptors() -> None:
    """Where we were started with 0, 1 or 2 closed, a pipe of ours would take the number and be mistaken for it."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w"))  # noqa: SIM115
