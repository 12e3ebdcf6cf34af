"""Several hosts from one command: read their names, reach them all at once, make one world of them."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launchpad.cli.run_options import ABOUT_HOSTS
from launchpad.errors import ConnectError, LaunchpadError, NodeError, UsageError, failed_hosts
from launchpad.head.gathering import Gathering
from launchpad.head.survey import meet, survey
from launchpad.job.hosts import Host, choose_hosts, parse_hostfile, parse_hosts, slots_of
from launchpad.job.plan import Master, Place
from launchpad.job.spec import JobSpec
from launchpad.report.console import say_on_stderr
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.head.sync import File

# Names of the machine that launchpad runs on; it needs no ssh.
_HERE = ("localhost", "127.0.0.1", "::1")


def read_hosts(options: dict[str, Any]) -> tuple[Host, ...]:
    """The hosts that the command line names; none where it names none. Raises UsageError."""
    if options["hosts"] is not None and options["hostfile"] is not None:
        raise UsageError("--hosts and --hostfile both name the hosts; give one of them")
    if options["hosts"] is not None:
        hosts = parse_hosts(options["hosts"])
    elif options["hostfile"] is not None:
        path = options["hostfile"]
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                hosts = parse_hostfile(file.read(), path)
        except OSError as error:
            raise UsageError(f"--hostfile {path}: {error.strerror}; name a file with a host a line") from None
    else:
        for name in ABOUT_HOSTS:
            if options[name]:
                shown = name.replace("_", "-")
                raise UsageError(f"--{shown} is about hosts; name them with --hosts or --hostfile, or leave it out")
        return ()
    hosts = choose_hosts(hosts, options["include"], options["exclude"])
    slots_of(hosts, options["nproc"])  # what can't be is said before any host is reached
    here = [host.name for host in hosts if is_here(host)]
    if len(here) > 1:
        raise UsageError(f"{' and '.join(here)} are this machine; name it once, with the ranks of both: {here[0]}:N")
    return hosts


def is_here(host: Host) -> bool:
    """Whether the host is this machine, by its name."""
    return host.name in (*_HERE, socket.gethostname()) and not (host.user or host.port)


def open_links(
    hosts: Sequence[Host],
    here: Callable[[], Link],
    at_end: Callable[[Callable[[], None]], object],
    options: dict[str, Any],
    python: str,
    *,
    exact: bool,
) -> tuple[list[Link], Callable[[int], Link]]:
    """Reach all hosts at once and start their agents. Raises NodeError with a line for each that can't be used.

    Returns also what reaches one of them again.

    `here` gives the link to this machine's agent; `at_end` takes what is to be called when all links are closed;
    `python` is looked for on each host, and unless it has to be `exact`, python3 will do where it is not there.
    """
    links: dict[int, Link] = {}
    failures: dict[str, str] = {}
    far = [(place, host) for place, host in enumerate(hosts) if not is_here(host)]
    for place, host in enumerate(hosts):
        if is_here(host):
            links[place] = here()
            links[place].name = host.name
    connect: Callable[[Host], Link] | None = None
    if far:
        connect, abandon = _connector(options, python, exact=exact)
        at_end(abandon)

    def reach(place: int, host: Host) -> None:
        assert connect is not None
        try:
            links[place] = connect(host)
        except ConnectError as error:
            failures[host.name] = f"{error.kind}: {error.text}"
        except LaunchpadError as error:
            failures[host.name] = str(error)
        except Exception as error:  # a library's surprise is one host's failure, too
            failures[host.name] = f"{type(error).__name__}: {error}"

    def reopen(place: int) -> Link:
        if connect is None or is_here(hosts[place]):
            raise NodeError("this machine's agent can't be started again")
        return connect(hosts[place])

    if far:
        threads = [threading.Thread(target=reach, args=one, name=f"dial-{one[1].name}", daemon=True) for one in far]
        _wait_for(threads, abandon)
    if failures:
        for link in links.values():
            link.close()
        ordered = {host.name: failures[host.name] for host in hosts if host.name in failures}
        raise NodeError(failed_hosts(ordered, len(hosts), ""))
    return [links[place] for place in range(len(hosts))], reopen


def _connector(
    options: dict[str, Any], python: str, *, exact: bool
) -> tuple[Callable[[Host], Link], Callable[[], None]]:
    """What makes a link to a host, and what is to be called at the end of all."""
    from launchpad.transport.ssh.dial import Dialer  # paramiko takes a tenth of a second
    from launchpad.transport.ssh.link import SshLink

    ask = _ask if sys.stdin.isatty() and sys.stderr.isatty() else None
    dialer = Dialer(options["ssh_config"], accept_new=options["accept_new_host_keys"], ask=ask)

    def connect(host: Host) -> Link:
        transport = dialer.connect(host.name, host.user, host.port)
        try:
            return SshLink(host.name, transport, python, exact=exact)
        except ConnectError:
            transport.close()
            raise

    return connect, dialer.abandon


def _wait_for(threads: Sequence[threading.Thread], abandon: Callable[[], None]) -> None:
    """Run the threads to their ends. Ctrl-C meanwhile leaves the terminal as it was, if a passphrase is asked for."""
    modes = termios.tcgetattr(0) if os.isatty(0) else None
    heeded = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():  # launchpad.run's, which hears of Ctrl-C another way
        heeded = []
    before = {one: signal.signal(one, _leave) for one in heeded}
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except SystemExit as request:
        if modes is not None:
            termios.tcsetattr(0, termios.TCSANOW, modes)
        abandon()
        os._exit(int(str(request.code)))  # threads may be in the midst of a connection, which ends with us
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _leave(signum: int, _: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _ask(prompt: str) -> str | None:
    try:
        return getpass.getpass(prompt)
    except (EOFError, OSError):
        return None


def make_world(
    gathering: Gathering,
    spec: JobSpec,
    hosts: Sequence[Host],
    links: Sequence[Link],
    files: Sequence[File],
    options: dict[str, Any],
) -> tuple[list[Place], Master | None]:
    """Send the nodes the `files` of --sync, look at them, and where there are several, find out where they meet.

    Raises NodeError.
    """
    folders = dict.fromkeys(range(len(hosts)), spec.cwd)
    if options["sync"]:
        folders |= _sync(gathering, [node for node, link in enumerate(links) if link.remote], spec.cwd, files)
    say = (lambda _: None) if options["quiet"] else say_on_stderr
    # A remote agent runs in the ranks' interpreter; the one here in ours, which need not be theirs.
    pythons = ["" if link.remote or spec.python == sys.executable else spec.python for link in links]
    found = survey(gathering, list(folders.values()), pythons, spec.environ, say, torch=spec.torch)
    master, interfaces = None, [""] * len(hosts)
    if len(hosts) > 1:
        seen = next((link.own_address for link in links if link.remote and hasattr(link, "own_address")), "")
        wanted = "" if spec.world.master_addr == "127.0.0.1" else spec.world.master_addr
        master, interfaces = meet(
            gathering, found, wanted, spec.world.master_port, prefer="" if links[0].remote else seen
        )
    counts = slots_of(hosts, options["nproc"])
    places = [
        Place(host.name, counts[node], found[node].python, folders[node], there)
        for node, (host, there) in enumerate(zip(hosts, interfaces, strict=True))
    ]
    return places, master


def _sync(gathering: Gathering, nodes: Sequence[int], folder: str, files: Sequence[File]) -> dict[int, str]:
    from launchpad.head.sync import sync

    bar: Any = None

    def show(taken: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            label = f"sync to {len(nodes)} host{'s' if len(nodes) > 1 else ''}"
            bar = click.progressbar(length=total, label=label, file=sys.stderr, show_eta=False)
        bar.update(taken - bar.pos)

    try:
        return sync(gathering, nodes, folder, files, show if sys.stderr.isatty() else lambda *_: None)
    finally:
        if bar is not None:
            bar.render_finish()
