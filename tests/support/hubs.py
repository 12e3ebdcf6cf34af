"""A hub for the tests of the head's parts: time, nodes and the state of the job are what the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from launchpad.head.clock import Clock
from launchpad.head.hub import Hub
from launchpad.head.machine import Phase
from launchpad.job.plan import Plan


class FakeNodes:
    """Nodes that remember what they are sent."""

    def __init__(self, *nodes: int) -> None:
        self.open = set(nodes)
        self.sent: list[Any] = []
        self.hung_up: list[int] = []

    def hang_up(self, node: int) -> None:
        self.hung_up.append(node)

    def name(self, node: int) -> str:
        return f"h{node}"

    def __getitem__(self, node: int) -> Any:
        return SimpleNamespace(link=SimpleNamespace(number=node))

    def send_all(self, command: Any) -> None:
        self.sent.append(command)

    def send(self, _: int, command: Any) -> None:
        self.sent.append(command)


class FakeJob:
    """A job in the phase "running", what its parts have said, and their hub."""

    def __init__(self, nodes: Any, plan: Plan | None = None) -> None:
        self.now = 0.0
        self.nodes = nodes
        self.posted: list[Any] = []
        self.told: list[Any] = []
        self.happened: list[Any] = []
        self.lost: list[tuple[int, str]] = []
        self.started_again: list[tuple[list[int], int]] = []
        self._machine = SimpleNamespace(
            running=set(), phase="running", attempt=0, restarts=0, cause=None, stops_at=None
        )
        self.hub = Hub(
            nodes,
            self._machine,  # type: ignore[arg-type]
            Clock(lambda: self.now),
            plan or Plan("", ()),
            post=self.posted.append,
            tell=self.told.append,
            happened=lambda _, event: self.happened.append(event),
            lose=lambda node, reason: self.lost.append((node, reason)),
            again=lambda nodes, _, restarts: self.started_again.append((list(nodes), restarts)),
        )

    @property
    def stops_at(self) -> float | None:
        return self._machine.stops_at  # type: ignore[no-any-return]

    @stops_at.setter
    def stops_at(self, at: float | None) -> None:
        self._machine.stops_at = at

    @property
    def attempt(self) -> int:
        return self._machine.attempt  # type: ignore[no-any-return]

    @attempt.setter
    def attempt(self, attempt: int) -> None:
        self._machine.attempt = attempt

    @property
    def restarts(self) -> int:
        return self._machine.restarts  # type: ignore[no-any-return]

    @restarts.setter
    def restarts(self, restarts: int) -> None:
        self._machine.restarts = restarts

    def at(self, now: float, *running: int, phase: Phase = "running") -> float:
        """It is so late, and these ranks are running."""
        self.now = now
        self._machine.running = set(running)
        self._machine.phase = phase
        return now
