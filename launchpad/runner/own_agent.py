"""The agent of a launcher that has joined: it stays when its head is lost, and its forkserver warm for the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from signal import SIGCONT, SIGKILL
from typing import Any

from launchpad.head.nodes import PINGS
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, Finish, Hello, Ping, Signal, Start, StartMore
from launchpad.protocol.events import AgentFailed, Drained, Pong, RankExited, StartFailed
from launchpad.transport import Link

# The launcher notices first that the head is silent, and asks its agent to end the ranks; the agent would leave. Of a
# launcher that is stopped it must leave before a scheduler ends the job, which lets nobody tidy up.
PATIENCE = 1.1


class OwnAgent:
    """A Link. What the agent says goes to the launcher and, when that leads the job itself, to the head that it is."""

    remote = False

    def __init__(self, link: Link) -> None:
        """Read from the link, once somebody takes what comes."""
        self.name = link.name
        self.gone = False  # the link has ended
        self.cleared = False  # nothing of the last head's is left, and nothing of the next one's is here
        self._link = link
        self._lock = threading.Lock()  # guards the rest
        self._take: Callable[[Any], None] | None = None
        self._ranks: set[int] = set()  # those that run or are about to
        self._finishing = False  # what the ranks have left is being swept up, and the rest of their output sent
        self._clearing = False  # there is no head any more
        self._own_pings = 0  # that have not been answered
        self._silence = 0.0  # as the head, see `serve`

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Pass each event to `take` from now on, in a thread; None at the end."""
        with self._lock:
            begins, self._take = self._take is None, take
        if begins:
            threading.Thread(target=self._read, name="agent-link", daemon=True).start()

    def messages(self) -> Any:
        """Unused: `deliver` is what links like this one have instead."""
        raise NotImplementedError

    def send(self, command: Command) -> None:
        """Send a command of a head's."""
        with self._lock:
            match command:
                case Hello(silence=silence):
                    self.cleared = False
                    command = command._replace(silence=self._silence or silence * PATIENCE)
                case Start(ranks=ranks) | StartMore(ranks=ranks):
                    self._ranks |= {entry["rank"] for entry in ranks}
                    self._finishing = False
                case Finish():
                    self._finishing = True
        self._link.send(command)

    def clear(self) -> None:
        """End what the last head has started. The agent `cleared` it once Drained comes."""
        with self._lock:
            self._clearing = True
            self._link.send(Signal(SIGCONT))
            self._link.send(Signal(SIGKILL))
            self._sweep()

    def keep(self) -> None:
        """Let it know that we are here, as no head does."""
        with self._lock:
            self._own_pings += 1
        self._link.send(Ping(0))

    def serve(self, silence: float) -> None:
        """Its launcher is the head. If that is stopped for so many seconds, the ranks here are to end, as others may
        lead by then.
        """
        self._silence = silence
        threading.Thread(target=self._keep_on, name="keep", daemon=True).start()

    def _keep_on(self) -> None:
        while self._silence and not self.gone:
            self.keep()
            time.sleep(self._silence / PINGS)

    def close(self) -> None:
        """Hang up, and wait until the agent has left."""
        self._link.close()

    def abandon(self) -> None:
        """As for the agent's own link."""
        self._link.abandon()

    def _sweep(self) -> None:
        if not self._ranks and not self._finishing:
            self._finishing = True
            self._link.send(Finish(leave=False))

    def _read(self) -> None:
        try:
            for event in self._link.messages():
                self._note(event)
        except (OSError, wire.WireError) as error:
            self._note(AgentFailed(time.monotonic_ns(), str(error)))
        finally:
            self.gone = True
            self._note(None)

    def _note(self, event: Any) -> None:
        with self._lock:
            match event:
                case Pong(ping=0) if self._own_pings:
                    self._own_pings -= 1
                    return
                case RankExited(rank=rank) | StartFailed(rank=rank):
                    self._ranks.discard(rank)
                    if self._clearing:
                        self._sweep()
                case Drained():
                    self._finishing = False
                    self.cleared, self._clearing = self._clearing, False
            assert self._take is not None
            self._take(event)
