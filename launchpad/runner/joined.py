"""Runs a job whose nodes were each started by a user or a scheduler: as its head, or as one of the others."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from launchpad import linux, listeners
from launchpad.console.message import say_on_stderr
from launchpad.errors import LaunchpadError, UsageError
from launchpad.head import own_signals
from launchpad.head.bringup import BringUp
from launchpad.head.planner import NodeNames
from launchpad.job.hosts import some_of
from launchpad.job.membership import Membership
from launchpad.job.offer import NodeOffer
from launchpad.job.plan import Member
from launchpad.job.spec import JobSpec
from launchpad.job.world import C10D_PORT, Meeting, WorldSpec, join_seconds, parse_conf, parse_endpoint
from launchpad.runner.allocation_end import allocation_end
from launchpad.runner.joining import Joining, is_guessable, job_secret, leads, order_here, roster_of
from launchpad.runner.links import LocalAgent
from launchpad.runner.nodes import bring_up
from launchpad.runner.options import NodeOptions, RunOptions
from launchpad.runner.relay import Relay
from launchpad.runner.spec import make_spec, supplies_for
from launchpad.runner.stoppable import stoppable
from launchpad.runner.supervise import Taker, supervise
from launchpad.transport import Link

# How long a node that can't take part looks for the head to say so.
FAILED_SECONDS = 5.0


def run_joined(
    options: RunOptions, world: WorldSpec, local: LocalAgent, closing: ExitStack, taker: Taker | None
) -> int:
    """This node's part of the job. Returns the job's exit code; raises LaunchpadError if it can't start."""
    assert world.meeting is not None
    meeting = world.meeting
    secret = job_secret(options.nodes, os.environ)
    say: Callable[[str], None] = (lambda _: None) if options.reports.quiet else say_on_stderr
    try:
        spec = make_spec(options, (), world)
    except UsageError as error:
        _tell_head(meeting, secret, str(error))
        raise
    with stoppable(say):
        head = leads(meeting, say)
    if head:
        try:
            joining = Joining(meeting, spec, secret, say, functools.partial(_member, spec=spec, options=options))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or meeting.is_head:
                holder = listeners.holder(meeting.port) if error.errno == errno.EADDRINUSE else ""
                why = f"{error.strerror}: {holder}" if holder else error.strerror
                raise UsageError(
                    f"the nodes of this job meet at {meeting.place}, and launchpad can't listen there "
                    f"({why}); give a free port, and an address of the node that leads the job"
                ) from None
        else:
            if not meeting.static and meeting.node_rank:
                say(f"--node-rank {meeting.node_rank}: the node of --rdzv-endpoint, this one, has node rank 0 (c10d)")
            if is_guessable(options.nodes, os.environ) and not linux.is_loopback(joining.address):
                say(
                    f"whoever can connect to {meeting.place} can join this job; give --rdzv-id or --rdzv-secret-file, "
                    "the same on every node"
                )
            return _lead(options, spec, joining, local, closing, taker)
    for option, value in (
        ("--junit", options.reports.junit),
        ("--report", options.reports.report),
        ("--events", options.reports.events),
        ("--notify", options.reports.notify),
    ):
        if value is not None:
            say(f"{option} has no effect on this node, only on the first one")
    for option, given in (("--inject", options.inject), ("--health", options.health)):
        if given:
            say(f"{option} has no effect on this node; give it to the first one")
    reports = options.reports
    relay = Relay(meeting, secret, _offer(meeting, spec), spec, quiet=reports.quiet, fold=reports.fold)
    return relay.run(local, options.signals_to_handle)


