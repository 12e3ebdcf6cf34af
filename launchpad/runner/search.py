"""Looks for who leads a job after its head is lost: asks at the doors of the others, and waits at some of them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from launchpad.job.offer import NodeOffer
from launchpad.job.succession import Age, Dial, Lead, Sight, Wait, succession
from launchpad.job.world import Meeting, place
from launchpad.named import NamedTuple
from launchpad.protocol.commands import JobEnded
from launchpad.protocol.typed import typed
from launchpad.runner.own_door import HeadPlace, OwnDoor
from launchpad.transport.join.client import (
    NO_ANSWER,
    HeadConnection,
    JoinRefused,
    LedElsewhere,
    no_address,
    resolve,
    why_not,
)

# How long to pause before a door is asked again: twice as long each time, as most of them notice within a moment that
# the head is gone. Where there are many, longer. So late those are asked at first who are to come to us.
FIRST_PAUSE_SECONDS = 0.02
PAUSE_SECONDS = 0.1
PAUSE_OF_EACH = 0.01

# How many doors are asked at the same time.
MOST_ASKED = 16

# How long a launcher that could lead waits for others that may come to it, and for those before it that answer.
GATHER_SECONDS = 0.5
HESITATE_SECONDS = 3.0

Answer = dict[str, Any] | Literal["refused"] | None  # None: nothing yet, or no answer


class AskedDoor(NamedTuple):
    """A door."""

    key: str  # its launcher's; "": not on the rosters
    places: tuple[tuple[str, int], ...]  # where it may be


class HeadSearch:
    """Of one launcher that has lost its head."""

    def __init__(
        self, meeting: Meeting, secret: bytes, offer: NodeOffer, door: OwnDoor | None, heard: Callable[[], None]
    ) -> None:
        """`offer`: with the rosters that this launcher holds. `heard` is called, in threads, when it is time to `look`.

        `door`: ours, at which others wait; without it, this launcher can't lead.
        """
        self._secret = secret
        self._offer = offer
        self._door = door
        self._heard = heard
        self._newest = offer.rosters[-1]
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()  # guards the next two
        self._waits: dict[str, HeadConnection | None] = {}  # at whose doors; None: being dialled
        self._over = False
        self._ages: dict[str, Age] = {}  # what those that have no head hold, as far as we know
        self._enough_since: float | None = None
        self._endpoint = endpoint = ((meeting.host, meeting.port), *meeting.elsewhere)
        doors = {
            peer.key: AskedDoor(peer.key, endpoint if peer.at_endpoint else ((peer.host, peer.port),))
            for peer in self._newest.peers
            if peer.port and peer.key != offer.key
        }
        if not any(peer.at_endpoint for peer in self._newest.peers):
            doors[""] = AskedDoor("", endpoint)
        doors |= {place(*one): AskedDoor(place(*one), (one,)) for one in meeting.others}
        self._doors = doors
        self.reason = NO_ANSWER  # why there is no head at the endpoint
        self._to_ask: queue.SimpleQueue[tuple[AskedDoor, float]] = queue.SimpleQueue()  # and after which pause
        after = {peer.key for peer in itertools.dropwhile(lambda peer: peer.key != offer.key, self._newest.peers)}
        for key, target in doors.items():
            self._to_ask.put((target, PAUSE_SECONDS if key in after else 0.0))
        for number in range(min(len(doors), MOST_ASKED)):
            threading.Thread(target=self._ask_all, name=f"ask-{number}", daemon=True).start()

    def close(self, found: HeadConnection | None = None) -> None:
        """Ask no more, and wait nowhere."""
        with self._lock:
            self._over = True
            waits, self._waits = self._waits, {}
        for connection in waits.values():
            if connection is not None and connection is not found:
                connection.close()

    # In the launcher's own thread.

    def look(self, now: float) -> HeadConnection | Lead | JobEnded | None:
        """The connection to a head, that this launcher is to lead, or how the job ended; None: nothing is known yet."""
        if ended := self._ended():
            return ended
        for key, connection in self._waits.copy().items():
            if connection is None:
                continue
            if connection.ended:
                self._leave(key)
            elif not connection.waits or connection.has_spoken:
                return connection
        waiting = self._door.waiting() if self._door is not None else {}
        leading, seeking = self._leading(), self._seeking()
        hesitated = self._enough_since is not None and now - self._enough_since > HESITATE_SECONDS
        match succession(self._offer.key, self._offer.rosters, Sight(waiting, leading, seeking, hesitated)):
            case Lead() as lead if self._door is not None and self._door.peer.port:
                self._enough_since = self._enough_since or now
                if now - self._enough_since > GATHER_SECONDS or self._nobody_else_comes(waiting.keys()):
                    return lead
            case Dial(key=key):
                self._wait_at((key,))
            case Wait(at=at, enough=enough):
                self._wait_at(at)
                self._enough_since = (self._enough_since or now) if enough else None
        return None

    def _ended(self) -> JobEnded | None:
        """What a head says that had come to the end of the job when we lost it."""
        for answer in self._answers.copy().values():
            if isinstance(answer, dict) and "ended" in answer:
                with contextlib.suppress(TypeError):
                    code, lines = typed(tuple[int, list[str]], answer["ended"])
                    if typed(int, answer.get("term")) >= self._newest.term:
                        return JobEnded(code, lines)
        return None

    def _leading(self) -> dict[str, int]:
        """Those that lead, but for heads of terms that are over."""
        found = {key: answer.get("leads") for key, answer in self._answers.copy().items() if isinstance(answer, dict)}
        return {key: term for key, term in found.items() if type(term) is int and term >= self._newest.term}

    def _seeking(self) -> dict[str, Age]:
        found = {key: self._ages[key] for key in self._waits.copy() if key in self._ages}
        for key, answer in self._answers.copy().items():
            if not isinstance(answer, dict) or "seeks" not in answer:
                continue
            if answer["seeks"] is not None:
                with contextlib.suppress(TypeError):
                    found[key] = typed(Age, answer["seeks"])
            elif key == (self._newest.head if not self._newest.left_by_head else ""):
                # Started in its place: all meet there, as without it there may be too few.
                found[key] = (self._newest.term, self._newest.change + 1, self._newest.head)
        self._ages |= found
        return found

    def _nobody_else_comes(self, waiting: Any) -> bool:
        left = {peer.key for peer in self._newest.peers} - set(waiting) - {self._offer.key, self._newest.head}
        return all(self._answers.get(key) == "refused" for key in left)

    # At the doors.

    def _wait_at(self, keys: Sequence[str]) -> None:
        for key in self._waits.copy().keys() - set(keys):
            self._leave(key)
        for key in keys:
            with self._lock:
                if key in self._waits:
                    continue
                self._waits[key] = None
            threading.Thread(target=self._dial, args=(key,), name=f"dial-{key}", daemon=True).start()

    def _leave(self, key: str) -> None:
        with self._lock:
            connection = self._waits.pop(key, None)
        if connection is not None:
            connection.close()

    def _dial(self, key: str) -> None:
        found = self._connect(self._doors[key], self._offer.as_json())
        if isinstance(found, HeadConnection):
            found.watch(self._heard)
        with self._lock:
            wanted = key in self._waits and self._waits[key] is None
            if wanted:
                if isinstance(found, HeadConnection):
                    self._waits[key] = found
                else:
                    del self._waits[key]
                    self._answers[key] = None  # until it answers again
        if isinstance(found, HeadConnection) and not wanted:
            found.close()
        self._heard()

    def _ask_all(self) -> None:
        while not self._over:
            target, pause = self._to_ask.get()
            time.sleep(pause)
            found = self._connect(target, None)
            answer = found.answer if isinstance(found, HeadConnection) else found
            if isinstance(found, HeadConnection):
                found.close()
            before = self._answers.get(target.key)
            self._answers[target.key] = answer
            if isinstance(answer, dict) and "led" in answer:
                with contextlib.suppress(TypeError):
                    self.follow(typed(HeadPlace, [*answer["led"], answer.get("term")]))
            if answer != before:
                self._heard()
            pause = max(FIRST_PAUSE_SECONDS, min(2 * pause, PAUSE_SECONDS + PAUSE_OF_EACH * len(self._doors)))
            self._to_ask.put((target, pause))

    def follow(self, head: HeadPlace) -> None:
        """Ask there too, from where the job is said to be led by now."""
        key = f"{head.host}:{head.port}"
        if head.term >= self._newest.term and key not in self._doors:  # our newest roster may never have counted
            self._doors = {**self._doors, key: AskedDoor(key, ((head.host, head.port),))}
            self._to_ask.put((self._doors[key], 0.0))

    def _connect(self, target: AskedDoor, offer: dict[str, Any] | None) -> HeadConnection | Literal["refused"] | None:
        """The connection to it; "refused" if its machine says that it is not there."""
        refused, reason = False, ""
        for host, port in target.places:
            try:
                addresses = resolve(host, port)
            except OSError as error:
                reason = no_address(host, error)
                continue
            for address in addresses:
                try:
                    return HeadConnection((address, port), self._secret, offer)
                except OSError as error:
                    refused, reason = isinstance(error, ConnectionRefusedError), why_not(error)
                except (JoinRefused, LedElsewhere) as error:
                    reason = str(error)
        if target.places == self._endpoint:
            self.reason = reason
        return "refused" if refused else None
