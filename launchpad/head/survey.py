"""Makes one world of several nodes: are they different machines, alike enough, and by which address do they meet?"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from launchpad import __version__
from launchpad.commands import Hold, Listen, Reach, Survey
from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.events import Held, Listening, Reached, Surveyed
from launchpad.head.gathering import Gathering
from launchpad.job.plan import Master

# Looking at a node's torch starts a Python there, which may have to be read over a network.
SURVEY_SECONDS = 60.0

# What does not answer within this is behind a firewall.
REACH_SECONDS = 5.0

# Once one address has been reached by all, a better one has so long to be reached too.
BETTER_SECONDS = 0.2


def survey(
    gathering: Gathering,
    folders: Sequence[str],
    pythons: Sequence[str],
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    torch: bool,
) -> list[Surveyed]:
    """Have all nodes look around, each at its folder and its interpreter ("": the agent's), with the ranks' `environ`.

    Raises NodeError with a line for each that can't take part.
    """
    count = len(folders)
    asked = {
        node: Survey(folder, torch, python, dict(environ))
        for node, (folder, python) in enumerate(zip(folders, pythons, strict=True))
    }
    found: list[Surveyed] = gathering.ask(asked, Surveyed, SURVEY_SECONDS)
    names = [gathering.nodes.name(node) for node in range(count)]
    for _ in range(2):  # the first answer has waited for the survey, or for a module to be imported
        gathering.measure_clocks()
    if bad := {name: f"no such folder: {one.problem}" for name, one in zip(names, found, strict=True) if one.problem}:
        raise NodeError(
            failed_hosts(bad, count, "give --wdir a folder that all hosts have, or send this one with --sync")
        )
    check_machines(names, found)
    check_versions(names, found, torch=torch)
    installed = {name: one.launchpad for name, one in zip(names, found, strict=True) if one.launchpad}
    if other := [f"{name} ({version})" for name, version in installed.items() if version != __version__]:
        say(f"ranks import the launchpad that is installed on {', '.join(other)}, not this one ({__version__})")
    return found


def check_machines(names: Sequence[str], found: Sequence[Surveyed]) -> None:
    """Raises UsageError where two names mean one machine: their ranks would take each other's GPUs and cores."""
    seen: dict[str, str] = {}
    for name, one in zip(names, found, strict=True):
        if one.machine in seen:
            raise UsageError(
                f"{seen[one.machine]} and {name} are one machine; name it once, with the ranks of both: "
                f"{seen[one.machine]}:N"
            )
        seen[one.machine] = name


def check_versions(names: Sequence[str], found: Sequence[Surveyed], *, torch: bool) -> None:
    """Raises NodeError where the nodes' Python (to its minor version) or torch differ: ranks would fail, or hang."""
    by_name = dict(zip(names, found, strict=True))
    interpreters = {name: one.python for name, one in by_name.items()}
    _check_same("Python", {name: ".".join(one.version.split(".")[:2]) for name, one in by_name.items()}, interpreters)
    if torch:
        _check_same("torch", {name: one.torch or "none" for name, one in by_name.items()}, interpreters)


def _check_same(what: str, versions: Mapping[str, str], pythons: Mapping[str, str]) -> None:
    first = next(iter(versions))
    if bad := {
        name: f"wrong {what}: {version} ({pythons[name]}), and {first} has {versions[first]} ({pythons[first]})"
        for name, version in versions.items()
        if version != versions[first]
    }:
        raise NodeError(failed_hosts(bad, len(versions), f"install the same {what}, or name an interpreter: --python"))


def meet(
    gathering: Gathering, found: Sequence[Surveyed], wanted: str, port: int, prefer: str
) -> tuple[Master, list[str]]:
    """Find an address of node 0 that every other node reaches, and hold the rendezvous port there.

    `wanted`: the only address that will do, "" for any; `prefer`: the best one, if it is one. Returns also the
    interface by which each node reaches it. Raises NodeError where there is none.
    """
    own = {address: interface for address, interface, *_ in found[0].addresses}
    candidates = [_number(wanted)] if wanted else sorted(own, key=lambda address: address != prefer)
    ask, answer = os.urandom(16).hex(), os.urandom(16).hex()
    (listening,) = gathering.ask({0: Listen(candidates, ask, answer)}, Listening, REACH_SECONDS)
    places = [[address, at] for address, at in zip(candidates, listening.ports, strict=True) if at > 0]
    if not places:
        raise NodeError(
            f"--master-addr {wanted}: {gathering.nodes.name(0)} has no such address; it has {', '.join(own)}"
        )
    others = range(1, len(found))
    for node in others:
        gathering.nodes.send(node, Reach(places, ask, answer))
    reached: dict[int, dict[str, str]] = {node: {} for node in others}
    left = {address: len(others) for address, _ in places}  # by how many nodes it is still to be reached
    deadline = gathering.clock() + REACH_SECONDS
    while (heard := gathering.hear(deadline)) is not None:
        node, event = heard
        if isinstance(event, Reached) and event.address in left:
            left[event.address] -= event.address not in reached[node]
            reached[node][event.address] = event.interface
            common = [address for address, _ in places if not left[address]]
            if common and common[0] == places[0][0]:
                break
            if common:
                deadline = min(deadline, gathering.clock() + BETTER_SECONDS)
    common = [address for address, _ in places if not left[address]]
    if not common:
        raise NodeError(_unreached(gathering, reached, [address for address, _ in places]))
    address = common[0]
    (held,) = gathering.ask({0: Hold(address, port)}, Held, REACH_SECONDS)
    if held.port < 0:
        raise UsageError(
            f"--master-port {port}: another program listens there on {gathering.nodes.name(0)}; end it, "
            "give another port, or leave the option out to get a free one"
        )
    return Master(address, held.port), [own.get(address, ""), *(reached[node][address] for node in others)]


def _number(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise UsageError(f"--master-addr {name}: no such host; give an address of the first one") from None


def _unreached(gathering: Gathering, reached: Mapping[int, Mapping[str, str]], addresses: Sequence[str]) -> str:
    """Who reaches none of node 0's addresses; where each reaches one, but not the same one, who reaches which."""
    first = gathering.nodes.name(0)
    cut_off = [node for node, by in reached.items() if not by] or list(reached)
    bad = {
        gathering.nodes.name(node): f"reaches {first} at {', '.join(reached[node]) or 'none of its addresses'}"
        for node in cut_off
    }
    outward = [address for address in addresses if not address.startswith("127.") and address != "::1"] or addresses
    mend = f"{first} has the addresses {', '.join(outward)}; open one between the hosts"
    return failed_hosts(bad, len(reached) + 1, mend)
