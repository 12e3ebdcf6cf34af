"""Plans a job of several worlds: each has a node of its own, whose agent starts, watches and sweeps its ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launchpad.head.bringup import BringUp
from launchpad.head.machine import Judgement, Machine
from launchpad.head.planner import Planner, hold_ports
from launchpad.head.worlds import RoleWorld, Worlds
from launchpad.job.membership import Seat
from launchpad.job.plan import Plan, make_plan, rank_count
from launchpad.job.roles import join_plans
from launchpad.job.spec import JobSpec, Role
from launchpad.protocol.events import AgentReady


class RolePlanner(Planner):
    """A Planner for the roles of its spec, of which node i runs role i."""

    def __init__(
        self, spec: JobSpec, run_id: str, ready: Sequence[AgentReady], ports: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        """`ports`: as `hold_role_ports` returns them. Raises UsageError if a role can't have its ranks."""
        self._role_ports = ports
        super().__init__(spec, run_id, ready)

    def _lay_out(self, seats: Sequence[Seat] | None) -> Plan:  # noqa: ARG002
        plans = [
            make_plan(role.spec, [node.ready], self._run_id)
            for role, node in zip(self.spec.roles, self._nodes, strict=True)
        ]
        return join_plans(self.spec.roles, plans, self._role_ports, self._nodes[0].ready.cores)

    def ruled(self, machine: Machine, judge: Callable[..., Judgement], now: float) -> Worlds:
        """The state machine above those of the worlds."""
        seats = {seat.node: seat for seat in self.plan.seats}
        worlds = [
            RoleWorld(role.name, ranks, (seats[node],), role.spec.limits, role.service)
            for node, (role, (_, ranks)) in enumerate(zip(self.spec.roles, self.plan.roles, strict=True))
        ]
        return Worlds(machine, worlds, judge, now)


def hold_role_ports(bringup: BringUp, roles: Sequence[Role], ready: Sequence[AgentReady]) -> dict[str, list[list[int]]]:
    """Have the roles' nodes hold their ports: of each role, those of each rank. Raises NodeError, UsageError."""
    ranks = [rank_count(role.spec.nproc, node, role.name) for role, node in zip(roles, ready, strict=True)]
    counts = [size * len(role.ports) for size, role in zip(ranks, roles, strict=True)]
    held = hold_ports(bringup, counts) if any(counts) else [[] for _ in roles]
    return {
        role.name: [ports[rank * len(role.ports) : (rank + 1) * len(role.ports)] for rank in range(size)]
        for role, size, ports in zip(roles, ranks, held, strict=True)
    }
