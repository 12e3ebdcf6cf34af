"""Has the nodes of the next attempt meet once all of them are healthy (--health): others are lost to the job."""

from __future__ import annotations

import time
from typing import Any

from launchpad.head.health import Unwell, judged
from launchpad.head.hub import Hub
from launchpad.head.machine import FinishAttempt, Meet, Release
from launchpad.head.meetings import Meetings
from launchpad.head.part import InvalidMessage
from launchpad.head.planner import Planner
from launchpad.job.membership import Seat
from launchpad.protocol.events import HealthChecked, NodeJoined, NodeLost, NodeUnwell


class HealthyMeetings(Meetings):
    """Checks each node of the next attempt once."""

    takes = (*Meetings.takes, HealthChecked)
    sees = (*Meetings.sees, FinishAttempt, NodeJoined)

    def __init__(self, hub: Hub, planner: Planner) -> None:
        super().__init__(hub, planner)
        self._coming: tuple[Seat, ...] = ()  # the nodes that are to meet, while some are being checked
        self._awaited: set[int] = set()  # nodes that have not answered yet
        self._well: set[int] = set()  # those that are healthy in this break between two attempts
        self.unwell: dict[int, str] = {}  # those that were lost because they are not, and why

    def start(self) -> None:
        """The next attempt needs checks of its own. The first one's were made before the ranks were planned."""
        self._well.clear()
        for node, why in self._planner.take_left_out().items():
            self._leave_out(node, why)

    def on(self, source: int, message: Any) -> None:
        """Check the nodes that are to meet, and let those meet that are healthy."""
        match message:
            case Meet(seats=seats):
                self._coming = seats
                self._check()
                self._go_on()
                return
            case HealthChecked():
                self._checked(source, message)
                return
            case FinishAttempt():
                self._well.clear()
                return
            case NodeJoined(node=node):
                self.unwell.pop(node, None)
                return
            case NodeLost(node=node) | Release(node=node):
                self._awaited.discard(node)
                self._well.discard(node)
        super().on(source, message)

    def _check(self) -> None:
        for seat in self._coming:
            if seat.node not in self._well and seat.node not in self._awaited:
                self._awaited.add(seat.node)
                self._hub.nodes.send(seat.node, self._planner.check_request(seat.node))

    def _checked(self, node: int, answer: HealthChecked) -> None:
        if node not in self._awaited:
            raise InvalidMessage
        self._awaited.discard(node)
        try:
            why = judged(answer)
        except ValueError:
            raise InvalidMessage from None
        if why is not None:
            self._leave_out(node, why)
            return
        self._well.add(node)
        self._go_on()

    def _go_on(self) -> None:
        if self._coming and self._well.issuperset(seat.node for seat in self._coming):
            seats, self._coming = self._coming, ()
            super().on(-1, Meet(seats))

    def _leave_out(self, node: int, why: Unwell) -> None:
        self.unwell[node] = why.short
        self._hub.tell(NodeUnwell(time.monotonic_ns(), node, why.reason, list(why.lines)))
        self._hub.lose(node, why.short)
