"""The parts of a running job, one a feature: a new one is its file, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from launchpad.head.arrivals import Arrivals, Door, Reopen
from launchpad.head.debuggers import RankDebuggers
from launchpad.head.hub import Hub
from launchpad.head.meetings import Meetings
from launchpad.head.part import Part
from launchpad.head.planner import Planner
from launchpad.head.profiles import Profiles
from launchpad.head.rank_input import RankInput
from launchpad.head.samples import Samples
from launchpad.head.session_calls import CallSender
from launchpad.head.stack_requests import StackRequests
from launchpad.head.stop_by import StopTimes
from launchpad.job.plan import Stdin

if TYPE_CHECKING:
    from launchpad.head.checkpoints import CheckpointStore


def parts_of(
    hub: Hub,
    planner: Planner,
    stdin: Stdin,
    *,
    reopen: Reopen | None,
    door: Door | None,
    advises: bool = False,
    keeper: CheckpointStore | None = None,
) -> list[Part]:
    """The parts of this job, in the order in which they have their turns. What few jobs need is loaded for them.

    The parameters are the supervisor's.
    """
    spec = planner.spec
    meetings, unwell = _meetings(hub, planner)
    arrivals = Arrivals(hub, planner, reopen, door, meetings.apart, unwell)
    worlds = [role.name for role in spec.roles if not role.service]
    parts = [
        StackRequests(hub, spec.limits.stall_timeout, worlds, advises=advises),
        Samples(hub, spec.sample, arrivals.names),
        Profiles(hub),
        RankDebuggers(hub, spec.debug[1] if spec.debug else 0),
        RankInput(hub, stdin),
        CallSender(hub),
        meetings,
        arrivals,
        StopTimes(hub, spec.limits),
    ]
    if door is not None and planner.membership is not None and planner.membership.returns:
        from launchpad.head.rosters import RosterKeeper

        parts.append(RosterKeeper(hub, planner, door))
    if spec.roles:
        from launchpad.head.roles import Roles

        parts.append(Roles(hub, spec.roles, {name: list(ranks) for name, ranks in planner.plan.roles}))
    if planner.plan.mpi_worlds:
        from launchpad.head.mpi_service import MpiService

        parts.append(MpiService(hub))
    if spec.faults is not None:
        from launchpad.head.injection import Injector

        parts.append(Injector(hub, spec.faults))
    if spec.limits.stop_at is not None:
        from launchpad.head.stop_before import StopBefore

        parts.append(StopBefore(hub, spec.limits.stop_at))
    if keeper is not None:
        from launchpad.head.checkpoints import Checkpoints

        parts.append(Checkpoints(hub, planner, stdin, keeper, list(parts)))
    return parts


def _meetings(hub: Hub, planner: Planner) -> tuple[Meetings, Mapping[int, str]]:
    """What has the nodes meet, and where it keeps why it has left some out."""
    if planner.spec.health is None:
        return Meetings(hub, planner), {}
    from launchpad.head.healthy_meetings import HealthyMeetings

    healthy = HealthyMeetings(hub, planner)
    return healthy, healthy.unwell
