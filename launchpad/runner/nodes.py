"""Brings up the job's nodes: links to their agents, facts about them, and the rendezvous address."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launchpad.console.console import say_on_stderr
from launchpad.errors import NodeError
from launchpad.head.arrivals import Reopen
from launchpad.head.bringup import BringUp
from launchpad.head.cluster import Cluster, hold_ports, read_topologies
from launchpad.job.hosts import Nproc
from launchpad.job.membership import Membership
from launchpad.job.plan import Member, rank_count
from launchpad.job.spec import JobSpec
from launchpad.runner.options import HostOptions
from launchpad.transport import Link
from launchpad.transport.local import LocalLink

if TYPE_CHECKING:
    from launchpad.head.sync import SyncedFile
    from launchpad.image.keeper_link import KeeperLink
    from launchpad.job.hosts import Host


class LocalAgent:
    """The agent of the machine that the head runs on, started when its link is first needed."""

    def __init__(self, link: Link | None = None, keeper: KeeperLink | None = None, *, leaves: bool = False) -> None:
        """`link`: to an agent that was started ahead of time; `keeper`: of images to fork it from instead.

        `leaves`: the head is about to leave the terminal.
        """
        self._leaves = leaves
        self._link = link
        self.keeper = keeper
        self._before: list[Link] = []

    def link(self) -> Link:
        """The link to the agent. Raises NodeError if the agent can't be started."""
        if self._link is None:
            try:
                self._link = LocalLink(self.keeper, leaves=self._leaves)
            except (OSError, RuntimeError) as error:
                raise NodeError(f"this node's agent can't be started: {error}") from None
        return self._link

    def reopen(self) -> Link:
        """The link to a new agent, after the last one was lost. Raises NodeError likewise."""
        if self._link is not None:
            self._before.append(self._link)
            before, self._link = self._link, None
            self.link().name = before.name
        return self.link()

    def close(self) -> None:
        """Close the links, if there are any."""
        for link in (self._link, *self._before):
            if link is not None:
                link.close()
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    @property
    def started(self) -> bool:
        """Whether there is an agent already."""
        return self._link is not None

    @property
    def why_cold(self) -> str:
        """Why the agent was not forked from a kept image, though there is one."""
        return getattr(self._link, "why_cold", "")


def open_links(
    hosts: Sequence[Host],
    local: LocalAgent,
    closing: ExitStack,
    options: HostOptions,
    python: str,
    *,
    exact: bool,
    quiet: bool,
    asked: Sequence[str] = (),
    dialling: Callable[[Callable[[], None]], None] = lambda _: None,
) -> tuple[list[Link], Reopen]:
    """The links to the hosts' agents (without hosts: to this machine's), and a function that reopens one of them.

    `python` is looked up on each host, with python3 as the fallback unless `exact`. `asked`: of each host's Startup.
    `dialling` is called with a function that aborts the connections in progress.
    """
    if not hosts:
        return [local.link()], lambda _: local.reopen()
    from launchpad.runner.connect import connect_all

    if options.enter or not any(host.here for host in hosts):
        local.close()

    def at_end(abandon: Callable[[], None]) -> None:
        closing.callback(abandon)
        dialling(abandon)

    links, connect_again = connect_all(
        hosts, local.link, at_end, options, python, exact=exact, quiet=quiet, asked=asked
    )

    def reopen(node: int) -> Link:
        if not links[node].remote:
            return local.reopen()
        link = connect_again(node)
        closing.callback(link.close)
        return link

    for link in links:
        if link.remote:  # `local` closes the other one
            closing.callback(link.close)
    return links, reopen


def files_to_sync(options: HostOptions, spec: JobSpec) -> Sequence[SyncedFile]:
    """The files of the working folder, with --sync. Raises UsageError if they can't be copied."""
    if not options.sync:
        return ()
    from launchpad.head.sync import list_files

    return list_files(spec.cwd, spec.log_dir)


def members_of(
    hosts: Sequence[Host], links: Sequence[Link], spec: JobSpec, nproc: Nproc | None, *, by_srun: bool = False
) -> list[Member]:
    """The hosts as members. `nproc` is the value of --nproc. `by_srun`: launchpad itself was started on each."""
    if not hosts:
        return []
    from launchpad.job.hosts import slots_of

    # An agent that was sent there runs in the ranks' interpreter; others in launchpad's, which may differ.
    pythons = ["" if (link.remote and not by_srun) or spec.python == sys.executable else spec.python for link in links]
    counts = slots_of(hosts, nproc)
    return [Member(host.name, count, python) for host, count, python in zip(hosts, counts, pythons, strict=True)]


def bring_up(
    bringup: BringUp,
    spec: JobSpec,
    members: Sequence[Member],
    links: Sequence[Link],
    files: Sequence[SyncedFile],
    options: HostOptions,
    membership: Membership | None = None,
    *,
    quiet: bool,
) -> Cluster:
    """Greet the agents, send the `files` of --sync, choose the rendezvous of several nodes, lay out the ranks.

    Without `members` the only node is this machine. Raises NodeError, UsageError.
    """
    run_id = spec.world.run_id or os.urandom(4).hex()
    silence = options.heartbeat_timeout
    facts = bringup.connect(
        links,
        count_gpus=bool({"auto", "gpu"} & {spec.nproc, *(member.nproc for member in members)}),
        port=spec.world.master_port if len(links) == 1 else 0,
        silence=silence,
        accelerators=[(one.nproc, one.python) for one in members] or [(spec.nproc, spec.python)],
    )
    topologies = read_topologies(bringup, [member.own or spec for member in members] or [spec])
    for topology, ready in zip(topologies, facts, strict=True):
        if topology is not None and not topology.complete and not quiet:
            say_on_stderr(f"{ready.hostname} doesn't show which of its CPUs are one core; each counts as a core")
    ports: list[list[int]] = []
    if spec.tf_config:
        asked = [(member.nproc, member.name) for member in members] or [(spec.nproc, facts[0].hostname)]
        counts = [rank_count(nproc, node, name) for (nproc, name), node in zip(asked, facts, strict=True)]
        ports = hold_ports(bringup, counts)
    if not members:
        return Cluster(spec, run_id, facts, silence=silence, topologies=topologies, ports=ports)
    from launchpad.runner.connect import make_world

    apart = spec.world.meeting is None and not options.by_srun
    places, found, master = make_world(
        bringup, spec, members, links, files, sync=options.sync, apart=apart, quiet=quiet
    )
    return Cluster(
        spec,
        run_id,
        facts,
        places,
        found,
        master,
        ports=ports,
        membership=membership,
        files=files if options.sync else None,
        silence=silence,
        topologies=topologies,
    )
