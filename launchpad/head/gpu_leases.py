"""Leases the GPUs that a job asks for (--gpus) on its nodes, before its ranks are planned."""

from __future__ import annotations

from collections.abc import Sequence

from launchpad.errors import NodeError, failed_hosts
from launchpad.head.requester import Requester
from launchpad.job.gpus import parse_gpus
from launchpad.job.spec import JobSpec
from launchpad.protocol.commands import LeaseGpus
from launchpad.protocol.events import AgentReady, GpusLeased

# nvidia-smi may take half of it.
_SECONDS = 60.0


def with_leases(
    requester: Requester, ready: Sequence[AgentReady], specs: Sequence[JobSpec], job: str
) -> list[AgentReady]:
    """The facts of the nodes, with the leased GPUs as those that their ranks see. Raises NodeError if one has too few.

    `specs`: of each node's ranks; `job`: what other users see of the job.
    """
    found = list(ready)
    wanted = {}
    for node, spec in enumerate(specs):
        if spec.gpus:
            names, number, free = parse_gpus(spec.gpus)
            wanted[node] = LeaseGpus(list(names), number, free, job)
    problems = {}
    for node, leased in zip(wanted, requester.ask(wanted, GpusLeased, _SECONDS), strict=True):
        if leased.problem:
            problems[node] = f"--gpus {specs[node].gpus}: {leased.problem}"
        found[node] = found[node]._replace(gpus=len(leased.uuids), visible_devices=",".join(leased.uuids))
    if len(problems) > 1:
        why = {requester.nodes.name(node): problem for node, problem in problems.items()}
        count = len({requester.nodes.name(node) for node in range(len(ready))})  # with roles, several are one host
        raise NodeError(failed_hosts(why, count, "who has what: launchpad gpus -H HOST,…"))
    for node, problem in problems.items():
        raise NodeError(requester.of(node, problem))
    return found
