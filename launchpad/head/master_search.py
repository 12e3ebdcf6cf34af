"""Has the nodes of the next attempt find an address at which they can meet, in a thread beside the head's loop."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchpad.head.nodes import Nodes
from launchpad.head.planner import Planner, Rendezvous
from launchpad.head.requester import Requester
from launchpad.job.membership import Seat
from launchpad.named import NamedTuple
from launchpad.protocol.events import LinkClosed


class Met(NamedTuple):
    """The search has ended."""

    search: "MasterSearch"
    rendezvous: Rendezvous | None  # None: the nodes can't meet, for these reasons
    reasons: Mapping[int, str]


class MasterSearch(Requester):
    """One search. Its inbox gets the nodes' answers; what comes of it is put as one of the head's own events."""

    def __init__(self, planner: Planner, nodes: Nodes, seats: Sequence[Seat], post: Callable[[Any], None]) -> None:
        super().__init__()
        self.nodes = nodes
        self.seats = seats
        self._planner = planner
        self._post = post
        self._interrupted = False
        threading.Thread(target=self._search, name="master", daemon=True).start()

    def lose(self, node: int) -> None:
        """The node is lost, so there is no use to go on if it takes part."""
        if node in {seat.node for seat in self.seats}:
            self._interrupted = True
            self.inbox.put((node, LinkClosed(time.monotonic_ns())))

    def _search(self) -> None:
        from launchpad.head.node_facts import Unreachable  # few jobs need it

        try:
            met = Met(self, self._planner.find_rendezvous(self, self.seats), {})
        except Unreachable as error:
            met = Met(self, None, error.reasons)
        except Exception as error:  # whatever goes wrong, the loop waits for the outcome
            node = (self.awaited or [self.seats[0].node])[0]
            met = Met(self, None, {} if self._interrupted else {node: str(error) or type(error).__name__})
        self._post(met)
