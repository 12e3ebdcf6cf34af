"""Runs a job whose nodes were each started by a user or a scheduler: as its head, or as one of the others."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from launchpad import linux, listeners
from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.errors import LaunchpadError, NodeError, UsageError
from launchpad.head import own_signals
from launchpad.head.bringup import BringUp
from launchpad.head.planner import NodeNames, Planner
from launchpad.job.hosts import some_of
from launchpad.job.membership import Membership
from launchpad.job.offer import NodeOffer
from launchpad.job.outcome import signal_name
from launchpad.job.plan import Member
from launchpad.job.spec import JobSpec
from launchpad.job.world import C10D_PORT, Meeting, WorldSpec, join_seconds, parse_conf, parse_endpoint
from launchpad.runner.allocation_end import allocation_end
from launchpad.runner.joining import LEFT, Joining, is_guessable, job_secret, leads, name_here, order_here
from launchpad.runner.links import LocalAgent
from launchpad.runner.nodes import bring_up
from launchpad.runner.options import NodeOptions, RunOptions
from launchpad.runner.own_agent import OwnAgent
from launchpad.runner.own_door import Following, OwnDoor, Takeover
from launchpad.runner.relay import Relay
from launchpad.runner.spec import make_spec, supplies_for
from launchpad.runner.stoppable import stoppable, told
from launchpad.runner.supervise import Taker, supervise
from launchpad.transport import Link
from launchpad.transport.join.client import LedElsewhere

# How long a node that can't take part looks for the head to say so.
FAILED_SECONDS = 5.0

# After so many failures in a row to bring up the nodes of a job that has lost its head, a launcher gives up.
MOST_FAILURES = 5


def run_joined(
    options: RunOptions, world: WorldSpec, local: LocalAgent, closing: ExitStack, taker: Taker | None
) -> int:
    """This node's part of the job. Returns the job's exit code; raises LaunchpadError if it can't start."""
    assert world.meeting is not None
    meeting = world.meeting
    began = time.time()
    secret = job_secret(options.nodes, os.environ)
    reports = options.reports
    say: Callable[[str], None] = say_nothing if reports.quiet else say_on_stderr
    try:
        spec = make_spec(options, (), world)
    except UsageError as error:
        _tell_head(meeting, secret, str(error))
        raise
    with stoppable(say):
        head = leads(meeting, say)
    offer = make_offer(meeting, spec)
    door = OwnDoor(secret, offer.key, meeting.others) if not meeting.static else None
    relay = Relay(meeting, secret, offer, spec, quiet=reports.quiet, fold=reports.fold, door=door)
    member = functools.partial(_member, spec=spec, options=options)
    # The nodes may share a folder, with what the first head has reported there.
    later = options._replace(reports=reports._replace(add_to_reports=began))
    joining = open_door(options.nodes, meeting, spec, secret, say, member) if head else None
    part: int | Takeover | Following
    if joining is not None:
        part = _lead(options, spec, joining, local, closing, taker)
    else:
        say_without_effect(options, say, may_lead=True)
        part = relay.run(local, options.signals_to_handle)
    return _go_on(part, later, spec, secret, relay, local, closing, taker)


def open_door(
    nodes: NodeOptions,
    meeting: Meeting,
    spec: JobSpec | None,
    secret: bytes,
    say: Callable[[str], None],
    member: Callable[[NodeOffer], Member] | None,
) -> Joining | None:
    """Listen for the job's nodes. None if another launchpad on this machine does. Raises UsageError."""
    try:
        joining = Joining(meeting, spec, secret, say, member)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not meeting.is_head:
            return None
        holder = listeners.holder(meeting.port) if error.errno == errno.EADDRINUSE else ""
        why = f"{error.strerror}: {holder}" if holder else error.strerror
        raise UsageError(
            f"the nodes of this job meet at {meeting.place}, and launchpad can't listen there "
            f"({why}); give a free port, and an address of the node that leads the job"
        ) from None
    if not meeting.static and meeting.node_rank:
        say(f"--node-rank {meeting.node_rank}: the node of --rdzv-endpoint, this one, has node rank 0 (c10d)")
    if is_guessable(nodes, os.environ) and not linux.is_loopback(joining.address):
        say(
            f"whoever can connect to {meeting.place} can join this job; give --rdzv-id or --rdzv-secret-file, "
            "the same on every node"
        )
    return joining


