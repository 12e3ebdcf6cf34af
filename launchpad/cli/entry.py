"""Entry point of the console script: everything that must happen before heavy imports."""

from __future__ import annotations

import gc
import os
import sys

from launchpad.cli.shells import COMPLETION

TYPE_CHECKING = False  # typing would take a tenth of the time until a kept head is asked
if TYPE_CHECKING:
    import signal

    from launchpad.image.keeper_link import KeeperLink
else:
    import _signal as signal  # signal would take as long: it makes enumerations

# With these options the ranks usually run elsewhere, or the head is a process to come: no agent is started here yet.
_ELSEWHERE = ("-H", "-host", "--host", "-machinefile", "--machinefile", "--enter")
_LATER = ("--detach",)
_FLAGS = "mqv"  # may stand before the H, as in -qH

# With these, something may be asked on /dev/tty, by ssh or by what is entered: a kept head has no terminal of its own.
_MAY_ASK = (*_ELSEWHERE, "--config")

_NEEDS_LINUX = "launchpad needs Linux, and this is {}: run it on a Linux machine, or in a Linux container or VM (WSL 2)"


def main() -> None:
    """Run the command: in a kept head if there is one, or else here."""
    if sys.platform != "linux":
        sys.stderr.write(f"launchpad: error: {_NEEDS_LINUX.format(sys.platform)}\n")
        raise SystemExit(2)
    if COMPLETION in os.environ:  # nothing is to be started
        from launchpad.cli.complete import answer

        answer()
    _prepare()
    _open_standard_descriptors()
    if _is_run() and _has_keeper() and not _has_option(_LATER) and not (_has_option(_MAY_ASK) and _has_terminal()):
        from launchpad.cli.hand_over import hand_over

        hand_over()
    _run()


def kept_head() -> dict[str, object]:
    """How a kept head is started, for the keeper of images."""
    from launchpad.job.hosts import ALLOCATION_VARIABLES
    from launchpad.runner.imports import NOT_FORKED
    from launchpad.transport.local import guard_environ

    return {
        "rehearse": f"{__name__}:{rehearse.__name__}",
        "main": f"{__name__}:{stand_in.__name__}",
        "python": sys.executable,
        "environ": guard_environ(),
        "never": sorted({*NOT_FORKED, *ALLOCATION_VARIABLES}),
    }


def rehearse() -> None:
    """Load what runs import and parse a command line: each kept head has what Python and click keep of it."""
    import launchpad.cli.job_file
    import launchpad.cli.launch
    import launchpad.cli.main
    import launchpad.cli.roles
    import launchpad.console.dry_run
    import launchpad.head.bringup
    import launchpad.image.keeper_link
    import launchpad.job.binding
    import launchpad.protocol.cpulist
    import launchpad.record.circumstances
    import launchpad.runner.connect
    import launchpad.runner.connector
    import launchpad.runner.nodes
    import launchpad.runner.roles
    import launchpad.runner.supervise
    import launchpad.transport.local
    import launchpad.transport.ssh.choice
    import launchpad.transport.ssh.link
    import launchpad.transport.ssh.openssh  # noqa: F401
    from launchpad.cli import run

    run.command.make_context("run", ["--nproc", "2", "script.py"])


def stand_in(pid: int) -> None:
    """Be the kept head that runs the command for this process."""
    from launchpad import caller

    caller.stand_in_for(pid)
    _prepare()
    _run()


def _is_run() -> bool:
    return sys.argv[1:2] in (["run"], ["launch"])


def _starts_agent() -> bool:
    return _is_run() and not _has_option(_ELSEWHERE) and not _has_option(_LATER)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _has_option(names: tuple[str, ...]) -> bool:
    """Whether a word looks like one of these options, or an abbreviation of one. It may be the program's."""
    for word in sys.argv[2:]:
        short = word.partition("=")[0]
        if word.startswith(names) or (len(short) > 2 and any(name.startswith(short) for name in names)):
            return True
        if "-H" in names and word[:1] == "-" and word[1:].lstrip(_FLAGS)[:1] == "H":
            return True
    return False


def _run() -> None:
    """Start this node's guard and agent, which come up while click is imported; then run the command."""
    link = keeper = None
    if _starts_agent():
        keeper = _keeper()
        if keeper is None:
            from launchpad.transport.local import LocalLink

            try:
                link = LocalLink()
            except (OSError, RuntimeError):  # the command tries again and reports the reason
                pass
    from launchpad.cli.main import main as run_command

    run_command(link, keeper)


def _prepare() -> None:
    collect_rarely()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, children can't be waited for
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job installs its handler, Ctrl-C just kills us


def collect_rarely() -> None:
    """Have the garbage collector look for cycles less often: almost all that imports and a large job make is to stay.

    By default it looked 50 times among what a run imports, for 7% of the time until the first rank started; with 10 000
    nodes, it took a quarter of the head's time to restart the ranks.
    """
    gc.set_threshold(50_000)


def _has_keeper() -> bool:
    from launchpad.image import place

    return place.exists(os.environ)


def _keeper() -> KeeperLink | None:
    """The keeper of images, if there is one: its agent is forked when it is known for what."""
    if not _has_keeper():
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
