"""Brings lost nodes back between two attempts: reconnects, and has the new agent hold the store's port again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from launchpad._version import __version__
from launchpad.errors import LaunchpadError, NodeError
from launchpad.head.nodes import Nodes
from launchpad.job.plan import Plan
from launchpad.protocol.commands import Hello, HoldPort
from launchpad.protocol.events import AgentReady, NodeBack, NodeLost, PortHeld
from launchpad.transport import Link

# How long we try to reach a host again (it may be rebooting), and how long we pause between tries.
SECONDS = 120.0
PAUSE_SECONDS = 2.0


class Reopened(NamedTuple):
    """A lost node has a new link."""

    node: int
    link: Link


class Reconnect:
    """The nodes that we are reconnecting to."""

    def __init__(
        self,
        nodes: Nodes,
        plan: Plan,
        reopen: Callable[[int], Link] | None,
        put: Callable[[tuple[int, Any]], None],
    ) -> None:
        """`put` gets (node, event), with -1 for the head's own events."""
        self._nodes = nodes
        self._plan = plan
        self._reopen = reopen
        self._put = put
        self._expected: set[int] = set()  # nodes whose new agent is not ready yet

    def begin(self, node: int) -> None:
        """Start to reconnect to the node, in a thread."""
        threading.Thread(target=self._reach, args=(node,), name=f"reopen-{node}", daemon=True).start()

    def _reach(self, node: int) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if self._reopen is None:
                    raise NodeError("its agent can't be restarted")
                self._put((-1, Reopened(node, self._reopen(node))))
                return
            except LaunchpadError as error:
                if self._reopen is None or time.monotonic() > deadline:
                    self._put((-1, NodeLost(time.monotonic_ns(), node, str(error), [])))
                    return
                time.sleep(PAUSE_SECONDS)

    def greet(self, reopened: Reopened) -> None:
        """Greet the node's new agent."""
        self._expected.add(reopened.node)
        self._nodes.replace(*reopened)
        self._nodes.send(reopened.node, Hello(__version__, False, 0, self._nodes.silence))

    def expects(self, node: int) -> bool:
        """Whether the node's new agent is not ready yet."""
        return node in self._expected

    def hear(self, node: int, event: AgentReady | PortHeld) -> None:
        """Handle an answer. The node that serves the store must hold its port again before it is back."""
        place = self._plan.nodes[node]
        environ = place.ranks[0].environ
        port = int(environ["MASTER_PORT"])
        if isinstance(event, AgentReady) and place.store == "serve":
            self._nodes.send(node, HoldPort(environ["MASTER_ADDR"], port))
            return
        self._expected.discard(node)
        if isinstance(event, PortHeld) and event.port != port:
            reason = f"port {port} of {environ['MASTER_ADDR']} is now in use by another program"
            self._put((-1, NodeLost(time.monotonic_ns(), node, reason, [])))
            return
        self._put((-1, NodeBack(time.monotonic_ns(), node)))
