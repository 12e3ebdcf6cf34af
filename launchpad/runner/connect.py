"""Runs one command on several hosts: reads their names, connects to all in parallel, forms one world."""

from __future__ import annotations

import contextlib
import os
import shlex
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from launchpad import linux
from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.console.terminal import HowFar, status_line, waiting
from launchpad.doctor.interfaces import misleading
from launchpad.errors import ConnectError, LaunchpadError, NodeError, UsageError, failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.head.node_facts import address_at, find_master, probe_nodes
from launchpad.head.planner import Supplies
from launchpad.job.hosts import Host, Nproc, choose_hosts, parse_hostfile, parse_hosts, slots_of
from launchpad.job.plan import Master, Member, NodePlacement
from launchpad.job.spec import JobSpec
from launchpad.named import NamedTuple
from launchpad.output.status_line import StatusLine
from launchpad.protocol.commands import Probe
from launchpad.protocol.events import NodeFacts
from launchpad.runner.options import HostOptions
from launchpad.runner.stoppable import stoppable
from launchpad.runner.this_machine import is_this_machine
from launchpad.transport import FEW_LINKS, Link

if TYPE_CHECKING:
    from launchpad.head.sync import Progress, Taken
    from launchpad.runner.connector import Connector
    from launchpad.transport.ssh.bundle import Startup

# Options that make no sense without hosts.
_ABOUT_HOSTS = ("include", "exclude", "ssh", "ssh_config", "accept_new_host_keys", "sync", "sync_env")


def read_hosts(options: HostOptions, nproc: Nproc | None) -> tuple[Host, ...]:
    """The hosts that the options name, if any; --enter or --keep-running alone names this machine. Raises UsageError.

    `nproc` is the value of --nproc.
    """
    entering = enter_words(options)
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("--hosts and --hostfile both name the hosts; give only one of them")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        path = options.hostfile
        try:
            hosts = parse_hostfile(linux.whole_text(path, errors="replace"), path)
        except OSError as error:
            raise UsageError(f"--hostfile {path}: {error.strerror}; give a file with one host per line") from None
    elif options.allocation:
        hosts = options.allocation
    else:
        for name in _ABOUT_HOSTS:
            if getattr(options, name) and not (entering and name in ("sync", "sync_env")):
                shown = name.replace("_", "-")
                raise UsageError(f"--{shown} needs hosts; name them with --hosts or --hostfile, or leave it out")
        if not entering and not options.keep_running:
            return ()
        hosts = parse_hosts("localhost")
    hosts = choose_hosts(hosts, options.include, options.exclude)
    if options.keep_running and (options.by_srun or entering):
        how = "srun starts launchpad on the nodes of this job" if options.by_srun else "--enter's command ends with it"
        raise UsageError(f"--keep-running is for hosts that are reached over SSH, and {how}; leave it out")
    if options.by_srun and entering:
        why = "in a Slurm allocation srun starts launchpad itself on the nodes"
        raise UsageError(f"--enter: {why}; name them with --hosts, or leave --enter out")
    if options.have_launchpads:
        return hosts
    hosts = tuple(host._replace(here=is_this_machine(host, options.ssh_config)) for host in hosts)
    slots_of(hosts, nproc)  # reports errors before any host is contacted
    here = [host.name for host in hosts if host.here]
    if len(here) > 1:
        raise UsageError(f"{' and '.join(here)} are both this machine; name it once, with all its ranks: {here[0]}:N")
    return hosts


def enter_words(options: HostOptions) -> tuple[str, ...]:
    """The words of --enter. Raises UsageError."""
    try:
        words = tuple(shlex.split(options.enter))
    except ValueError as error:
        raise UsageError(f"--enter {options.enter}: {str(error).lower()}; quote it as in a shell") from None
    if options.enter and not words:
        raise UsageError("--enter is empty; give a command like 'docker exec -i NAME', or leave it out")
    return words


def connect_all(
    hosts: Sequence[Host],
    here: Callable[[], Link],
    at_end: Callable[[Callable[[], None]], object],
    options: HostOptions,
    startups: Sequence[Startup],
    *,
    quiet: bool,
) -> tuple[list[Link], Callable[[int], Link]]:
    """Connect to all hosts in parallel and start their agents. Returns the links, and a function that reconnects one.

    Raises NodeError with a line for each host that can't be used, UsageError if the ssh configuration is wrong.

    `here` gives the link to this machine's agent; `at_end` registers a function to call when all links are closed;
    `startups`: of each host.
    """
    from launchpad.runner.connector import Connector

    far = {place: host for place, host in enumerate(hosts) if options.enter or options.keep_running or not host.here}
    links: dict[int, Link] = {}
    for place, host in enumerate(hosts):
        if place not in far:
            links[place] = here()
            links[place].name = host.name
    if not far:
        return [links[place] for place in range(len(hosts))], lambda _: here()
    if len(far) > FEW_LINKS:
        linux.raise_file_limit()
    connector = Connector(options)
    at_end(connector.abandon)
    found, failures = reach(connector, far, startups, quiet=quiet)
    links |= found
    if failures:
        for link in links.values():
            link.close()
        names = {host.name for host in hosts}  # roles may have several nodes on one
        raise NodeError(failed_hosts({hosts[place].name: why for place, why in failures.items()}, len(names), ""))

    def reopen(place: int) -> Link:
        connector.stop_asking()
        return connector.connect(hosts[place], startups[place])

    return [links[place] for place in range(len(hosts))], reopen


