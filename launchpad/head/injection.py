"""Injects the faults of --inject, each when it is due and what it is for is there, and tells the job's sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from launchpad.head.machine import Phase
from launchpad.head.nodes import Nodes
from launchpad.job.faults import SIGNALS, Fault, Faults
from launchpad.job.plan import Plan
from launchpad.protocol.commands import SignalAgent, SignalRank
from launchpad.protocol.events import FaultInjected, FaultMissed, NodeLost, RankExited, RankStarted, Restarted


class Injector:
    """A fault that is due while its rank or host is gone waits until it is back. A random kill is left out then."""

    def __init__(self, faults: Faults, plan: Plan, nodes: Nodes, tell: Callable[[Any], None], now: float) -> None:
        """Times are in seconds of the job's clock, which stops while we are suspended."""
        self._nodes = nodes
        self._tell = tell
        self._start = now
        self._single = list(faults.single)
        self._kills = faults.random.kills(plan.world_size) if faults.random else iter(())
        self._kill = next(self._kills, None)
        self._lay_out(plan.by_node)
        self._running: set[int] = set()  # ranks

    def _lay_out(self, nodes: Sequence[Sequence[Any]]) -> None:
        """`nodes`: [name, [rank, …]] of each."""
        self._place = {name: node for node, (name, _) in enumerate(nodes)}
        self._node_of = {rank: node for node, (_, ranks) in enumerate(nodes) for rank in ranks}

    @property
    def deadline(self) -> float | None:
        """When to call `tick`."""
        due = [fault.at for fault in self._single if self._is_there(fault)]
        due += [self._kill.at] if self._kill else []
        return self._start + min(due) if due else None

    def on(self, event: Any) -> None:
        """Take an event of the job."""
        match event:
            case RankStarted():
                self._running.add(event.rank)
            case RankExited():
                self._running.discard(event.rank)
            case NodeLost():
                self._running.difference_update(event.ranks)
            case Restarted():
                self._running.clear()
                if event.nodes:
                    self._lay_out(event.nodes)

    def tick(self, now: float, phase: Phase) -> None:
        """Inject what is due."""
        if phase == "over":
            for fault in self._single:
                self._tell(FaultMissed(time.monotonic_ns(), str(fault)))
            self._single.clear()
            self._kill = None
        passed = now - self._start
        for fault in [one for one in self._single if one.at <= passed]:
            if self._is_there(fault):
                self._single.remove(fault)
                self._inject(fault)
        while self._kill is not None and self._kill.at <= passed:
            if phase == "running" and self._is_there(self._kill):
                self._inject(self._kill)
            self._kill = next(self._kills)

    def _is_there(self, fault: Fault) -> bool:
        return self._place[fault.host] in self._nodes.open if fault.host else fault.rank in self._running

    def _inject(self, fault: Fault) -> None:
        node = self._place[fault.host] if fault.host else self._node_of[fault.rank]
        signum = SIGNALS.get(fault.what, 0)
        self._tell(FaultInjected(time.monotonic_ns(), signum, fault.rank, node))
        if not signum:
            self._nodes[node].cut()
        elif fault.host:
            self._nodes.send(node, SignalAgent(signum))
        else:
            self._nodes.send(node, SignalRank(fault.rank, signum))
            if fault.what == "kill":  # another one is for its next attempt
                self._running.discard(fault.rank)
