"""head/checkpoints: what is in a checkpoint, and when there is one."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Collection
from typing import Any

import pytest

from launchpad.head import checkpoints
from launchpad.head.bringup import BringUp
from launchpad.head.checkpoints import Checkpoints, HeadState
from launchpad.head.nodes import Node, Nodes
from launchpad.head.planner import Planner
from launchpad.head.supervisor import Supervisor
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.spec import JobSpec, Target
from launchpad.output.mark import SinkMark
from launchpad.protocol.commands import EventsTaken, Fence, Finish, Ping, Start, StopBy
from launchpad.protocol.events import (
    AgentReady,
    Drained,
    HoldEnded,
    LinkHeld,
    NodeJoined,
    NotResumable,
    RankExited,
    RankStarted,
)
from launchpad.transport.held_link import HeldLink, LinkState
from launchpad.transport.memory import MemoryLink

DEADLINE = 30.0
READY = AgentReady(0, 0.0, 1, "node0", 2, 0, None, 1 << 20, 1 << 20, 29501)


class Keeper:
    """Remembers checkpoints."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.saved: list[HeadState] = []
        self.held: list[Collection[LinkState]] = []
        self.fails = False

    def hold(self, links: Collection[LinkState]) -> None:
        self.held.append(links)

    def save(self, head: bytes, mark: SinkMark) -> None:  # noqa: ARG002
        if self.fails:
            raise OSError(28, "No space left on device")
        self.saved.append(pickle.loads(head))

    def drop(self) -> None:
        self.saved.clear()


class Journal:
    """A sink that has written at once, or when the test says so."""

    deadline = None

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.late: list[SinkMark] | None = None

    def on(self, event: Any) -> bool:
        if isinstance(event, SinkMark):
            event.awaits("journal", None)
            if self.late is None:
                event.written({})
            else:
                self.late.append(event)
        else:
            self.told.append(event)
        return False


class Job:
    """Two ranks on a host whose far end the test plays, from its beginning or from a checkpoint."""

    def __init__(self, before: HeadState | None = None, keeper: Keeper | None = None, **limits: Any) -> None:
        self.keeper = keeper or Keeper()
        self.journal = Journal()
        self.far = MemoryLink("h", remote=True)
        self.dialled: queue.SimpleQueue[Any] = queue.SimpleQueue()
        state = before.links[0] if before else None
        self.link = HeldLink("h", ("", 22, "python3", "", "", False), self._dial, 60.0, 0.0, state)
        if state is not None:
            self.far.say(LinkHeld(0, "/there", state.known))
            self.link.take_over()
        else:
            self.far.say(LinkHeld(0, "/there", 0))
        self.head = BringUp()
        self.head.nodes = Nodes([self.link], self.head.inbox.put, 0.0)
        self.head.nodes.read()
        spec = JobSpec(Target("program", "true"), nproc=2, limits=Limits(keep_running=60.0, **limits))
        planner = before.planner if before else Planner(spec, "abc", [READY])
        self.supervisor = Supervisor(self.head, planner, [self.journal], keeper=self.keeper, before=before)
        self.before = before

    def _dial(self, asked: Any) -> MemoryLink:
        self.dialled.put(asked)
        return self.far

    def begin(self) -> None:
        if self.before is None:
            self.supervisor._start()
        else:
            self.supervisor._go_on(self.before)

    def turns(self, until: Any) -> None:
        """Let the loop turn until this is so."""
        for _ in range(1000):
            if until():
                return
            self.supervisor._round()
        raise AssertionError

    def heard(self) -> list[Any]:
        """What the far end has got, but for what every job says all the time."""
        found = []
        while not self.far.heard.empty():
            found.append(self.far.heard.get())
        return [one for one in found if not isinstance(one, Ping | StopBy | EventsTaken)]

    def says(self, *events: Any) -> None:
        """The host says this, and it is in a checkpoint."""
        got = self.link.got + len(events)
        for event in events:
            self.far.say(event)
        self.turns(lambda: self.keeper.saved and self.keeper.saved[-1].links[0].got == got)


