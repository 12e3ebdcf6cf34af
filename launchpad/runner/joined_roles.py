"""The nodes of a job with roles that were each started by a user or a scheduler, and the agents of its worlds there."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.errors import LaunchpadError, NodeError, UsageError
from launchpad.head.planner import NodeNames
from launchpad.job.hosts import Host
from launchpad.job.offer import NodeOffer
from launchpad.job.role_places import even_slots
from launchpad.protocol.commands import JobEnded, JoinMore
from launchpad.runner.joined import follow_only, make_offer, open_door, say_without_effect
from launchpad.runner.joining import FULL, Joining, job_secret, leads, name_here
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import RunOptions
from launchpad.runner.spec import make_world_spec
from launchpad.runner.stoppable import stoppable
from launchpad.transport.join.client import LedElsewhere
from launchpad.transport.join.server import JoinedLink

# How long the agents of a node's other worlds may take to be there.
MORE_SECONDS = 60.0


def meet(job: RunOptions, local: LocalAgent, closing: ExitStack) -> JoinedMachines | int:
    """Wait for the job's nodes; or if this node doesn't lead the job, take part. Then it returns the job's exit code.

    Raises UsageError, NodeError.
    """
    _check(job)
    meeting = make_world_spec(job, ()).meeting
    assert meeting is not None
    say: Callable[[str], None] = say_nothing if job.reports.quiet else say_on_stderr
    secret = job_secret(job.nodes, os.environ)
    with stoppable(say):
        joining = open_door(job.nodes, meeting, None, secret, say, None) if leads(meeting, say) else None
        if joining is not None:
            return closing.enter_context(JoinedMachines(joining, meeting.nnodes, say))
    say_without_effect(job, say, may_lead=False)
    offer = make_offer(meeting, None)._replace(roles=True)
    return follow_only(meeting, secret, offer, local, job.signals_to_handle, quiet=job.reports.quiet)


def _check(job: RunOptions) -> None:
    """Raise UsageError for what nodes that join can't be given."""
    hosts, nnodes = job.hosts, job.nodes.nnodes
    if ":" in nnodes:
        raise UsageError(f"--nnodes {nnodes}: with roles, the number of nodes doesn't vary; write --nnodes N")
    wrong = {
        "--hosts": hosts.hosts is not None,
        "--hostfile": hosts.hostfile is not None,
        "--include": bool(hosts.include),
        "--exclude": bool(hosts.exclude),
        "--enter": bool(hosts.enter),
        "--keep-running": bool(hosts.keep_running),
    }
    if named := next((option for option, is_given in wrong.items() if is_given), ""):
        raise UsageError(f"--nnodes {nnodes} is for nodes that join, and {named} for hosts; leave one of them out")


