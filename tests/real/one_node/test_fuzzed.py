"""Whatever a node says of what messages declare, the head ends in good order, and no other node is lost by it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.job.limits import Limits
from launchpad.job.plan import Master, NodePlacement
from launchpad.job.spec import JobSpec, Target
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, DumpStacks, Finish, Listen, Signal, Start
from launchpad.protocol.events import (
    EVENTS,
    SILENT,
    Drained,
    Listening,
    NodeLost,
    RankExited,
    RankStarted,
    StackDump,
    StacksRequested,
)
from launchpad.runner.conductor import Conductor
from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets import outlets_of
from launchpad.transport.memory import MemoryLink
from tests.support.agents import DEADLINE, READY
from tests.support.declared import ANYTHING, declared

SAID = [event for event in EVENTS if event.about]


class Node:
    """The agent of one rank, which does what it is told; `says`: what it says besides, when its rank has started."""

    def __init__(self, rank: int, says: list[Any], over: threading.Event) -> None:
        self.link = MemoryLink(f"n{rank}", remote=True)
        self._rank = rank
        self._says = says
        self._over = over  # the other node has said what it says
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    def _play(self) -> None:
        self.link.say(READY)
        while not isinstance(command := self.link.heard.get(timeout=DEADLINE), Finish | None):
            self._do(command)
        self.link.say(Drained(0))
        self.link.hang_up()

    def end(self) -> None:
        """The head has hung up, if it has not told us to finish."""
        self.link.heard.put(None)
        self.thread.join(DEADLINE)

    def _do(self, command: Command) -> None:
        rank, say = self._rank, self.link.say
        match command:
            case Start():
                say(RankStarted(1, rank, 70 + rank))
                for event in self._says:
                    say(event)
                if rank == 0:
                    assert self._over.wait(DEADLINE)
                say(RankExited(2, rank, 0, 0, False))
            case DumpStacks(number=number):
                say(StackDump(3, rank, number, 70 + rank, SILENT, [], "S", "", 0.0, False, 0, 0, {}, ""))
            case Listen():
                say(Listening(4, [-1]))
            case Signal():
                self._over.set()


class Watch:
    """A sink: which nodes are lost, and when the second one has said what it says."""

    deadline: float | None = None

    def __init__(self, over: threading.Event) -> None:
        self.lost: dict[int, str] = {}
        self._over = over

    def on(self, event: Any) -> bool:
        if isinstance(event, NodeLost):
            self.lost[event.node] = event.reason
        if isinstance(event, NodeLost) or (isinstance(event, RankExited) and event.rank == 1):
            self._over.set()
        return False

    def tick(self, now: float) -> None:
        """Nothing is due."""

    def close(self) -> None:
        """Nothing is held open."""


class Notes:
    """Where outlets and notes show their lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, *, bad: bool = False) -> None:  # noqa: ARG002
        self.lines.append(text)


def run(folder: Path, says: list[Any], backend: Any) -> tuple[int, dict[int, str], list[str]]:
    """A job of two nodes with all of its reports, of which the second says this. Its exit code, who was lost, notes."""
    over, head, notes = threading.Event(), BringUp(), Notes()
    nodes = [Node(0, [], over), Node(1, says, over)]
    facts = head.connect([node.link for node in nodes], count_gpus=False)
    limits = Limits(stall_timeout=1000.0)
    spec = JobSpec(Target("program", "/bin/true"), limits=limits, backend=backend, sample=1000.0)
    places = [NodePlacement(f"n{node}", 1, "python3", "/") for node in range(2)]
    planner = Planner(spec, "abc", facts, places, master=Master("127.0.0.1", 29501))
    reports = ReportOptions(
        junit=str(folder / "junit.xml"), report=str(folder / "report.html"), events=str(folder / "events.jsonl")
    )
    outlets = outlets_of(reports, notes, head.post, {})
    conductor = Conductor(head, planner, notes.say, verbose=True, outlets=outlets)
    watch = Watch(over)
    conductor.begin([watch])
    head.post(StacksRequested(0, 0, native=False, full=True))
    try:
        conductor.run()
        ended = conductor.conclude()
        conductor.over()
        conductor.close(ended)
    finally:
        for node in nodes:
            node.end()
    return ended.code, watch.lost, [*notes.lines, *ended.lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For records and reports."""
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), backend=st.sampled_from(["gloo", "mpi"]))
def test_whatever_is_declared_a_node_ends_only_itself(
    folder: Path, kind: Any, data: st.DataObject, backend: Any
) -> None:
    says = data.draw(st.lists(declared(kind, 1), min_size=1, max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        code, lost, lines = run(folder, says, backend)
    assert 0 <= code <= 255
    assert lost.keys() <= {1}, lost
    assert not [line for line in lines if "can't be written" in line], lines


@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_field_of_another_value_is_a_malformed_frame(kind: Any, data: st.DataObject) -> None:
    """Or one that there is: both are drawn from all of JSON."""
    message = data.draw(declared(kind))
    place = data.draw(st.integers(0, len(kind._fields) - 1 - (kind.raw is not None)))
    odd = data.draw(ANYTHING)
    if kind.raw is not None:
        return
    changed = [*message[:place], odd, *message[place + 1 :]]
    with contextlib.suppress(wire.WireError):
        (found,) = wire.Decoder().feed(wire.encode(kind._make(changed)))
        assert type(found) is kind