def say_without_effect(options: RunOptions, say: Callable[[str], None], *, may_lead: bool) -> None:
    """Say which options concern only the node that leads the job. `may_lead`: this one may come to do so."""
    unless = ", unless it comes to lead the job" if may_lead else ""
    for option, value in (
        ("--junit", options.reports.junit),
        ("--report", options.reports.report),
        ("--events", options.reports.events),
        ("--notify", options.reports.notify),
    ):
        if value is not None:
            say(f"{option} has no effect on this node{unless}")
    for option, given in (("--inject", options.inject), ("--health", options.health)):
        if given:
            say(f"{option} has no effect on this node; give it to the first one")


def _go_on(
    part: int | Takeover | Following,
    options: RunOptions,
    spec: JobSpec,
    secret: bytes,
    relay: Relay,
    local: LocalAgent,
    closing: ExitStack,
    taker: Taker | None,
) -> int:
    """Lead and follow by turns, until the job has ended. Returns its exit code."""
    closing.callback(relay.close)
    failures = 0
    while not isinstance(part, int):
        if isinstance(part, Following):
            failures = failures + 1 if part.failed else 0
            if failures == MOST_FAILURES:
                raise NodeError(f"this node can't lead the job: {part.failed}")
            part = relay.follow(part, local, options.signals_to_handle)
            continue
        assert spec.world.meeting is not None
        member = functools.partial(_member, spec=spec, options=options)
        joining = Joining(spec.world.meeting, spec, secret, relay.say, member, part)
        if not options.reports.quiet:
            relay.say(f"leading the job from here, with {some_of([offer.name for _, offer in joining.nodes])}")
        part = _lead(options, spec, joining, local, closing, taker, part.agent)
    return part


def offer_machine(endpoint: str, slots: Any, nodes: NodeOptions, local: LocalAgent, *, quiet: bool) -> int:
    """Offer this machine to the job that is led from `endpoint`. Returns its exit code; raises LaunchpadError.

    `endpoint`: HOST[:PORT], or several of the same machine, separated by commas.
    """
    (host, port), *others = (parse_endpoint(part, "launchpad join") for part in endpoint.split(","))
    seconds = join_seconds(parse_conf(nodes.rdzv_conf))
    elsewhere = tuple((host, port or C10D_PORT) for host, port in others)
    meeting = Meeting(host, port or C10D_PORT, 0, join_seconds=seconds, elsewhere=elsewhere)
    offer = make_offer(meeting, None)._replace(slots=slots)
    return follow_only(meeting, job_secret(nodes, os.environ), offer, local, frozenset(), quiet=quiet)


def follow_only(
    meeting: Meeting, secret: bytes, offer: NodeOffer, local: LocalAgent, signals: frozenset[int], *, quiet: bool
) -> int:
    """Have ranks run here as the head says, which shows their output. Returns the job's exit code."""
    part = Relay(meeting, secret, offer, None, quiet=quiet).run(local, signals)
    assert isinstance(part, int)  # a machine that is only offered has no door
    return part


def make_offer(meeting: Meeting, spec: JobSpec | None, failed: str = "") -> NodeOffer:
    """What this node offers."""
    order = order_here(os.environ) if meeting.node_rank is None else None
    size = meeting.size if meeting.nnodes else ""
    end = spec.limits.ends_at if spec is not None else allocation_end(os.environ)
    key = os.urandom(8).hex()
    name = name_here(os.environ)
    return NodeOffer(
        name, sys.executable, size, meeting.node_rank, order, spec=spec, failed=failed, ends_at=end, key=key
    )


def _tell_head(meeting: Meeting, secret: bytes, why: str) -> None:
    """Tell the head, if it is there and on another machine, that this node can't take part: it would wait for it."""
    short = meeting._replace(join_seconds=min(FAILED_SECONDS, meeting.join_seconds))
    with contextlib.suppress(LaunchpadError):
        if leads(short, say_nothing):
            return
        Relay(short, secret, make_offer(meeting, None, why), None, quiet=True).tell()


