"""Where the ranks of each world of a job run: on its role's own hosts, on its share of the job's, or here. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launchpad.errors import UsageError
from launchpad.job.hosts import Host, Nproc, slots_of
from launchpad.job.spec import RoleSpec
from launchpad.named import NamedTuple

# What to do where hosts have too few slots: those that the user has named, and those of a batch allocation.
MORE_SLOTS = "write HOST:N for more"
MORE_TASKS = 'ask for more tasks, or say where it runs: hosts = ["HOST:N"]'


class RoleNeeds(NamedTuple):
    """What a role needs."""

    name: str
    nproc: Nproc | None  # the ranks of each of its worlds; None: not given
    replicas: int
    hosts: tuple[Host, ...]  # its own; none: a share of the job's


class Placed(NamedTuple):
    """The ranks of a world on one host."""

    host: Host | None  # None: this machine, and the job names no hosts
    ranks: Nproc


class RoleNode(NamedTuple):
    """The ranks of a world on one host."""

    role: RoleSpec
    share: Placed
    cwd: str  # where its ranks run
    python: str = ""  # their interpreter; "": its agent's own


class _FreeSlots:
    """Slots that are given away in the order of their hosts."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._left = [int(count) for count in slots_of(hosts, None)]
        self.size = sum(self._left)

    @property
    def left(self) -> int:
        return sum(self._left)

    def take(self, ranks: int) -> list[Placed]:
        """The next so many slots, of which there are enough."""
        found = []
        for place, host in enumerate(self._hosts):
            count = min(ranks, self._left[place])
            if count:
                found.append(Placed(host, count))
            self._left[place] -= count
            ranks -= count
        return found


def even_slots(given: Sequence[int | None], ranks: int) -> list[int]:
    """How many ranks each node takes: as many as it was given; those that were given none share the rest evenly.

    The first ones of them take one more where that doesn't come out even.
    """
    open_ones = given.count(None)
    left = max(0, ranks - sum(filter(None, given)))
    share, more = divmod(left, open_ones) if open_ones else (0, 0)
    extra = iter([1] * more + [0] * open_ones)
    return [share + next(extra) if count is None else count for count in given]


def place_worlds(
    roles: Sequence[RoleNeeds], hosts: Sequence[Host], where: str, more: str = MORE_SLOTS
) -> list[list[Placed]]:
    """The shares of each world, role by role and replica by replica. Raises UsageError that names the role.

    `hosts`: the job's, whose slots go to the roles without hosts of their own, in order. `where` is for messages, and
    `more` says how they get more slots.
    """
    shared = _FreeSlots(hosts)
    found: list[list[Placed]] = []
    for role in roles:
        if not role.hosts and not hosts:
            found += [[Placed(None, role.nproc or 1)]] * role.replicas
            continue
        pool = _FreeSlots(role.hosts) if role.hosts else shared
        ranks = _ranks(role, pool, f"{where}.{role.name}")
        if ranks * role.replicas > pool.left:
            whose = "its hosts have" if role.hosts else "the job's hosts have"
            used = "" if pool.left == pool.size else f", of which {pool.left} are left for it"
            of = f"{role.replicas} times {ranks}" if role.replicas > 1 else str(ranks)
            raise UsageError(
                f"{where}.{role.name}: it needs {of} ranks, and {whose} {pool.size}{used}; "
                f"{MORE_SLOTS if role.hosts else more}"
            )
        found += [pool.take(ranks) for _ in range(role.replicas)]
    return found


def _ranks(role: RoleNeeds, pool: _FreeSlots, where: str) -> int:
    """How many ranks each of its worlds has."""
    if isinstance(role.nproc, str):
        raise UsageError(f"{where}, nproc: {role.nproc} has to be a number on hosts")
    if role.nproc is not None or not role.hosts:
        return role.nproc or 1
    if pool.size % role.replicas:
        raise UsageError(f"{where}: {role.replicas} replicas can't share the {pool.size} ranks of its hosts evenly")
    return pool.size // role.replicas