def reach(
    connector: Connector, far: Mapping[int, Host], startups: Sequence[Startup], *, quiet: bool, seconds: float = inf
) -> tuple[dict[int, Link], dict[int, str]]:
    """Connect to these hosts in parallel. Returns the links, and why others can't be used, by the hosts' numbers.

    After so many `seconds`, not counting those in which the user was asked for something, the rest are given up.
    Raises UsageError if the ssh configuration is wrong.
    """
    links: dict[int, Link] = {}
    failures: dict[int, str] = {}
    wrong: dict[int, UsageError] = {}

    def connect(place: int, host: Host) -> None:
        try:
            links[place] = connector.connect(host, startups[place])
        except ConnectError as error:
            failures[place] = f"{error.kind}: {error.text}"
        except UsageError as error:
            wrong[place] = error
        except LaunchpadError as error:
            failures[place] = str(error)
        except Exception as error:  # an unexpected error from a library fails only this host
            failures[place] = f"{type(error).__name__}: {error}"

    threads = [
        threading.Thread(target=connect, args=one, name=f"dial-{one[1].name}", daemon=True) for one in far.items()
    ]

    def look() -> HowFar:
        left = [host.name for place, host in far.items() if place not in links and place not in failures]
        return HowFar(waiting(f"reaching {_hosts(len(far))}", left), len(links), len(far))

    def begin() -> None:
        try:
            connector.begin(list(far.values()))
        except UsageError as error:
            wrong[-1] = error
        except ConnectError as error:  # given up, or too many open files
            failures.update(dict.fromkeys(far, f"{error.kind}: {error.text}"))

    # A signal interrupts this thread. It must not do so between the start of a process and the note of it.
    beginning = threading.Thread(target=begin, name="dial", daemon=True)
    with status_line(look, quiet=quiet) as line, _exit_on_signal(connector.abandon, line, quiet=quiet):
        beginning.start()
        beginning.join()
        if not wrong and not failures:
            for thread in threads:
                thread.start()
            _join(threads, connector, seconds)
    for place, host in far.items():
        if not wrong and place not in links and place not in failures:
            failures[place] = f"timed out: no answer to ssh within {seconds:g} s; try ssh {host.name}"
    if wrong:
        for link in links.values():
            link.close()
        raise wrong[min(wrong)]  # usually about the same file, so one of them is enough
    return dict(links), dict(sorted(failures.items()))


