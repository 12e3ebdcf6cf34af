"""Brings lost nodes back between two attempts: reaches them again, and has them hold what the first agent held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from launchpad import __version__
from launchpad.commands import Hello, Hold
from launchpad.errors import LaunchpadError, NodeError
from launchpad.events import AgentReady, Held, NodeBack, NodeLost
from launchpad.head.nodes import Nodes
from launchpad.job.plan import Plan
from launchpad.transport import Link

# A host that restarts is given this time to be reached again, and is tried this often.
SECONDS = 120.0
PAUSE_SECONDS = 2.0


class Reopened(NamedTuple):
    """A lost node has a new link."""

    node: int
    link: Link


class Revival:
    """The nodes that are being brought back."""

    def __init__(
        self,
        nodes: Nodes,
        plan: Plan,
        reopen: Callable[[int], Link] | None,
        put: Callable[[tuple[int, Any]], None],
    ) -> None:
        """`put` takes (node, event); a node's own end or loss is told as if it had said it itself."""
        self._nodes = nodes
        self._plan = plan
        self._reopen = reopen
        self._put = put
        self._expected: set[int] = set()  # nodes that have not answered on them yet

    def begin(self, node: int) -> None:
        """Reach the node again, in a thread."""
        threading.Thread(target=self._reach, args=(node,), name=f"reopen-{node}", daemon=True).start()

    def _reach(self, node: int) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if self._reopen is None:
                    raise NodeError("its agent can't be started again")
                self._put((-1, Reopened(node, self._reopen(node))))
                return
            except LaunchpadError as error:
                if self._reopen is None or time.monotonic() > deadline:
                    self._put((-1, NodeLost(time.monotonic_ns(), node, str(error), [])))
                    return
                time.sleep(PAUSE_SECONDS)

    def greet(self, reopened: Reopened) -> None:
        """Begin to talk to the node's new agent."""
        self._expected.add(reopened.node)
        self._nodes.replace(*reopened)
        self._nodes.send(reopened.node, Hello(__version__, False, 0, self._nodes.silence))

    def expects(self, node: int) -> bool:
        """Whether the node is yet to say that it is ready."""
        return node in self._expected

    def hear(self, node: int, event: AgentReady | Held) -> None:
        """A node answers: the one that served the store takes its port again before it is back."""
        place = self._plan.nodes[node]
        environ = place.ranks[0].environ
        port = int(environ["MASTER_PORT"])
        if isinstance(event, AgentReady) and place.store == "serve":
            self._nodes.send(node, Hold(environ["MASTER_ADDR"], port))
            return
        self._expected.discard(node)
        if isinstance(event, Held) and event.port != port:
            reason = f"port {port} of {environ['MASTER_ADDR']} is taken there now"
            self._put((-1, NodeLost(time.monotonic_ns(), node, reason, [])))
            return
        self._put((-1, NodeBack(time.monotonic_ns(), node)))
