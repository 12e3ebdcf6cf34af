"""Decides when each role of a job starts, and when its services end. Pure; it knows no time and no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launchpad.job.spec import RoleSpec


class Begin(NamedTuple):
    """Start the ranks of this role."""

    role: str


class Look(NamedTuple):
    """Find out when this role is ready."""

    role: str


class EndServices(NamedTuple):
    """All other roles have ended well: stop the ranks of these."""

    ranks: list[int]


class FailRole(NamedTuple):
    """The job has failed by this rank."""

    rank: int
    reason: str


Action = Begin | Look | EndServices | FailRole


class RoleOrder:
    """One attempt."""

    def __init__(self, roles: Sequence[RoleSpec], ranks: Mapping[str, Sequence[int]]) -> None:
        """`ranks`: of each role, in the job's numbering."""
        self._roles = {role.name: role for role in roles}
        self._ranks = ranks
        self._role_of = {rank: name for name, ones in ranks.items() for rank in ones}
        self._to_start = {name: set(ones) for name, ones in ranks.items()}
        self._running = {name: set(ones) for name, ones in ranks.items()}
        self._begun: set[str] = set()
        self.ready: set[str] = set()
        self._ended = False  # the services are being stopped
        self._dismissed: set[str] = set()  # those that may end before the others
        self._stopping: set[str] = set()  # those that are about to start again

    def held(self) -> list[str]:
        """The roles that have not begun."""
        return [name for name in self._roles if name not in self._begun]

    def runs(self, name: str) -> bool:
        """Whether a rank of it has not ended."""
        return bool(self._running[name])

    def awaited(self, name: str) -> list[str]:
        """The roles for which this one waits."""
        return [other for other in self._roles[name].after if other not in self.ready]

    def begin(self) -> list[Action]:
        """Start those that wait for nobody, or for nobody any more."""
        free = [name for name in self.held() if not self.awaited(name)]
        self._begun.update(free)
        return [Begin(name) for name in free]

    def started(self, rank: int) -> list[Action]:
        """A rank has a process."""
        name = self._role_of.get(rank, "")
        if not name or rank not in self._to_start[name]:
            return []
        self._to_start[name].discard(rank)
        if self._to_start[name]:
            return []
        match self._roles[name].ready.check:
            case "ended":
                return []
            case "started":
                return self.got_ready(name)
        return [Look(name)]

    def stopping(self, name: str) -> None:
        """A role is stopped to start again: how its ranks end doesn't count."""
        self._stopping.add(name)

    def restarted(self, name: str) -> None:
        """A role is started again: who has not begun waits for it again."""
        self._to_start[name] = set(self._ranks[name])
        self._running[name] = set(self._ranks[name])
        self.ready.discard(name)
        self._stopping.discard(name)

    def dismiss(self, name: str) -> list[int]:
        """A role is being stopped, and that it ends is no failure. Returns its ranks that run."""
        self._dismissed.add(name)
        return sorted(self._running[name])

    def got_ready(self, name: str) -> list[Action]:
        """A role is ready."""
        self.ready.add(name)
        return self.begin()

    def exited(self, rank: int, code: int) -> list[Action]:
        """A rank has exited. A failure is for the job's state machine to judge."""
        name = self._role_of.get(rank, "")
        if not name or code != 0 or name in self._stopping:
            return []
        self._running[name].discard(rank)
        roles, role = self._roles.values(), self._roles[name]
        if role.service:
            if self._ended or name in self._dismissed:
                return []
            return [FailRole(rank, "is a service, and exited with code 0 while other roles still ran")]
        if self._running[name]:
            return []
        if role.ready.check != "ended" and name not in self.ready and any(name in one.after for one in roles):
            return [FailRole(rank, f"exited with code 0 before it was ready ({role.ready.words})")]
        actions = self.got_ready(name)
        if any(self._running[one.name] for one in roles if not one.service):
            return actions
        self._ended = True
        services = [left for one in roles if one.service for left in sorted(self._running[one.name])]
        return [EndServices(services)] if services else []