def _lead(
    options: RunOptions,
    spec: JobSpec,
    joining: Joining,
    local: LocalAgent,
    closing: ExitStack,
    taker: Taker | None,
    agent: OwnAgent | None = None,
) -> int | Following:
    """Lead the job to its end, or until another launcher does. `agent`: of this machine, if it has served a head."""
    took_over = joining.lead is not None
    leaves = closing.enter_context(ExitStack())
    leaves.callback(joining.leave)
    try:
        bringup, planner = _start(options, spec, joining, local, agent, closing, took_over=took_over)

        def reopen(node: int) -> Link | None:
            return None if node else local.reopen()  # the others come by themselves

        code = supervise(bringup, planner, joining.tell, reopen, options.reports, taker, joining)
        signum = own_signals.asked_to_stop()
        if signum and joining.goes_on(code):  # whatever else has ended our part
            code = 128 + signum
        following = joining.follow(leave=code in LEFT)
    except LedElsewhere:
        following = joining.follow()
    except LaunchpadError as error:
        if joining.lead and isinstance(error, NodeError):  # those that were to be led can't be any more
            local.link().close()
            following = joining.give_up(str(error))
        else:
            joining.tell([f"error: {line}" for line in str(error).splitlines()], error.exit_code)
            raise
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
        if not joining.lead or code == 128 + signal.SIGINT:  # the others go on without a head that leaves
            joining.tell(["the job was stopped before its ranks were started"], code)
        raise
    if following is None:
        return code
    leaves.pop_all()  # the door stays open
    return following


def _start(
    options: RunOptions,
    spec: JobSpec,
    joining: Joining,
    local: LocalAgent,
    agent: OwnAgent | None,
    closing: ExitStack,
    *,
    took_over: bool,
) -> tuple[BringUp, Planner]:
    """Wait for the nodes, unless they are here, and bring them up. Raises LedElsewhere, LaunchpadError."""
    supplies = supplies_for(options.hosts, spec, closing)  # for the machines that are only offered
    bringup = BringUp()
    say: Callable[[str], None] = say_nothing if options.reports.quiet else say_on_stderr
    if signum := own_signals.asked_to_stop():  # between two parts
        say(f"stopped by {signal_name(signum)}")
        raise own_signals.Stopped(signum)
    with stoppable(say):
        arrived = joining.nodes if took_over else joining.wait()
        own_signals.catch(bringup.post, options.signals_to_handle)
    if spec.world.master_port:  # static's nodes meet at the port of torch's store
        joining.stop_listening()
    meeting = spec.world.meeting
    assert meeting is not None
    own = agent or OwnAgent(local.reopen() if took_over else local.link())
    if not meeting.static:
        own.serve(options.hosts.heartbeat_timeout)
    link: Link = own
    link.name = socket.gethostname()
    names = NodeNames([link.name])
    links: list[Link] = [link, *(joined for joined, _ in arrived)]
    members = [Member(link.name, spec.nproc, "" if spec.python == sys.executable else spec.python)]
    for joined, offer in arrived:
        joined.name = names.take(offer.name)
        members.append(_member(offer, spec, options)._replace(name=joined.name))
    changes = len(links) > meeting.nnodes or meeting.least < meeting.nnodes or not meeting.static
    membership = Membership(
        meeting.least, meeting.nnodes, changes=changes, returns=not meeting.static, waits=meeting.waits
    )
    if joining.lead and not took_over:
        say(f"going on with the job of {some_of([joined.name for joined, _ in arrived])}, whose head was lost")
    with told(say):
        planner = bring_up(
            *(bringup, spec, members, links, supplies, options.hosts, membership, joining.first_roster()),
            quiet=options.reports.quiet,
        )
    planner.before = joining.rosters[-1] if joining.lead else None
    return bringup, planner


def _member(offer: NodeOffer, spec: JobSpec, options: RunOptions) -> Member:
    if offer.spec is None:  # it offers a machine, and the head says what runs there
        python = "" if options.python is None else spec.python
        return Member(offer.name, offer.slots or spec.nproc, python, ends_at=offer.ends_at)
    python = "" if offer.spec.python == offer.python else offer.spec.python
    return Member(offer.name, offer.spec.nproc, python, offer.spec, offer.ends_at)
