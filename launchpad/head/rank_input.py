"""The input of the rank that has ours: what it reads, and whether it waits for what its user types."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from launchpad.head.hub import GoesOn, Hub, StandsStill
from launchpad.head.nodes import Node
from launchpad.head.part import InvalidMessage, Part
from launchpad.job.plan import Stdin
from launchpad.protocol.commands import StdinData
from launchpad.protocol.events import AtPrompt, StdinRead, StdinTaken, StdinUnused, StopRequested

if TYPE_CHECKING:
    from launchpad.head.stdin_forwarder import StdinForwarder


class RankInput(Part):
    """Forwards our stdin if the rank is on another machine; one of this machine has our descriptor."""

    takes = (StdinRead, StdinTaken, StdinUnused, AtPrompt)
    sees = (StopRequested, StandsStill, GoesOn)

    def __init__(self, hub: Hub, stdin: Stdin) -> None:
        self._hub = hub
        self._stdin = stdin
        self._forwarder: StdinForwarder | None = None
        self._reader: Node | None = None  # the node that has what was read

    def on(self, source: int, message: Any) -> None:
        """Take what was typed, and what the rank and we do."""
        match message:
            case StdinRead(data=data):
                self._hub.send(self._hub.plan.input_rank, StdinData(data))
            case AtPrompt(rank=rank, waits=waits):
                if rank != self._hub.plan.input_rank:
                    raise InvalidMessage
                self._hub.clock.note_wait(("prompt", rank), begins=waits)
                self._hub.happened(source, message)
            case _ if self._forwarder is None:
                pass
            case StdinTaken(size=size):
                self._forwarder.taken(size)
            case StdinUnused(time=at, size=size) if self._hub.nodes[source] is self._reader:
                unused = self._forwarder.give_back(size)
                if unused and not self._stdin.typed:
                    self._hub.tell(StdinUnused(at, unused))
            case StandsStill():
                self._forwarder.rest()
            case GoesOn():
                self._forwarder.go_on()
            case StopRequested(signum=signal.SIGCONT) if source < 0:  # the shell's fg
                self._forwarder.go_on()

    def start(self) -> None:
        """Begin to read; the rank that reads may be on another node than before, or nowhere."""
        if self._stdin.sent and self._forwarder is None:
            from launchpad.head.stdin_forwarder import StdinForwarder

            self._forwarder = StdinForwarder(self._hub.post, keys=bool(self._stdin.terminal))
        node = self._hub.node_of.get(self._hub.plan.input_rank)
        if node is None:  # the job goes on with fewer ranks
            return
        before, self._reader = self._reader, self._hub.nodes[node]
        if self._forwarder and before not in (None, self._reader):
            self._forwarder.reset()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._forwarder:
            self._forwarder.close()