class JoinedMachines:
    """This machine and those that have joined. As a context manager: at the end they are told how it ended, and left.

    Each is asked for an agent for each world on it.
    """

    def __init__(self, joining: Joining, nnodes: int, say: Callable[[str], None]) -> None:
        """`joining`: nobody has joined yet."""
        self._joining = joining
        self._nnodes = nnodes
        self._say = say
        self._changed = threading.Condition()
        self._offers: dict[str, NodeOffer] = {}  # of the others, by the name that they have in the job
        self._links: dict[str, list[JoinedLink]] = {}  # likewise: the machine's own, then those of its other worlds
        self._wanted: Counter[str] = Counter()  # how many links each of them is to have
        self._failed = ""  # why a node can't take part
        self._told = False

    def hosts(self, ranks: int) -> tuple[Host, ...]:
        """Wait for the nodes. They share so many ranks evenly, but for those that say how many they take.

        Raises NodeError.
        """
        try:
            with stoppable(self._say):
                arrived = self._joining.wait()
        except LedElsewhere as error:
            raise NodeError(f"{error}: it is another one, without roles; give this one another --rdzv-id") from None
        here = name_here()
        names = NodeNames([here])
        for link, offer in arrived:
            name = names.take(offer.name)
            self._offers[name], self._links[name] = offer, [link]
        self._joining.replace(self)
        first, *others = even_slots([None, *(_slots(name, offer) for name, offer in self._offers.items())], ranks)
        joined = [Host(name, slots=count) for name, count in zip(self._offers, others, strict=True)]
        return (Host(here, slots=first, here=True), *joined)

    # In the server's thread, once all nodes are there.

    def state(self) -> dict[str, Any]:
        """Nothing: nodes with roles follow no other head."""
        return {}

    def told(self, place: tuple[str, int], term: int) -> None:
        """Likewise."""

    def admit(self, link: JoinedLink, offered: dict[str, Any]) -> dict[str, Any]:
        """Judge an offer, which should be one of a node's further ones."""
        offer = NodeOffer.from_json(offered)
        with self._changed:
            name = next((name for name, one in self._offers.items() if offer.beside == one.key), "")
            if not name or len(self._links[name]) >= self._wanted[name]:
                return {"error": FULL.format(self._nnodes)}
            if offer.failed:
                self._failed = f"{name}: {offer.failed}"
                self._changed.notify_all()
                return {"error": "the head has been told"}
            self._links[name].append(link)
        return {"welcome": []}

    def joined(self, link: JoinedLink) -> None:  # noqa: ARG002
        """An admitted node knows that it is."""
        with self._changed:
            self._changed.notify_all()

    def refused(self, address: str, reason: str) -> None:
        """Tell the user."""
        self._joining.refused(address, reason)

    # In the head's own thread.

    def links(self, names: Sequence[str]) -> list[JoinedLink]:
        """A link to a node's agent for each of these names, which may come several times. Raises NodeError."""
        with self._changed:
            self._wanted = Counter(names)
        for name, links in self._links.items():
            if self._wanted[name] > 1:
                links[0].send(JoinMore(self._wanted[name] - 1))
            elif not self._wanted[name]:
                self._say(f"no ranks run on {name}: the other nodes have slots for all of them")
        deadline = time.monotonic() + MORE_SECONDS
        with self._changed:
            while waits := [name for name in self._wanted if not self._are_here(name)]:
                name, left = waits[0], deadline - time.monotonic()
                if self._failed:
                    raise NodeError(self._failed)
                if any(link.gone.is_set() for link in self._links[name]):
                    raise NodeError(f"{name} was lost before the ranks were started")
                if left <= 0:
                    raise NodeError(f"{name}: the agents of its worlds are not there after {MORE_SECONDS:g} s")
                self._changed.wait(min(1.0, left))  # at most, to notice a node that has left
        pools = {name: iter(links) for name, links in self._links.items()}
        return [next(pools[name]) for name in names]

    def _are_here(self, name: str) -> bool:
        links = self._links[name]
        return len(links) == self._wanted[name] and all(link.ready and not link.gone.is_set() for link in links)

    def tell(self, lines: list[str], code: int) -> None:
        """Tell the nodes how the job ended."""
        self._told = True
        for links in self._links.values():
            for link in links[1:]:
                link.send(JobEnded(code, []))
        self._joining.tell(lines, code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._told:
            self.tell(*_end(error))
        with self._changed:
            more = [link for links in self._links.values() for link in links[1:]]
        for link in more:
            link.close()
        self._joining.leave()


def _slots(name: str, offer: NodeOffer) -> int | None:
    if isinstance(offer.slots, str):
        raise NodeError(f"{name}: --slots {offer.slots}: in a job with roles, give a number")
    return offer.slots


def _end(error: BaseException | None) -> tuple[list[str], int]:
    """What to tell the nodes of a job that has not begun."""
    match error:
        case LaunchpadError():
            return [f"error: {line}" for line in str(error).splitlines()], error.exit_code
        case SystemExit(code=int(code)):
            return ["the job was stopped before its ranks were started"], code
    return ["the head of the job ended without saying why"], 1
