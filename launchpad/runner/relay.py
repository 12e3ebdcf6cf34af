"""A node that joins a job: stands between the head and this machine's agent, and shows the output of its own ranks."""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from launchpad.console.message import say_on_stderr
from launchpad.errors import LaunchpadError, NodeError
from launchpad.head import own_signals
from launchpad.head.nodes import PUNCTUAL_SECONDS
from launchpad.job.offer import NodeOffer
from launchpad.job.outcome import FOR_THE_HEAD, NODE_LOST, STOPPING, signal_name
from launchpad.job.spec import FoldChoice, JobSpec
from launchpad.job.succession import Lead, Peer, Roster, Rosters
from launchpad.job.world import Meeting, place
from launchpad.protocol.commands import Credit, HeadMoved, Hello, JobEnded, JoinMore, RosterChanged, Signal, Start
from launchpad.protocol.events import (
    AgentFailed,
    AgentLeft,
    ConsoleClosed,
    DoorsTried,
    LogFailed,
    RosterHeld,
    SignalPassedOn,
    StopRequested,
    Written,
)
from launchpad.protocol.typed import typed
from launchpad.runner.links import LocalAgent
from launchpad.runner.more_worlds import MoreWorlds
from launchpad.runner.own_agent import OwnAgent
from launchpad.runner.own_door import Following, HeadPlace, OwnDoor, Takeover
from launchpad.runner.own_output import OwnOutput
from launchpad.runner.search import HeadSearch
from launchpad.runner.stoppable import stopped_by
from launchpad.transport.join.client import (
    NO_ANSWER,
    HeadConnection,
    JoinRefused,
    LedElsewhere,
    no_address,
    resolve,
    why_not,
)

# How often to look for the head while it is not there.
RETRY_SECONDS = 0.2

# A job with the same nodes may still be ending where this one is about to start.
FULL_SECONDS = 10.0

# When to tell the user that we wait for the head, and how often after it was lost.
TELL_SECONDS = 3.0

# How often to see who waits at our door, and whether they still do.
LOOK_SECONDS = 0.05
LOST_SECONDS = 30.0

# After this machine's agent has gone, the head has this long to say how the job ended.
END_SECONDS = 60.0

# The same for a head that has been silent for too long: it is gone, unless we were suspended and what it said about
# that is still on its way to us.
SILENT_SECONDS = 1.0

# So many of those that would lead after the head are tried, and how long after they are known.
MOST_TRIED = 4
TRY_SECONDS = 1.0

# How long our agent may take to end what the lost head had it start.
CLEAR_SECONDS = 5.0

# How often it hears from us while there is no head.
KEEP_SECONDS = 0.2


