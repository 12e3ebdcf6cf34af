"""Checks that the nodes are different machines with compatible software, and finds the address at which they meet."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from launchpad import linux
from launchpad._version import __version__
from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.head.requester import Requester
from launchpad.job.plan import Master, port_taken
from launchpad.protocol.commands import HoldPort, Listen, Probe, Reach
from launchpad.protocol.events import AgentReady, Listening, NodeFacts, PortHeld, Reached

# Probing for torch starts a Python on the node, which may have to be loaded over a network.
PROBE_SECONDS = 60.0

# An address that does not answer within this time is behind a firewall.
REACH_SECONDS = 5.0

# Clocks that differ by more than this are told of.
SKEW_SECONDS = 60.0

# Once all nodes reach one address, how long to wait for a better one.
BETTER_SECONDS = 0.2


def probe_nodes(
    bringup: BringUp,
    probes: Mapping[int, Probe],
    say: Callable[[str], None],
    *,
    apart: bool,
    more: Sequence[Mapping[int, Probe]] = (),
) -> dict[int, NodeFacts]:
    """Probe the nodes. Raises NodeError with a line for each that can't take part.

    `apart`: the nodes must be different machines. `more`: for further programs of the nodes.
    """
    nodes = sorted(probes)
    found: list[NodeFacts] = bringup.ask(probes, NodeFacts, PROBE_SECONDS)
    for others in more:
        again = bringup.ask(others, NodeFacts, PROBE_SECONDS)
        problems = [list(dict.fromkeys([*a.problems, *b.problems])) for a, b in zip(found, again, strict=True)]
        found = [one._replace(problems=both) for one, both in zip(found, problems, strict=True)]
    names = [bringup.nodes.name(node) for node in nodes]
    for _ in range(2):  # the first answer may be late: it waits for the probe, or for an import
        bringup.measure_clocks()
    for node, name in zip(nodes, names, strict=True):
        ready = bringup.nodes.in_our_time(node, bringup.ready[node])
        if note := clock_note(name, ready, time.time(), time.monotonic_ns()):
            say(note)
    if apart:
        check_machines(names, found)
    check_nodes(names, found, torch=any(probe.torch for probe in probes.values()))
    installed = {name: one.launchpad for name, one in zip(names, found, strict=True) if one.launchpad}
    if other := [f"{name} ({version})" for name, version in installed.items() if version != __version__]:
        say(f"ranks import the launchpad installed on {', '.join(other)}, not this one ({__version__})")
    return dict(zip(nodes, found, strict=True))


def clock_note(name: str, ready: AgentReady, wall: float, now: int) -> str:
    """What to tell if the node's clock differs much from ours, which shows `wall` (s since 1970) at `now` (ns).

    `ready`: with its time converted to our monotonic clock.
    """
    skew = ready.wall - (wall - (now - ready.time) / 1e9)
    if abs(skew) < SKEW_SECONDS:
        return ""
    way = "ahead of" if skew > 0 else "behind"
    return (
        f"the clock of {name} is {abs(skew):.0f} s {way} this machine's: launchpad's own times are corrected for that, "
        "but file times and the ranks' own timestamps are not"
    )


def check_machines(names: Sequence[str], found: Sequence[NodeFacts]) -> None:
    """Raise UsageError if two names refer to one machine: their ranks would share GPUs and cores."""
    seen: dict[str, str] = {}
    for name, one in zip(names, found, strict=True):
        if not one.machine:
            continue
        if one.machine in seen:
            raise UsageError(
                f"{seen[one.machine]} and {name} are one machine; name it once, with the ranks of both: "
                f"{seen[one.machine]}:N"
            )
        seen[one.machine] = name


# What a host may lack, by the beginning of how that is told, and what to do.
REMEDIES = {
    "no such folder": "give --wdir a folder that exists on all hosts, or copy this one with --sync",
    "no such file": "copy it there, or the whole folder with --sync",
    "no such module": "install it there, or choose another Python with --python",
    "no such program": "install it there",
    "wrong Python": "install the same Python, or choose one with --python",
    "wrong torch": "install the same torch, or choose one with --python",
}


def check_nodes(names: Sequence[str], found: Sequence[NodeFacts], *, torch: bool) -> None:
    """Raise NodeError if nodes lack what the ranks run, or have different versions of torch or Python (X.Y).

    All that is wrong with a node is told at once.
    """
    by_name = dict(zip(names, found, strict=True))
    bad = {name: list(one.problems) for name, one in by_name.items()}
    interpreters = {name: one.python for name, one in by_name.items()}
    versions = {"Python": {name: ".".join(one.version.split(".")[:2]) for name, one in by_name.items()}}
    if torch:
        versions["torch"] = {name: one.torch or "none" for name, one in by_name.items()}
    for what, of in versions.items():
        for name, text in _other_versions(what, of, interpreters):
            bad[name].append(text)
    if said := [text for texts in bad.values() for text in texts]:
        remedies = [remedy for start, remedy in REMEDIES.items() if any(text.startswith(start) for text in said)]
        why = {name: "; ".join(texts) for name, texts in bad.items() if texts}
        raise NodeError(failed_hosts(why, len(by_name), "; ".join(remedies)))


def _other_versions(what: str, versions: Mapping[str, str], pythons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The nodes with another version than the first one, and how that is told."""
    first = next(iter(versions))
    for name, version in versions.items():
        if version != versions[first]:
            has = f"{version} ({pythons[name]}), but {first} has {versions[first]} ({pythons[first]})"
            yield name, f"wrong {what}: {has}"