def _join(threads: Sequence[threading.Thread], connector: Connector, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(None if seconds == inf else max(0.0, min(deadline - time.monotonic(), seconds / 10)))
            if connector.asking:
                deadline = time.monotonic() + seconds


def _hosts(count: int) -> str:
    return f"{count} host{'s' if count > 1 else ''}"


@contextlib.contextmanager
def _exit_on_signal(abandon: Callable[[], None], line: StatusLine, *, quiet: bool) -> Iterator[None]:
    """Let Ctrl-C end the process meanwhile, and restore the terminal if a passphrase prompt was open."""
    modes = termios.tcgetattr(0) if os.isatty(0) else None

    def say(text: str) -> None:
        line.close()
        if modes is not None:
            termios.tcsetattr(0, termios.TCSANOW, modes)
        if not quiet:
            say_on_stderr(text)

    try:
        with stoppable(say):
            yield
    except SystemExit as request:
        abandon()
        os._exit(int(str(request.code)))  # don't wait for threads that are still connecting


class Supplied(NamedTuple):
    """Where each node's ranks run, and in which interpreter ("": the agent's)."""

    folders: dict[int, str]
    pythons: dict[int, str]


def make_world(
    bringup: BringUp,
    spec: JobSpec,
    members: Sequence[Member],
    links: Sequence[Link],
    supplied: Supplied,
    nodes: Sequence[int],
    *,
    apart: bool,
    synced: bool,
    quiet: bool,
) -> tuple[list[NodePlacement], list[NodeFacts | None], Master | None]:
    """Probe these `nodes`, and if there are several in all, choose the rendezvous address. All others have no facts.

    `apart`: the nodes must be different machines. `synced`: they have got the ranks' interpreter from here. Raises
    NodeError.
    """
    folders, pythons = supplied
    say = say_nothing if quiet else say_on_stderr
    master = None
    interfaces: dict[int, str] = {}

    def look() -> HowFar:
        left = [members[node].name for node in bringup.awaited]
        return HowFar(waiting(f"probing {_hosts(len(nodes))}", left), len(nodes) - len(left), len(nodes))

    probes = [
        Probe(folders[node], spec.torch, pythons[node], dict(own.environ), list(own.target.needs))
        for node, own in enumerate(member.own or spec for member in members)
    ]
    rounds = [probes]
    if spec.programs:
        from launchpad.job.programs import probes_for

        rounds = probes_for(spec.programs, probes)
    with status_line(look, quiet=quiet):
        first, *more = ({node: one[node] for node in nodes} for one in rounds)
        found = probe_nodes(bringup, first, say, apart=apart, more=more)
        if len(members) > 1 or spec.world.meeting is not None:  # others may join a node that is alone
            addresses = (getattr(link, "own_address", "") for link in links if link.remote)
            seen = next(filter(None, addresses), "")
            wanted = "" if spec.world.master_addr == "127.0.0.1" else spec.world.master_addr
            master, interfaces = find_master(
                bringup,
                nodes,
                found[nodes[0]].addresses,
                wanted,
                spec.world.master_port,
                prefer="" if links[nodes[0]].remote else seen,
            )
    for sentence in _to_tell(
        *(spec, [members[node] for node in nodes], [links[node] for node in nodes], list(found.values())),
        synced=synced,
    ):
        say(sentence)
    places = [
        NodePlacement(
            *(member.name, member.nproc, found[node].python if node in found else pythons[node], folders[node]),
            *(interfaces.get(node, ""), member.own),
            address=address_at(interfaces[node], found[node], master) if master and node in found else "",
            ends_at=member.ends_at,
        )
        for node, member in enumerate(members)
    ]
    return places, [found.get(node) for node in range(len(members))], master


def _to_tell(
    spec: JobSpec, members: Sequence[Member], links: Sequence[Link], found: Sequence[NodeFacts], *, synced: bool
) -> Iterator[str]:
    """What may surprise about the hosts. `synced`: they have got the ranks' interpreter from here."""
    if spec.target.kind != "program" and not synced:
        named = [(member, getattr(link, "python_sought", "")) for member, link in zip(members, links, strict=True)]
        sought = {member.name: python for member, python in named if python and not member.python}
        if sought:
            from launchpad.doctor.software import other_interpreters

            by_name = {member.name: one for member, one in zip(members, found, strict=True)}
            yield from other_interpreters(sought, by_name)
    if len(members) > 1:
        outward = {
            member.name: {interface for _, interface, *_ in one.addresses} - {"lo"}
            for member, one in zip(members, found, strict=True)
        }
        yield from misleading(spec.environ, outward)


def supply(
    bringup: BringUp,
    spec: JobSpec,
    members: Sequence[Member],
    links: Sequence[Link],
    supplies: Supplies,
    *,
    quiet: bool,
) -> Supplied:
    """Give the nodes what they are to have. Raises NodeError."""
    remote = [node for node, link in enumerate(links) if link.remote and members[node].own is None]
    given = give(bringup, remote, spec.cwd, supplies, quiet=quiet)
    return Supplied(
        {node: (member.own or spec).cwd for node, member in enumerate(members)} | given.folders,
        {node: member.python for node, member in enumerate(members)} | given.pythons,
    )


def give(bringup: BringUp, nodes: Sequence[int], folder: str, supplies: Supplies, *, quiet: bool) -> Supplied:
    """Give these nodes the files of the `folder`, and the environment, as far as there are any. Raises NodeError."""
    given = Supplied({}, {})
    if supplies.files is not None and nodes:
        from launchpad.head.sync import sync

        with _progress(nodes, quiet=quiet) as note:
            given.folders.update(sync(bringup, nodes, folder, supplies.files, note))
    if supplies.environment is not None and nodes:
        from launchpad.head.environment_sync import sync_environment

        with _progress(nodes, quiet=quiet) as note:
            tell = say_nothing if quiet else say_on_stderr
            given.pythons.update(sync_environment(bringup, nodes, supplies.environment, note, tell))
        supplies.environment.rest()
    return given


@contextlib.contextmanager
def _progress(nodes: Sequence[int], *, quiet: bool) -> Iterator[Progress]:
    """Show how far the nodes have come, by what the function is told."""
    progress: dict[str, Taken] = {}  # by host

    def look() -> HowFar:
        hosts = dict(progress)
        left = {name: one for name, one in hosts.items() if one.size < one.of_size}
        parts = {
            name: HowFar(f"{name}: {one.files} of {one.of_files} files", one.size, one.of_size)
            for name, one in left.items()
        }
        if len(nodes) == len(parts) == 1:
            (one,) = parts.values()
            return one._replace(text=f"sync to {one.text}")
        size, of_size = (sum(one[place] for one in hosts.values()) for place in (0, 1))
        text = waiting(f"sync to {_hosts(len(nodes))}", list(left))
        return HowFar(text, size, of_size, parts)

    with status_line(look, of_bytes=True, quiet=quiet):
        yield progress.__setitem__