def offer_machine(endpoint: str, slots: Any, nodes: NodeOptions, local: LocalAgent, *, quiet: bool) -> int:
    """Offer this machine to the job that is led from `endpoint`. Returns its exit code; raises LaunchpadError.

    `endpoint`: HOST[:PORT], or several of the same machine, separated by commas.
    """
    (host, port), *others = (parse_endpoint(part, "launchpad join") for part in endpoint.split(","))
    seconds = join_seconds(parse_conf(nodes.rdzv_conf))
    elsewhere = tuple((host, port or C10D_PORT) for host, port in others)
    meeting = Meeting(host, port or C10D_PORT, 0, join_seconds=seconds, elsewhere=elsewhere)
    secret = job_secret(nodes, os.environ)
    offer = dataclasses.replace(_offer(meeting, None), slots=slots)
    return Relay(meeting, secret, offer, None, quiet=quiet).run(local, frozenset())


def _offer(meeting: Meeting, spec: JobSpec | None, failed: str = "") -> NodeOffer:
    order = order_here(os.environ) if meeting.node_rank is None else None
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    size = meeting.size if meeting.nnodes else ""
    end = spec.limits.ends_at if spec is not None else allocation_end(os.environ)
    return NodeOffer(name, sys.executable, size, meeting.node_rank, order, spec=spec, failed=failed, ends_at=end)


def _tell_head(meeting: Meeting, secret: bytes, why: str) -> None:
    """Tell the head, if it is there and on another machine, that this node can't take part: it would wait for it."""
    short = meeting._replace(join_seconds=min(FAILED_SECONDS, meeting.join_seconds))
    with contextlib.suppress(LaunchpadError):
        if leads(short, lambda _: None):
            return
        Relay(short, secret, _offer(meeting, None, why), None, quiet=True).tell()


def _lead(
    options: RunOptions, spec: JobSpec, joining: Joining, local: LocalAgent, closing: ExitStack, taker: Taker | None
) -> int:
    closing.callback(joining.leave)
    try:
        supplies = supplies_for(options.hosts, spec, closing)  # for the machines that are only offered
        bringup = BringUp()
        say: Callable[[str], None] = (lambda _: None) if options.reports.quiet else say_on_stderr
        with stoppable(say):
            arrived = joining.wait()
            own_signals.catch(bringup.post, options.signals_to_handle)
        if spec.world.master_port:  # static's nodes meet at the port of torch's store
            joining.stop_listening()
        link = local.link()
        link.name = socket.gethostname()
        names = NodeNames([link.name])
        links: list[Link] = [link, *(joined for joined, _ in arrived)]
        members = [Member(link.name, spec.nproc, "" if spec.python == sys.executable else spec.python)]
        for joined, offer in arrived:
            joined.name = names.take(offer.name)
            members.append(_member(offer, spec, options)._replace(name=joined.name))
        meeting = spec.world.meeting
        assert meeting is not None
        changes = len(links) > meeting.nnodes or meeting.least < meeting.nnodes or not meeting.static
        membership = Membership(
            meeting.least, meeting.nnodes, changes=changes, returns=not meeting.static, waits=meeting.waits
        )
        if before := roster_of(arrived):
            say(f"going on with the job of {some_of([joined.name for joined, _ in arrived])}, whose head was lost")
        planner = bring_up(
            bringup, spec, members, links, supplies, options.hosts, membership, quiet=options.reports.quiet
        )
        planner.before = before

        def reopen(node: int) -> Link | None:
            return None if node else local.reopen()  # the others come by themselves

        return supervise(bringup, planner, joining.tell, reopen, options.reports, taker, joining)
    except LaunchpadError as error:
        joining.tell([f"error: {line}" for line in str(error).splitlines()], error.exit_code)
        raise
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
        joining.tell(["the job was stopped before its ranks were started"], code)
        raise


def _member(offer: NodeOffer, spec: JobSpec, options: RunOptions) -> Member:
    if offer.spec is None:  # it offers a machine, and the head says what runs there
        python = "" if options.python is None else spec.python
        return Member(offer.name, offer.slots or spec.nproc, python, ends_at=offer.ends_at)
    python = "" if offer.spec.python == offer.python else offer.spec.python
    return Member(offer.name, offer.spec.nproc, python, offer.spec, offer.ends_at)