class Relay:
    """One node's part of a job, from finding the head to the job's exit code."""

    def __init__(
        self,
        meeting: Meeting,
        secret: bytes,
        offer: NodeOffer,
        spec: JobSpec | None,
        *,
        quiet: bool,
        fold: FoldChoice | None = None,
        door: OwnDoor | None = None,
    ) -> None:
        """`spec`: what the ranks here run, whose output is then shown and filed here. None: the head shows it.

        `door`: at which others may find this launcher, if it can lead the job after the loss of its head.
        """
        self._meeting = meeting
        self._secret = secret
        self._offer = offer
        self._spec = spec
        self._quiet = quiet
        self._fold = fold
        # From whom, and what: a head, our agent, a search, ("own") this process, ("door") our door.
        self._inbox: queue.SimpleQueue[tuple[object, Any]] = queue.SimpleQueue()
        self._agent: OwnAgent | None = None  # it may serve one head after the other
        self._own_output: OwnOutput | None = None
        self._attempt = -1  # of the ranks here, under all heads
        self._earlier = 0  # how many there were under heads that were lost
        self._survives = False  # the job goes on when its head is lost
        self._tried: set[str] = set()  # the keys of those whose doors we have tried
        self._signals: frozenset[int] = frozenset()  # to handle
        # Where to look for the head at first.
        self._places = [(meeting.host, meeting.port), *meeting.elsewhere, *meeting.others]
        self._moved: HeadPlace | None = None  # where the head is that we are to join
        self._door = door
        self._more = MoreWorlds()
        if door is not None:
            door.changed = lambda head: self._inbox.put(("door", head))
        self._begin()

    def run(self, local: LocalAgent, signals_to_handle: frozenset[int]) -> int | Takeover:
        """Take part in the job. Returns its exit code, or that this launcher is to lead it.

        Raises NodeError if it can't be joined.
        """
        self._signals = signals_to_handle
        own_signals.catch(self._post, signals_to_handle)
        head = self._seek()
        if head is None:
            return self._stopped
        self._open_link = local.link
        return self._go_on(self._take_part(head, local), local)

    def follow(self, part: Following, local: LocalAgent, signals_to_handle: frozenset[int]) -> int | Takeover:
        """Follow another head, after having led the job. Returns the same as `run`."""
        assert self._door is not None
        self._signals = signals_to_handle
        own_signals.catch(self._post, signals_to_handle)
        self._door.take(part.server, part.own)
        self._offer = self._offer._replace(
            key=part.own.key, port=part.own.port, rosters=part.rosters or self._offer.rosters
        )
        self._survives, self._moved = True, part.head
        because = f": {part.failed}" if part.failed else ""
        self._lost = f"this node leads the job no more{because}"
        self._open_link = local.reopen
        return self._go_on(None, local)

    def close(self) -> None:
        """Close the door, if it is still ours."""
        if self._door is not None:
            self._door.close()

    def _go_on(self, ended: JobEnded | None, local: LocalAgent) -> int | Takeover:
        """Until the job has `ended`: follow the next head, or be it."""
        while ended is None:
            found = self._next_head()
            if isinstance(found, Takeover):
                if self._own_output is not None:
                    self._own_output.end([])
                    self._own_output = None
                self._agent = None  # it serves the head that we are now
                return found
            ended = found if isinstance(found, JobEnded) else self._take_part(found, local)
        local.close()
        if self._own_output is not None:
            self._own_output.end(ended.lines)
        else:
            for line in ended.lines:
                say_on_stderr(line, bad=True)
        return ended.code

    def _take_part(self, head: HeadConnection, local: LocalAgent) -> JobEnded | None:
        """Returns how the job ended; None if the head is lost, and the job may go on without it."""
        try:
            for note in head.notes:
                self.say(note)
            if self._agent is None:
                self._agent, self._open_link = OwnAgent(self._open_link()), local.reopen
                self._agent.deliver(functools.partial(self._put, self._agent))
            agent = self._agent
            head.begin(functools.partial(self._hear, head))
            if self._door is not None:
                self._door.begin()
            ended = self._pass_on(head, agent)
            if ended is not None:
                local.close()  # ends what is left here, before the head is told that this node is done
            elif agent.gone or self._spec is None:  # the next head may have other things for it to import
                self._close_agent()
            else:
                agent.clear()
        finally:
            self._more.close()
            head.close()
        return ended

    def _put(self, source: object, item: Any) -> None:
        self._inbox.put((source, item))

    def _hear(self, head: HeadConnection, command: Any) -> None:
        if command is not None:
            # Here, in a thread, so that time spent in the inbox doesn't count.
            self._heard, self._patience = time.monotonic(), 0.0
        self._inbox.put((head, command))

    def _close_agent(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _next_head(self) -> HeadConnection | Takeover | JobEnded:
        """The head is lost: the connection to the next one, or that we are it, or that nobody is."""
        if self._asked_to_stop():
            return self._stopped_while_searching()
        moved, self._moved = self._moved, None
        if moved is not None and not self._quiet:
            self.say(f"the job is led from {place(moved.host, moved.port)} by now: this node joins it there")
        if not self._offer.rosters:
            return self._join(moved)
        newest = self._offer.rosters[-1]
        peers = len(newest.peers)
        if newest.left_by_head:
            waiting = "it goes on without it"
        elif peers > 2:
            waiting = f"waiting for more than half of its {peers} nodes to meet"
        elif any(peer.at_endpoint for peer in newest.peers if peer.key == newest.head):
            waiting = "waiting for launchpad to be started there again"
        else:  # it listened at a port of its own: nothing that is started later can be known to stand for it
            waiting = "waiting to reach it again, as one of two nodes is no more than half"
        if not self._quiet and moved is None:
            self.say(f"{self._lost}; {waiting}")
        self._begin()
        self._earlier = self._attempt + 1
        if not self._offer.lost:
            self._offer = self._offer._replace(lost=time.time())
        if self._door is not None:
            self._door.seek(self._offer.rosters[-1].age)
        search = HeadSearch(
            *(self._meeting, self._secret, self._offer, self._door), lambda: self._inbox.put(("search", None))
        )
        found: HeadConnection | Lead | JobEnded | None = None
        if moved is not None:
            search.follow(moved)
        try:
            found = self._search(search)
            if found is not None:
                self._clear()
            if self._asked_to_stop():
                found = None
        except NodeError as error:
            return JobEnded(NODE_LOST, [str(error)])
        finally:
            search.close(found if isinstance(found, HeadConnection) else None)
        if found is None:
            return self._stopped_while_searching()
        if isinstance(found, JobEnded):
            return found
        if isinstance(found, HeadConnection):
            if self._door is not None:
                self._door.follow()
            return found
        assert self._door is not None
        lost, self._offer = self._offer.lost, self._offer._replace(lost=0.0)
        return Takeover(self._door, found, self._agent, lost)

    def _clear(self) -> None:
        """Wait until nothing is left here of the lost head. An agent that takes too long makes room for a new one."""
        until = time.monotonic() + CLEAR_SECONDS
        while self._agent is not None and not self._agent.cleared:
            left = until - time.monotonic()
            if left <= 0 or self._agent.gone:
                self._close_agent()
                return
            self._between(min(left, LOOK_SECONDS))

    def _between(self, seconds: float) -> tuple[object, Any] | None:
        """Between two heads: what comes within this time that is not about the output of the ranks that were here."""
        output, now = self._own_output, time.monotonic()
        waits = [seconds] if output is None else [seconds, *output.waits(now)]
        try:
            source, item = self._inbox.get(timeout=max(0.0, min(waits)))
        except queue.Empty:
            return None
        if source is self._agent and item is not None and output is not None:
            output.take(item)
        if type(item) is Written and output is not None:
            output.written(item.output)
        return source, item

    def _join(self, moved: HeadPlace | None) -> HeadConnection | JobEnded:
        """Join a head that has never been ours, perhaps at another place than the endpoint."""
        self._begin()
        if moved is not None:
            self._places = [(moved.host, moved.port), *self._places]
        return self._seek() or self._stopped_while_searching()

    def _asked_to_stop(self) -> bool:
        """Whether a signal was meant for a head that is gone, or came between two of them."""
        if signum := own_signals.asked_to_stop():
            self._stopped = 128 + signum
        return bool(signum)

    def _stopped_while_searching(self) -> JobEnded:
        said = [] if self._quiet else [f"stopped by {signal_name(self._stopped - 128)}; the job has no head"]
        return JobEnded(self._stopped, said)

    def _search(self, search: HeadSearch) -> HeadConnection | Lead | JobEnded | None:
        """What it finds; None if the user ends it. Raises NodeError after the join timeout."""
        start = keep = time.monotonic()
        deadline, tell = start + self._meeting.join_seconds, start + LOST_SECONDS
        while True:
            now = time.monotonic()
            found = search.look(now)
            if found is not None:
                return found
            waiting = f"for the head of the job at {self._meeting.place}: {search.reason}"
            if (peers := len(self._offer.rosters[-1].peers)) > 2:
                waiting = f"for more than half of the job's {peers} nodes to meet, or {waiting}"
            if now >= deadline:
                raise NodeError(f"waiting {waiting}; gave up after {self._meeting.join_seconds:g} s")
            if now >= tell:
                tell += LOST_SECONDS
                if not self._quiet:
                    self.say(f"waiting {waiting}")
            if self._agent is not None and now >= keep:
                keep = now + KEEP_SECONDS
                self._agent.keep()
            source, item = self._between(min(deadline, tell, now + LOOK_SECONDS) - now) or ("", None)
            if source == "own" and self._stops(item):
                return None
            if source == "door" and item is not None:
                search.follow(item)

    def _stops(self, event: Any) -> bool:
        """Whether the user ends the search by this."""
        if type(event) is not StopRequested or event.signum not in FOR_THE_HEAD:
            return False
        self._stopped = 128 + event.signum
        return True

    def _begin(self) -> None:
        """Know nothing of a head."""
        self._agent_gone = False
        self._heard = 0.0  # when the head last sent something
        self._patience = 0.0  # seconds that it gets more, as it was silent when we looked, but we looked late
        self._silence = 0.0  # seconds after which a silent head counts as gone; 0: never
        self._suspended = False  # the head is stopped, and silent until it is continued
        self._deadline: float | None = None
        self._lost = f"the head of the job at {self._meeting.place} is gone; the ranks here were stopped"

    def say(self, text: str) -> None:
        if self._own_output is not None:
            self._own_output.say(text)
        else:
            say_on_stderr(text)

    def tell(self) -> None:
        """Only make the offer, which says why this node can't take part. Raises NodeError."""
        head = self._seek()
        if head is not None:
            head.close()

    def _post(self, event: Any) -> None:
        self._inbox.put(("own", event))

    # Finding the head.

    def _seek(self) -> HeadConnection | None:
        """The connection to the head that is first found; None if the user ends the search. Raises NodeError."""
        over = threading.Event()
        self._reason = NO_ANSWER
        threading.Thread(target=self._try, args=(over,), name="seek", daemon=True).start()
        start = time.monotonic()
        deadline, tell = start + self._meeting.join_seconds, start + TELL_SECONDS
        try:
            while True:
                now = time.monotonic()
                waiting = f"waiting for the head of the job at {self._meeting.place}"
                if now >= deadline:
                    raise NodeError(f"{waiting}: {self._reason}; gave up after {self._meeting.join_seconds:g} s")
                if now >= tell:
                    tell = inf
                    if not self._quiet:
                        say_on_stderr(f"{waiting}: {self._reason}")
                try:
                    source, item = self._inbox.get(timeout=max(0.0, min(deadline, tell) - now))
                except queue.Empty:
                    continue
                if source is over and isinstance(item, HeadConnection):
                    return item
                if source is over:
                    raise NodeError(f"{self._meeting.place}: {item}")
                if self._stops(item):
                    if not self._quiet:
                        say_on_stderr(stopped_by(self._stopped - 128))
                    return None
        finally:
            over.set()

    def _try(self, over: threading.Event) -> None:
        full_until = 0.0
        while not over.is_set():
            refused = ""
            places = list(self._places)  # and those at which we are told of others
            for host, port in places:
                try:
                    found = self._dial(host, port)
                except LedElsewhere as elsewhere:
                    self._reason = str(elsewhere)
                    places += [elsewhere.place] if elsewhere.place not in places else []
                except JoinRefused as error:  # where there are several places, another may be the head's
                    refused = refused or str(error)
                except Exception as error:  # a bug must not look like a head that never comes
                    self._inbox.put((over, f"{type(error).__name__}: {error}"))
                    return
                else:
                    if found is not None:
                        self._inbox.put((over, found))
                        return
            if refused:
                now = time.monotonic()
                full_until = full_until or now + FULL_SECONDS
                if "joined already" not in refused or now >= full_until:
                    self._inbox.put((over, refused))
                    return
                self._reason = refused
            over.wait(RETRY_SECONDS)

    def _dial(self, host: str, port: int) -> HeadConnection | None:
        """Try the addresses of a host. None if there is no head at any, and then `_reason` says why.

        Raises JoinRefused, LedElsewhere.
        """
        try:
            addresses = resolve(host, port)
        except OSError as error:
            self._reason = no_address(host, error)
            return None
        for address in addresses:
            if self._door is not None:
                self._door.open(address)
                self._offer = self._offer._replace(port=self._door.peer.port)
                if (address, port) == (self._door.peer.host, self._door.peer.port):
                    continue
            try:
                return HeadConnection((address, port), self._secret, self._offer.as_json())
            except OSError as error:
                self._reason = why_not(error)
        return None

    # Taking part.

    def _pass_on(self, head: HeadConnection, agent: OwnAgent) -> JobEnded | None:
        """As `_take_part`."""
        while True:
            source, item = self._next(head)
            if source is head:
                if item is None:
                    no_head_yet = head.waits and not self._heard
                    return None if self._survives or no_head_yet else JobEnded(NODE_LOST, [self._lost])
                if type(item) is JobEnded:
                    return item
                if type(item) is HeadMoved:
                    self._moved = HeadPlace(item.host, item.port, 1 << 30)
                    return None
                if type(item) is RosterChanged:
                    self._keep(item, head)
                elif type(item) is JoinMore:
                    self._more.start(item.further, head, self._secret, self._offer)
                else:
                    self._command(item, agent)
            elif source is agent:
                self._event(item, head)
            elif source == "doors":
                head.send(item)
            elif source == "own":
                if not self._heard and type(item) is StopRequested and item.signum in STOPPING:
                    said = [] if self._quiet else [stopped_by(item.signum)]
                    return JobEnded(128 + item.signum, said)  # the others go on waiting for their nodes
                self._own(item, head, agent)

    def _next(self, head: HeadConnection) -> tuple[object, Any]:
        while True:
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                return head, None
            if self._is_silent(now):
                return head, None
            ends = [self._deadline, self._silence_ends]
            waits = [end - now for end in ends if end is not None]
            if self._earlier and not self._heard and self._agent is not None:  # the head still waits for others
                self._agent.keep()
                waits.append(KEEP_SECONDS)
            if self._own_output is not None:
                waits += self._own_output.waits(now)
            try:
                return self._inbox.get(timeout=max(0.0, min(waits)) if waits else None)
            except queue.Empty:
                continue

    @property
    def _silence_ends(self) -> float | None:
        """When a head that goes on being silent counts as gone."""
        if not self._silence or self._suspended or self._agent_gone:
            return None
        return self._heard + self._silence + self._patience

    def _is_silent(self, now: float) -> bool:
        """Whether the head has been silent for too long. If we look late, it gets another moment, once."""
        ends = self._silence_ends
        if ends is None or now < ends:
            return False
        if now <= ends + PUNCTUAL_SECONDS or self._patience:
            return True
        self._patience = now - ends + SILENT_SECONDS
        return False

    def _keep(self, changed: RosterChanged, head: HeadConnection) -> None:
        rosters, before = typed(Rosters, changed.rosters), self._offer.rosters
        newest = rosters[-1]
        self._offer = self._offer._replace(rosters=rosters, lost=0.0)
        self._survives = changed.survives
        head.send(RosterHeld(time.monotonic_ns(), newest.change))
        if newest.left_by_head:
            self._lost = f"{newest.earlier[-1].name} has left the job, which it led"
            return
        leader = next(peer for peer in newest.peers if peer.key == newest.head)
        if before and before[-1].head != newest.head and not self._quiet:
            self.say(f"the job goes on, led from {leader.name}")
        host, port = (leader.host, leader.port) if leader.host else (self._meeting.host, self._meeting.port)
        self._lost = f"the head of the job at {place(host, port)} is gone; the ranks here were stopped"
        if self._door is not None:
            self._door.led_from(HeadPlace(host, port, newest.term))
            self._try_doors(newest)

    def _try_doors(self, roster: Roster) -> None:
        """See whether we reach those who would lead first, if the head were lost."""
        others = [peer for peer in roster.peers if peer.host and peer.key not in (roster.head, self._offer.key)]
        new = [peer for peer in others[:MOST_TRIED] if peer.key not in self._tried]
        self._tried |= {peer.key for peer in new}
        if new and self._survives:
            threading.Thread(target=self._reach, args=(new,), name="reach", daemon=True).start()

    def _reach(self, peers: Sequence[Peer]) -> None:
        time.sleep(TRY_SECONDS)  # the ranks are about to start
        missed = []
        for peer in peers:
            try:
                HeadConnection((peer.host, peer.port), self._secret, None).close()
            except OSError as error:
                missed.append((peer.key, why_not(error)))
            except JoinRefused as error:
                missed.append((peer.key, str(error)))
        if missed:
            self._inbox.put(("doors", DoorsTried(time.monotonic_ns(), missed)))

    def _command(self, command: Any, agent: OwnAgent) -> None:
        if type(command) is Hello:
            self._silence = command.silence
        elif type(command) is Signal and command.signum in (signal.SIGSTOP, signal.SIGCONT):
            self._suspended = command.signum == signal.SIGSTOP
        if self._spec is not None:
            if type(command) is Credit:
                return
            if type(command) is Start and command.ranks:
                self._attempt = self._earlier + command.attempt
                shown = command._replace(attempt=self._attempt)
                if self._own_output is None:
                    try:
                        self._own_output = OwnOutput(self._spec, shown, self._post, self._fold)
                    except LaunchpadError as error:  # --log-dir can't be written
                        self._put(agent, AgentFailed(time.monotonic_ns(), str(error)))
                        return
                else:
                    self._own_output.restart(shown)
                self._own_output.give = agent.send
                command = command._replace(typed=os.isatty(0), terminal=self._own_output.terminal)
        agent.send(command)

    def _event(self, event: Any, head: HeadConnection) -> None:
        if event is None:
            if not self._agent_gone:
                self._agent_gone = True
                now = time.monotonic()
                # The agent leaves if it hears nothing from the head for so long; its timer runs a little after ours.
                silent = 0 < self._silence * 0.9 < now - self._heard
                self._deadline = now + (SILENT_SECONDS if silent else END_SECONDS)
                head.send(AgentLeft(time.monotonic_ns()))
            return
        for one in (event,) if self._own_output is None else self._own_output.take(event):
            head.send(one)

    def _own(self, event: Any, head: HeadConnection, agent: OwnAgent) -> None:
        match event:
            case StopRequested(signum=signal.SIGTSTP):
                say_on_stderr("this job can be suspended only where its head runs")
            case StopRequested(signum=signal.SIGCONT):
                pass
            case StopRequested(signum=signum) if signum in FOR_THE_HEAD:
                head.send(event)
            case StopRequested(signum=signum):
                agent.send(Signal(signum))
                head.send(SignalPassedOn(time.monotonic_ns(), signum))
                self._more.signal(signum)
            case ConsoleClosed():
                head.send(StopRequested(time.monotonic_ns(), signal.SIGHUP))
            case LogFailed(path=path, reason=reason) if self._own_output is not None:
                self._own_output.say(f"{path} can't be written: {reason}")
            case Written(output=output) if self._own_output is not None:
                self._own_output.written(output)