def test_ranks_start_when_a_checkpoint_knows_of_it() -> None:
    job = Job()
    job.begin()
    assert job.heard() == []
    job.turns(lambda: job.keeper.saved)
    (start,) = job.heard()
    assert isinstance(start, Start)
    state = job.keeper.saved[0]
    assert start in state.links[0].commands
    assert job.keeper.held, "it is known where they are"


def test_another_head_has_the_same_job() -> None:
    """In the middle of a restart: the exit of one rank is known, the end of the other is not."""
    job = Job(max_restarts=RestartLimit(1))
    job.begin()
    job.says(RankStarted(1, 0, 10), RankStarted(1, 1, 11), RankExited(2, 0, 3, 0, False))
    job.turns(lambda: any(type(one).__name__ == "Signal" for one in job.heard()))
    job.turns(lambda: job.keeper.saved[-1].hub["_machine"].phase == "stopping")
    state = pickle.loads(pickle.dumps(job.keeper.saved[-1]))
    assert state.started == {0, 1}

    following = Job(state)
    following.begin()
    machine = following.supervisor.machine
    assert (machine.phase, set(machine.running)) == ("stopping", {1})
    assert following.dialled.get()["resume"]["taken"] == state.links[0].got
    following.says(RankExited(3, 1, -15, 0, False))
    following.turns(lambda: any(isinstance(one, Finish) for one in following.heard()))
    following.says(Drained(4))
    following.turns(lambda: machine.attempt == 1)
    following.turns(lambda: any(isinstance(one, Start) and one.attempt == 1 for one in following.heard()))


def test_a_host_that_comes_back_has_none_of_before() -> None:
    """One was begun while it was away: that counts the events of the lost link, and is left out."""
    job = Job()
    job.begin()
    job.says(RankStarted(1, 0, 10), RankStarted(1, 1, 11))
    (part,) = [one for one in job.supervisor._parts if isinstance(one, Checkpoints)]
    part._want()
    job.far = MemoryLink("h", remote=True)
    job.far.say(LinkHeld(0, "/again", 0))
    job.link = HeldLink("h", ("", 22, "python3", "", "", False), job._dial, 60.0, 0.0)
    job.head.nodes.adopt(0, Node(job.link, job.head.inbox.put))
    part.on(-1, NodeJoined(0, 0, "h", 2))
    job.link.send(Fence(7))
    job.turns(lambda: Fence(7) in job.heard())
    assert job.keeper.saved[-1].links[0].got == 0


def test_the_end_of_the_agent_is_in_the_last_one() -> None:
    job = Job()
    job.begin()
    job.says(RankStarted(1, 0, 10), RankStarted(1, 1, 11))
    job.far.say(RankExited(2, 0, 0, 0, False))
    job.far.say(RankExited(2, 1, 0, 0, False))
    job.far.say(HoldEnded(3, ""))
    job.turns(lambda: not job.supervisor._goes_on())
    for part in job.supervisor._parts:
        part.close()
    state = job.keeper.saved[-1]
    assert (state.links[0].ended, state.open) == (True, set())
    assert state.hub["_machine"].phase == "over"


def test_without_room_for_them_the_job_goes_on() -> None:
    job = Job()
    job.keeper.fails = True
    job.begin()
    job.turns(lambda: any(isinstance(one, NotResumable) for one in job.journal.told))
    (told,) = [one for one in job.journal.told if isinstance(one, NotResumable)]
    assert told.reason == "a checkpoint can't be written: No space left on device"
    assert [type(one) for one in job.heard()] == [Start]


def test_one_that_was_given_up_is_not_kept_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes it when commands have passed that it doesn't have."""
    monkeypatch.setattr(checkpoints, "MOST_SECONDS", 0.0)
    job = Job()
    job.journal.late = []
    job.begin()
    job.turns(lambda: any(isinstance(one, NotResumable) for one in job.journal.told))
    assert [type(one) for one in job.heard()] == [Start]
    for mark in job.journal.late:
        mark.written({})
    assert job.keeper.saved == []


def test_there_are_none_if_nobody_could_go_on() -> None:
    job = Job(keeper=Keeper("its results are for this program"))
    job.begin()
    assert [type(one) for one in job.heard()] == [Start]
    (told,) = [one for one in job.journal.told if isinstance(one, NotResumable)]
    assert told.reason == "its results are for this program"
    assert (len(job.keeper.held), job.keeper.saved) == (1, [])
