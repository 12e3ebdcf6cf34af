"""Injects the faults of --inject, each when it is due and what it is for is there, and tells the job's sinks."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.job.faults import SIGNALS, Fault, Faults
from launchpad.protocol.commands import SignalAgent, SignalRank
from launchpad.protocol.events import FaultInjected, FaultMissed, RankExited, RankStarted


class Injector(Part):
    """A fault that is due while its rank or host is gone waits until it is back. A random kill is left out then."""

    sees = (RankStarted, RankExited)

    def __init__(self, hub: Hub, faults: Faults) -> None:
        self._hub = hub
        self._began = hub.clock.now()
        self._single = list(faults.single)
        self._kills = faults.random.kills(hub.plan.world_size) if faults.random else iter(())
        self._kill = next(self._kills, None)
        self._running: set[int] = set()  # ranks that have a process
        self._place: dict[str, int] = {}  # of each host
        self.start()

    def start(self) -> None:
        """The hosts may be others than before."""
        self._place = {node.name: node.index for node in self._hub.plan.nodes}

    def go_on(self, started: Collection[int], state: Any) -> None:  # noqa: ARG002
        """The faults that another head has injected are over."""
        self._running = set(started)
        self._single.clear()
        self._kill = None

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        due = [fault.at for fault in self._single if self._is_there(fault)]
        due += [self._kill.at] if self._kill else []
        return self._began + min(due) if due else None

    def on(self, source: int, message: Any) -> None:  # noqa: ARG002
        """Note which ranks there are."""
        match message:
            case RankStarted(rank=rank):
                self._running.add(rank)
            case RankExited(rank=rank):
                self._running.discard(rank)

    def lose(self, ranks: Collection[int], why: str) -> None:  # noqa: ARG002
        """These are not there any more."""
        self._running.difference_update(ranks)

    def tick(self, now: float) -> None:
        """Inject what is due."""
        phase = self._hub.phase
        if phase == "over":
            for fault in self._single:
                self._hub.tell(FaultMissed(time.monotonic_ns(), str(fault)))
            self._single.clear()
            self._kill = None
        passed = now - self._began
        for fault in [one for one in self._single if one.at <= passed]:
            if self._is_there(fault):
                self._single.remove(fault)
                self._inject(fault)
        while self._kill is not None and self._kill.at <= passed:
            if phase == "running" and self._is_there(self._kill):
                self._inject(self._kill)
            self._kill = next(self._kills)

    def _is_there(self, fault: Fault) -> bool:
        return self._node(fault) in self._hub.nodes.open if fault.host else fault.rank in self._running

    def _node(self, fault: Fault) -> int:
        return self._place[fault.host] if fault.host else self._hub.node_of[fault.rank]

    def _inject(self, fault: Fault) -> None:
        node = self._node(fault)
        signum = SIGNALS.get(fault.what, 0)
        self._hub.tell(FaultInjected(time.monotonic_ns(), signum, fault.rank, node))
        if not signum:
            self._hub.nodes[node].cut()
        elif fault.host:
            self._hub.nodes.send(node, SignalAgent(signum))
        else:
            self._hub.nodes.send(node, SignalRank(fault.rank, signum))
            if fault.what == "kill":  # another one is for its next attempt
                self._running.discard(fault.rank)
