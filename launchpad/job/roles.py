"""Roles: several worlds in one job, each with its own ranks, store and addresses, laid out in one plan. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from launchpad.errors import UsageError
from launchpad.job.outcome import ranks_in_words
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.job.spec import Ready, RoleSpec

HOST = "127.0.0.1"

THREADS = "OMP_NUM_THREADS"


# What is wrong with any other name.
ROLE_NAMES = "a role's name has letters, digits, '-' and '_' only"


def is_role_name(name: str) -> bool:
    """Whether a role can be called so."""
    return re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None


def check_ports(names: Sequence[str], where: str) -> None:
    """Raise UsageError if ports can't be called so."""
    if wrong := next((one for one in names if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", one)), ""):
        raise UsageError(f"{where}: {wrong!r} is not a port's name; launchpad chooses the number")
    if len(set(names)) < len(names):
        raise UsageError(f"{where}: the same name twice; keep one")


def parse_ready(text: str, ports: Sequence[str], seconds: float, where: str) -> Ready:
    """`tcp:PORT`, `http:PORT/PATH`, `line:TEXT` or `command:COMMAND`. Raises UsageError."""
    check, colon, rest = text.partition(":")
    if check in ("tcp", "http") and colon:
        port, slash, path = rest.partition("/")
        port = port or (ports[0] if len(ports) == 1 else "")
        if port not in ports:
            known = f"one of its ports ({', '.join(ports)})" if ports else 'a port; add ports = ["http"]'
            raise UsageError(f"{where}: {text!r} needs {known}; write {check}:PORT{'/PATH' if check == 'http' else ''}")
        return Ready("tcp" if check == "tcp" else "http", port, slash + path, seconds)
    if check in ("line", "command") and rest.strip():
        return Ready("line" if check == "line" else "command", text=rest, seconds=seconds)
    raise UsageError(f"{where}: {text!r} says nothing; write tcp:PORT, http:PORT/PATH, line:TEXT or command:COMMAND")


def check_roles(roles: Sequence[RoleSpec], where: str) -> None:
    """Raise UsageError if a role can never start, or the job never end."""
    names = [role.name for role in roles]
    for role in roles:
        for other in role.after:
            if other not in names:
                raise UsageError(f"{where}.{role.name}, after: there is no role {other!r}, only {', '.join(names)}")
    left = {role.name: set(role.after) for role in roles}
    while free := [name for name, waits in left.items() if not waits & left.keys()]:
        for name in free:
            del left[name]
    if left:
        circle = " → ".join(_circle(left))
        raise UsageError(f"{where}: these roles wait for each other: {circle}; leave out one after")
    if all(role.service for role in roles):
        raise UsageError(f"{where}: all roles are services, so the job would never end; say which one is the work")


def replicas_of(roles: Sequence[RoleSpec]) -> list[RoleSpec]:
    """The worlds of these roles: each replica is one. Who comes after a role waits for all of its replicas."""
    names = {role.name: [_world(role, replica) for replica in range(role.replicas)] for role in roles}
    return [
        role._replace(name=name, replica=replica, after=tuple(one for other in role.after for one in names[other]))
        for role in roles
        for replica, name in enumerate(names[role.name])
    ]


def _world(role: RoleSpec, replica: int) -> str:
    return role.name if role.replicas == 1 else f"{role.name}.{replica}"


def _circle(waits: Mapping[str, set[str]]) -> list[str]:
    """A walk through the roles that ends where it has been."""
    walk = [min(waits)]
    while walk.count(walk[-1]) < 2:
        walk.append(min(waits[walk[-1]] & waits.keys()))
    return walk[walk.index(walk[-1]) :]


def join_plans(
    roles: Sequence[RoleSpec],
    plans: Sequence[Plan],
    ports: Mapping[str, Sequence[Sequence[int]]],
    cores: Mapping[str, int],
) -> Plan:
    """One plan of the worlds' own: nodes and ranks are numbered through; what a rank is told stays its world's.

    `ports`: of each world, those of each rank, in the order of its port names. `cores`: of each host, which the ranks
    of all worlds there share. On this machine alone, a world's node has its name.
    """
    sharing = Counter[str]()
    for node in (node for plan in plans for node in plan.nodes):
        sharing[node.name] += len(node.ranks)
    alone = len(cores) == 1 and not any(node.address for plan in plans for node in plan.nodes)
    addresses = _addresses(roles, plans, ports)
    nodes: list[NodePlan] = []
    names = []
    first = 0
    for role, plan in zip(roles, plans, strict=True):
        for node in plan.nodes:
            ranks = tuple(
                _placed(rank, first, {**addresses, **_own(role, ports[role.name], rank.rank)}) for rank in node.ranks
            )
            threads = str(max(1, cores[node.name] // sharing[node.name]))
            defaults = {name: threads if name == THREADS else value for name, value in node.defaults.items()}
            name, beside = role.name if alone else node.name, sharing[node.name] - len(node.ranks)
            node = node._replace(index=len(nodes), name=name, ranks=ranks, defaults=defaults, beside=beside)
            nodes.append(node)
        names.append((role.name, list(range(first, first + len(plan.ranks)))))
        first += len(plan.ranks)
    return plans[0]._replace(nodes=tuple(nodes), roles=tuple(names))


def _placed(rank: RankPlan, first: int, more: Mapping[str, str]) -> RankPlan:
    return rank._replace(rank=first + rank.rank, environ={**rank.environ, **more})


def host_port(address: str, port: int) -> str:
    """As URLs have it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def variable_of(text: str) -> str:
    """The name of a role or port, as a part of a variable's."""
    return "".join(letter if letter.isalnum() else "_" for letter in text).upper()


def address_of(plan: Plan, rank: int) -> str:
    """Where others find the ports of a rank."""
    return plan.node_of(rank).address or HOST


def _addresses(
    roles: Sequence[RoleSpec], plans: Sequence[Plan], ports: Mapping[str, Sequence[Sequence[int]]]
) -> dict[str, str]:
    """Where all find the ports of a role: LAUNCHPAD_ROLLOUT_HTTP=HOST:PORT, one of each rank of each replica."""
    found: dict[str, list[str]] = {}
    for role, plan in zip(roles, plans, strict=True):
        for place, port in enumerate(role.ports):
            listed = found.setdefault(f"LAUNCHPAD_{variable_of(role.role)}_{variable_of(port)}", [])
            listed += [host_port(address_of(plan, rank), of[place]) for rank, of in enumerate(ports[role.name])]
    return {name: ",".join(listed) for name, listed in found.items()}


def _own(role: RoleSpec, ports: Sequence[Sequence[int]], rank: int) -> dict[str, str]:
    """What only its own ranks are told."""
    held = {f"LAUNCHPAD_PORT_{variable_of(port)}": str(ports[rank][place]) for place, port in enumerate(role.ports)}
    replica = {
        "LAUNCHPAD_REPLICA": str(role.replica),
        "REPLICA_GROUP_ID": str(role.replica),
        "NUM_REPLICA_GROUPS": str(role.replicas),
    }
    return {"ROLE_NAME": role.role, "LAUNCHPAD_ROLE": role.role, **replica, **held}


class RoleNames:
    """How ranks are called where roles have their own numbers: train rank 1."""

    def __init__(self, roles: Sequence[tuple[str, Sequence[int]]]) -> None:
        """`roles`: each one's name, and its ranks in the job's numbering."""
        self.of = {rank: (name, own) for name, ranks in roles for own, rank in enumerate(ranks)}

    def join(self, by: int, ranks: Sequence[int]) -> None:
        """A rank has spawned these: they are of its role, and keep their numbers in the job."""
        name, _ = self.of.get(by, ("", by))
        self.of.update((rank, (name, rank)) for rank in ranks)

    def one(self, rank: int) -> str:
        """A rank in words."""
        name, own = self.of.get(rank, ("", rank))
        return f"{name} rank {own}".strip()

    def several(self, ranks: Sequence[int]) -> str:
        """Ranks in words: `rollout rank 0, train ranks 0-1`."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            name, own = self.of.get(rank, ("", rank))
            found.setdefault(name, []).append(own)
        return ", ".join(f"{name} {ranks_in_words(own)}".strip() for name, own in found.items())
