"""Plans a job of several worlds: each has nodes of its own, whose agents start, watch and sweep its ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launchpad.head.bringup import BringUp
from launchpad.head.machine import Judgement, Machine
from launchpad.head.planner import Planner, hold_ports
from launchpad.head.worlds import RoleWorld, Worlds
from launchpad.job.membership import Seat
from launchpad.job.plan import Master, NodePlacement, Plan, make_plan, rank_count
from launchpad.job.roles import join_plans
from launchpad.job.spec import JobSpec, RoleSpec
from launchpad.named import NamedTuple
from launchpad.protocol.events import AgentReady


class WorldNodes(NamedTuple):
    """Where a world runs."""

    nodes: Sequence[int]  # by their numbers in the job, which follow one another
    places: Sequence[NodePlacement] = ()  # on hosts, one each
    master: Master | None = None  # likewise


class RolePlanner(Planner):
    """A Planner for the worlds of its spec's roles."""

    def __init__(
        self,
        spec: JobSpec,
        run_id: str,
        ready: Sequence[AgentReady],
        worlds: Sequence[WorldNodes],
        ports: Mapping[str, Sequence[Sequence[int]]],
        silence: float = 0.0,
    ) -> None:
        """`worlds`: of each role. `ports`: as `hold_role_ports` returns them.

        Raises UsageError if a role can't have its ranks.
        """
        self._worlds = worlds
        self._role_ports = ports
        super().__init__(spec, run_id, ready, silence=silence)

    def _lay_out(self, seats: Sequence[Seat] | None) -> Plan:  # noqa: ARG002
        ready = [node.ready for node in self._nodes]
        plans = [
            make_plan(role.spec, [ready[node] for node in world.nodes], self._run_id, world.places, world.master)
            for role, world in zip(self.spec.roles, self._worlds, strict=True)
        ]
        nodes = [node for plan in plans for node in plan.nodes]
        cores = {node.name: one.cores for node, one in zip(nodes, ready, strict=True)}
        return join_plans(self.spec.roles, plans, self._role_ports, cores)

    def ruled(self, machine: Machine, judge: Callable[..., Judgement], now: float) -> Worlds:
        """The state machine above those of the worlds."""
        seats = {seat.node: seat for seat in self.plan.seats}
        worlds = [
            RoleWorld(role.name, ranks, tuple(seats[node] for node in of.nodes), role.spec.limits, role.service)
            for of, role, (_, ranks) in zip(self._worlds, self.spec.roles, self.plan.roles, strict=True)
        ]
        return Worlds(machine, worlds, judge, now)


def hold_role_ports(
    bringup: BringUp, roles: Sequence[RoleSpec], ready: Sequence[AgentReady], worlds: Sequence[WorldNodes]
) -> dict[str, list[list[int]]]:
    """Have the worlds' nodes hold their ports: of each world, those of each rank. Raises NodeError, UsageError."""
    sizes = [0] * len(ready)
    for role, world in zip(roles, worlds, strict=True):
        for place, node in enumerate(world.nodes):
            nproc = world.places[place].nproc if world.places else role.spec.nproc
            sizes[node] = rank_count(nproc, ready[node], role.name)
    counts = [0] * len(ready)
    for role, world in zip(roles, worlds, strict=True):
        for node in world.nodes:
            counts[node] = sizes[node] * len(role.ports)
    held = hold_ports(bringup, counts) if any(counts) else [[] for _ in ready]
    return {
        role.name: [
            list(held[node][rank * len(role.ports) : (rank + 1) * len(role.ports)])
            for node in world.nodes
            for rank in range(sizes[node])
        ]
        for role, world in zip(roles, worlds, strict=True)
    }
