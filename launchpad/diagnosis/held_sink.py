"""A sink that sees from the ranks' stacks who holds up the others, and tells the other sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launchpad.job.plan import Plan
from launchpad.protocol.events import RanksHeld, Restarted, StacksTaken


class HeldSink:
    """The sink."""

    def __init__(self, plan: Plan, tell: Callable[[RanksHeld], None]) -> None:
        self._tell = tell
        self._nodes: Sequence[Sequence[Any]] = plan.by_node
        self._cwd = plan.nodes[0].cwd
        self._roles = plan.roles

    def on(self, event: Any) -> bool:
        """Look at stacks that were taken because the job failed, hung or timed out."""
        if type(event) is Restarted and event.nodes:
            self._nodes = event.nodes
        if type(event) is StacksTaken and event.why != "asked":
            from launchpad.diagnosis.stack_summary import held, hosts_of  # few jobs need it

            if self._roles:
                from launchpad.diagnosis.role_stacks import held_by_role

                self._tell(held_by_role(event, self._cwd, self._roles))
                return False
            self._tell(held(event, self._cwd, hosts_of(self._nodes)))
        return False

    deadline = None

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Nothing is held open."""
