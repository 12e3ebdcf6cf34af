"""A plan for a dry run: with what is found out only there, the health of the hosts and the MPI that the ranks use."""

from __future__ import annotations

import os

from launchpad import mpi_library
from launchpad.head.planner import Planner
from launchpad.job.plan import NodePlan, Plan


def explained(planner: Planner) -> Plan:
    """The planner's plan, with the hosts' health and the MPI of each world."""
    plan = planner.plan
    if planner.spec.health is not None:
        left_out = {node: why.short for node, why in planner.take_left_out().items()}
        plan = plan._replace(health=planner.spec.health.text, left_out=left_out)
    roles: dict[str, list[str]] = {}
    for role, nodes in plan.mpi_worlds.items():
        roles.setdefault(_why(nodes), []).append(role)
    whys = [f"{', '.join(names)}: {why}" if plan.roles else why for why, names in roles.items()]
    return plan._replace(mpi_why="; ".join(whys))


def _why(nodes: list[NodePlan]) -> str:
    """Which MPI the ranks of a world will use, and why, as far as this machine shows it."""
    node = nodes[0]
    if node.mpi_library:
        return f"{mpi_library.NAMES[node.mpi_library]}: --mpi {node.mpi_library}"
    if len(nodes) > 1 or node.interface:
        return "each node finds out which one its ranks use"
    library, _, why = mpi_library.which(node.argv, {**os.environ, **node.environ}, node.cwd)
    return f"{mpi_library.NAMES[library]}: {why}" if library else f"not known: {why}"