class Unreachable(NodeError):
    """Nodes that can't reach the first one at an address that the others reach too."""

    def __init__(self, text: str, reasons: Mapping[int, str]) -> None:
        super().__init__(text)
        self.reasons = reasons  # by node


def find_master(
    requester: Requester, nodes: Sequence[int], addresses: Sequence[Sequence[str]], wanted: str, port: int, prefer: str
) -> tuple[Master, dict[int, str]]:
    """Find an address of the first of these nodes that all others can reach, and hold the rendezvous port there.

    `addresses`: the first node's, as in NodeFacts; `wanted`: the only acceptable one, "" for any; `prefer`: the address
    to try first, if the node has it. Returns also the interface through which each node reaches it. Raises Unreachable
    if there is no such address, NodeError if a node is lost meanwhile.
    """
    first, *others = nodes
    own = {address: interface for address, interface, *_ in addresses}
    candidates = [_number(wanted)] if wanted else sorted(own, key=lambda address: address != prefer)
    ask, answer = os.urandom(16).hex(), os.urandom(16).hex()
    (listening,) = requester.ask({first: Listen(candidates, ask, answer)}, Listening, REACH_SECONDS)
    places = [[address, at] for address, at in zip(candidates, listening.ports, strict=True) if at > 0]
    if not places:
        raise NodeError(
            f"--master-addr {wanted}: {requester.nodes.name(first)} has no such address; it has {', '.join(own)}"
        )
    for node in others:
        requester.nodes.send(node, Reach(places, ask, answer))
    reached: dict[int, dict[str, str]] = {node: {} for node in others}
    left = {address: len(others) for address, _ in places}  # how many nodes have not reached it yet
    deadline = requester.clock() + REACH_SECONDS
    while any(left.values()) and (heard := requester.hear(deadline)) is not None:
        node, event = heard
        if isinstance(event, Reached) and event.address in left and node in reached:
            left[event.address] -= event.address not in reached[node]
            reached[node][event.address] = event.interface
            common = [address for address, _ in places if not left[address]]
            if common and common[0] == places[0][0]:
                break
            if common:
                deadline = min(deadline, requester.clock() + BETTER_SECONDS)
    common = [address for address, _ in places if not left[address]]
    if not common:
        raise _unreachable(requester, nodes, reached, [address for address, _ in places])
    address = common[0]
    (held,) = requester.ask({first: HoldPort(address, port)}, PortHeld, REACH_SECONDS)
    if held.port < 0:
        raise port_taken(port, requester.nodes.name(first), held.holder)
    return Master(address, held.port), {
        first: own.get(address, ""),
        **{node: reached[node][address] for node in others},
    }


def address_at(interface: str, facts: NodeFacts, master: Master) -> str:
    """A node's own address at an interface, of the same family as the rendezvous; "" if it has none."""
    of_interface = [address for address, name, *_ in facts.addresses if name == interface]
    if master.address in of_interface:  # the node that holds it
        return master.address
    family = linux.address_family(master.address)
    return next((address for address in of_interface if linux.address_family(address) == family), "")


def _number(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise UsageError(f"--master-addr {name}: no such host; give an address of the first host") from None


def _unreachable(
    requester: Requester, nodes: Sequence[int], reached: Mapping[int, Mapping[str, str]], addresses: Sequence[str]
) -> Unreachable:
    """The nodes that reach no address of the first one; if each reaches one, but no common one, which one each does."""
    first = requester.nodes.name(nodes[0])
    cut_off = [node for node, by in reached.items() if not by] or list(reached)
    if len(cut_off) > 1 and not any(reached.values()):
        text = "none of the others reaches it"
        return Unreachable(failed_hosts({first: text}, len(nodes), f"it has {', '.join(addresses)}"), {nodes[0]: text})
    reasons = {node: f"reaches {first} at {', '.join(reached[node]) or 'none of its addresses'}" for node in cut_off}
    outward = [address for address in addresses if not linux.is_loopback(address)] or addresses
    remedy = f"{first} has the addresses {', '.join(outward)}; open one between the hosts"
    named = {requester.nodes.name(node): reason for node, reason in reasons.items()}
    return Unreachable(failed_hosts(named, len(nodes), remedy), reasons)
