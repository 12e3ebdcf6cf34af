"""Starts a job's roles in their order, looks whether they are ready, and stops its services at the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.head.readiness import ReadinessCheck
from launchpad.head.role_order import Begin, EndServices, FailRole, Look, RoleOrder
from launchpad.head.worlds import Dismissed, FinishWorld, RestartWorld, SignalWorld, StartAgain
from launchpad.job.outcome import TIMED_OUT
from launchpad.job.roles import address_of, host_port, variable_of
from launchpad.job.spec import RoleSpec, named
from launchpad.protocol.commands import Command, Finish, Signal
from launchpad.protocol.events import (
    Output,
    PhaseChanged,
    PortsTold,
    RankExited,
    RankFailed,
    RankStarted,
    RoleAwaited,
    RoleReady,
    WorldAnswered,
    WorldAsked,
    WorldRequested,
    WorldRestarted,
    WorldStopping,
)
from launchpad.protocol.message import Message

# Services that are stopped have this long, unless --grace says otherwise, before they are killed.
GRACE_SECONDS = 30.0

# When to say that a role waits for another, and how often again.
FIRST_WORD = 10.0

# How much of a stream's end is kept, to find a text that comes in pieces.
MOST_TAIL = 4096


class RoleIsReady(Message):
    """A check has succeeded."""

    role: str


class Roles(Part):
    """The part above the worlds."""

    takes = (RoleIsReady, SignalWorld, FinishWorld, RestartWorld, WorldStopping, WorldRequested)
    sees = (RankStarted, RankExited, PhaseChanged, Output)

    def __init__(self, hub: Hub, roles: Sequence[RoleSpec], ranks: dict[str, list[int]]) -> None:
        """`ranks`: of each role, in the job's numbering."""
        self._hub = hub
        self._roles = {role.name: role for role in roles}
        self._ranks = ranks
        self._nodes = {name: sorted({hub.node_of[rank] for rank in ones}) for name, ones in ranks.items()}
        self._checks: dict[str, ReadinessCheck] = {}
        self._looked_since: dict[str, float] = {}  # by role that is not ready: since when
        self._told: dict[str, float] = {}  # by role: when to say next that it is waited for
        self._lines: dict[int, str] = {}  # by rank of a role that is to print a line: the role
        self._tails: dict[tuple[int, int], bytes] = {}
        self._kill_at: dict[int, float] = {}  # by rank of a service that was told to end
        self._order = RoleOrder(roles, ranks)

    def start(self) -> None:
        """Hold all, and begin with those that wait for nobody."""
        self._order = RoleOrder(list(self._roles.values()), self._ranks)
        self._hub.hold(node for nodes in self._nodes.values() for node in nodes)
        self._tell_ports()
        self._do(self._order.begin())

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        limits = [since + self._roles[name].ready.seconds for name, since in self._looked_since.items()]
        times = [*limits, *self._told.values(), *self._kill_at.values()]
        return min(times, default=None)

    def on(self, source: int, message: Any) -> None:  # noqa: ARG002
        """Hear of ranks, and of checks that succeeded."""
        match message:
            case Output() if self._lines:
                self._read(message)
            case RankStarted(rank=rank):
                self._do(self._order.started(rank))
            case RankExited(rank=rank, code=code):
                self._exited(rank, code)
            case RoleIsReady(role=role):
                self._is_ready(role)
            case WorldStopping(world=world):
                self._forget(world)
                self._order.stopping(world)
                self._hub.tell(message._replace(time=time.monotonic_ns()))
            case SignalWorld(world=world, signum=signum, stops=stops):
                self._send_all(world, Signal(signum, stops=stops))
            case FinishWorld(world=world):
                self._send_all(world, Finish(leave=False))
            case RestartWorld():
                self._restart(message)
            case WorldRequested():
                self._requested(message)
            case PhaseChanged(phase=phase) if phase in ("stopping", "over"):
                self._drop_held()

    def _send_all(self, role: str, command: Command) -> None:
        for node in self._nodes[role]:
            self._hub.nodes.send(node, command)

    def _requested(self, request: WorldRequested) -> None:
        """Somebody wants to stop roles, or to have them start again."""
        meant = [name for name in self._roles if named(name, request.role)]
        begun = [name for name in meant if name not in self._order.held() and self._order.runs(name)]
        text = ""
        if not meant:
            text = f"there is no role {request.role!r}, only {', '.join(self._roles)}"
        elif not begun or self._hub.ends:
            text = f"{request.role} is not running"
        answer = f"{', '.join(begun)}: {'stopping' if request.what == 'stop' else 'starting again'}"
        self._hub.tell(WorldAnswered(request.asker, text or answer, bool(text)))
        for name in [] if text else begun:
            self._hub.tell(WorldAsked(time.monotonic_ns(), name, request.what))
            if request.what == "stop":
                self._forget(name)
                self._end(self._order.dismiss(name))
            else:
                self._hub.happened(-1, StartAgain(name))

    def _restart(self, message: RestartWorld) -> None:
        name, attempt, restarts, counted = message
        ranks, (most, period) = self._ranks[name], self._roles[name].spec.limits.max_restarts
        self._tails = {place: text for place, text in self._tails.items() if place[0] not in ranks}
        self._order.restarted(name)
        self._hub.happened(-1, WorldRestarted(time.monotonic_ns(), name, ranks, restarts, most, period or 0.0, counted))
        self._hub.again(self._nodes[name], attempt, restarts)

    def _tell_ports(self) -> None:
        for name, role in self._roles.items():
            if role.ports:
                told = [where for port in role.ports for where in self._ports(name, port)]
                self._hub.tell(PortsTold(time.monotonic_ns(), name, [host_port(*where) for where in told]))

    def _ports(self, name: str, port: str) -> list[tuple[str, int]]:
        """Where the ranks of this role have the port."""
        own, variable = set(self._ranks[name]), f"LAUNCHPAD_PORT_{variable_of(port)}"
        ranks = [rank for rank in self._hub.plan.ranks if rank.rank in own]
        return [(address_of(self._hub.plan, rank.rank), int(rank.environ[variable])) for rank in ranks]

    def _exited(self, rank: int, code: int) -> None:
        self._kill_at.pop(rank, None)
        if not self._hub.ends:
            self._do(self._order.exited(rank, code))

    def _is_ready(self, role: str) -> None:
        since = self._forget(role)
        if since is None or self._hub.ends:
            return
        self._hub.tell(RoleReady(time.monotonic_ns(), role, max(0.0, self._hub.clock.now() - since)))
        self._do(self._order.got_ready(role))

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case Begin(role=role):
                    for node in self._nodes[role]:
                        self._hub.release(node)
                case Look(role=role):
                    self._look(role)
                case EndServices(ranks=ranks):  # all else has ended well
                    self._end(ranks)
                    self._drop_held()
                case FailRole(rank=rank, reason=reason):
                    self._fail(rank, 1, reason)

    def _fail(self, rank: int, code: int, reason: str) -> None:
        self._hub.happened(self._hub.node_of[rank], RankFailed(time.monotonic_ns(), rank, code, reason))

    # Readiness.

    def _look(self, name: str) -> None:
        role, now = self._roles[name], self._hub.clock.now()
        self._looked_since[name] = now
        self._told[name] = now + FIRST_WORD
        if role.ready.check == "line":
            self._lines.update(dict.fromkeys(self._ranks[name], name))
            return
        environ = next(rank.environ for rank in self._hub.plan.ranks if rank.rank == self._ranks[name][0])
        ports = self._ports(name, role.ready.port) if role.ready.port else []
        self._checks[name] = ReadinessCheck(role.ready, ports, environ, lambda: self._hub.post(RoleIsReady(name)))

    def _read(self, output: Output) -> None:
        name = self._lines.get(output.rank)
        if name is None:
            return
        place = output.rank, output.stream
        text = self._tails.get(place, b"") + output.data
        self._tails[place] = text[-MOST_TAIL:]
        if self._roles[name].ready.text.encode() in text:
            self._is_ready(name)

    def tick(self, now: float) -> None:
        """Say who is waited for, give up, kill services that don't end."""
        for name, since in list(self._looked_since.items()):
            if now >= since + self._roles[name].ready.seconds:
                self._give_up(name)
            elif name in self._told and now >= self._told[name]:
                self._told[name] = now + 2 * (now - since)
                waiting = [one for one in self._order.held() if name in self._order.awaited(one)]
                why = self._why(name)
                self._hub.tell(RoleAwaited(time.monotonic_ns(), name, waiting, why, now - since))
        if late := [rank for rank, at in self._kill_at.items() if now >= at]:
            for rank in late:
                del self._kill_at[rank]
            self._send(signal.SIGKILL, late)

    def _why(self, name: str) -> str:
        ready = self._roles[name].ready
        check = self._checks.get(name)
        return f"{ready.words}: {check.last}" if check else f"it has not printed {ready.text!r}"

    def _give_up(self, name: str) -> None:
        seconds, why = self._roles[name].ready.seconds, self._why(name)
        self._forget(name)
        if not self._hub.ends:
            self._fail(self._ranks[name][0], TIMED_OUT, f"was not ready within {seconds:g} s ({why})")

    def _forget(self, name: str) -> float | None:
        """Look no more whether it is ready. Returns since when that was done, None if it was not."""
        self._told.pop(name, None)
        if name in self._checks:
            self._checks.pop(name).close()
        for rank in self._ranks[name]:
            self._lines.pop(rank, None)
        return self._looked_since.pop(name, None)

    # The end.

    def _end(self, wanted: list[int]) -> None:
        """Stop these ranks, and what they have spawned; their exit codes don't count any more."""
        nodes = {self._hub.node_of[rank] for rank in wanted}
        ranks = sorted(rank for rank in self._hub.running if self._hub.node_of[rank] in nodes)
        self._hub.dismissed.update(ranks)
        self._hub.happened(-1, Dismissed(ranks))
        now = self._hub.clock.now()
        for name, role in self._roles.items():
            own = [rank for rank in ranks if self._hub.node_of[rank] in self._nodes[name]]
            limits = role.spec.limits
            self._kill_at |= dict.fromkeys(own, now + (GRACE_SECONDS if limits.grace is None else limits.grace))
            self._send(limits.stop_signal or signal.SIGTERM, own)

    def _send(self, signum: int, ranks: Sequence[int]) -> None:
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._hub.node_of[rank], []).append(rank)
        for node, ones in by_node.items():
            self._hub.nodes.send(node, Signal(signum, stops=True, ranks=ones))

    def _drop_held(self) -> None:
        """No role starts any more: what has not started is as good as gone, and nobody will report its end."""
        for name in list(self._looked_since):
            self._forget(name)
        for node in self._hub.drop_held():
            for rank in self._hub.ranks_of(node):
                self._hub.post(RankExited(time.monotonic_ns(), rank, -signal.SIGTERM, 0, False))

    def close(self) -> None:
        """Look no more."""
        for check in self._checks.values():
            check.close()
