"""The agent's parts: which command reaches which, what loads them, and when they are told of the time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent import parts
from launchpad.agent.mpi.own_worlds import OwnWorlds
from launchpad.agent.mpi.part import NodeMpi
from launchpad.agent.outbox import Outbox
from launchpad.agent.part import AgentHub, AgentPart
from launchpad.agent.parts import FEATURES, Feature, Parts
from launchpad.agent.poll import Poll, earliest
from launchpad.agent.ranks import sampler
from launchpad.agent.ranks.debuggers import Debuggers
from launchpad.agent.ranks.prompt import PromptWatch
from launchpad.agent.ranks.rank import Rank
from launchpad.protocol import commands
from launchpad.protocol.commands import Debug, Ping, Profile, Sample, Start

# What the loop does itself, as every job needs it.
OF_THE_LOOP = (
    *(commands.Hello, commands.Ping, commands.Fence, commands.Credit, commands.Start, commands.StartMore),
    *(commands.StdinData, commands.HoldPort, commands.HoldPorts, commands.Signal, commands.SignalRank),
    *(commands.SignalAgent, commands.Finish),
)
# What is sent to others than an agent.
NOT_FOR_AGENTS = (
    *(
        commands.KeeperRequest,
        commands.Check,
        commands.JobEnded,
        commands.RosterChanged,
        commands.HeadMoved,
        commands.JoinMore,
    ),
    *(commands.Resume, commands.EventsTaken, commands.LetGo),
)


class Recorder(AgentPart):
    """Writes down what it is told."""

    deadline: float | None = None

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self.told: list[Any] = []

    def on(self, command: Any) -> None:
        self.told.append(command)

    def tick(self, now: float) -> None:
        self.told.append(now)

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        environ[type(self).__name__] = environ.get("Recorder", "")

    def environ(self, rank: int) -> dict[str, str]:
        return {"SHARED": type(self).__name__, type(self).__name__: str(rank)}


class Second(Recorder):
    """Another one."""


FIRST = Feature(__name__, "Recorder", (Debug, Profile))
SECOND = Feature(__name__, "Second", (Sample,), lambda start: start.attempt > 0)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[AgentHub]:
    poll = Poll()
    made = AgentHub(poll, Outbox(-1, poll), str(tmp_path))
    yield made
    made.channel.close()
    poll.close()


@pytest.fixture
def some(hub: AgentHub) -> Parts:
    return Parts(hub, (FIRST, SECOND))


def start(attempt: int = 0, **others: Any) -> Start:
    values = (
        dict.fromkeys(Start._fields, "") | {"attempt": attempt, "ranks": [], "typed": False, "terminal": []} | others
    )
    return Start(**values)


def test_a_command_reaches_the_part_that_takes_its_type(some: Parts) -> None:
    for command in (Debug(1), Sample(2, True), Profile(3, [0], 1.0), Debug(4)):
        some.on(command)
    first, second = some
    assert isinstance(first, Recorder)
    assert isinstance(second, Second)
    assert first.told == [Debug(1), Profile(3, [0], 1.0), Debug(4)]
    assert second.told == [Sample(2, True)]


def test_a_part_is_loaded_with_its_first_command(some: Parts) -> None:
    assert list(some) == []
    some.on(Ping(0))
    assert list(some) == []
    some.on(Sample(1, True))
    assert [type(part) for part in some] == [Second]


def test_parts_are_told_in_the_order_of_the_table(some: Parts) -> None:
    some.on(Sample(1, True))
    some.on(Debug(1))
    assert [type(part) for part in some] == [Recorder, Second]
    environ = {"Recorder": "x"}
    some.starting(start(), environ)
    assert environ == {"Recorder": "x", "Second": "x"}
    assert some.environ(3) == {"SHARED": "Second", "Recorder": "3", "Second": "3"}


def test_ranks_that_start_load_what_begins_with_them(some: Parts) -> None:
    some.starting(start(0), {})
    assert list(some) == []
    environ: dict[str, str] = {}
    some.starting(start(1), environ)
    assert environ == {"Second": ""}


def test_a_part_is_called_when_its_deadline_has_come(some: Parts) -> None:
    some.on(Debug(1))
    some.on(Sample(1, True))
    assert some.deadline is None
    first, second = some
    assert isinstance(first, Recorder)
    assert isinstance(second, Second)
    first.deadline, second.deadline = 5.0, 3.0
    assert some.deadline == 3.0
    some.tick(2.9)
    some.tick(3.0)
    assert (first.told[1:], second.told[1:]) == ([], [3.0])
    some.tick(7.0)
    assert (first.told[1:], second.told[1:]) == ([7.0], [3.0, 7.0])


def test_the_earliest_of_no_deadlines_is_none() -> None:
    assert earliest([]) is earliest([None, None]) is None
    assert earliest([None, 2.0, 0.0]) == 0.0


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_feature_of_the_table_is_a_part(feature: Feature, hub: AgentHub) -> None:
    found = getattr(importlib.import_module(feature.module, parts.__package__), feature.name)
    part = found(hub)
    assert isinstance(part, AgentPart)
    assert part.deadline is None
    assert list(part.end()) == []
    part.close()


def test_each_command_has_one_place() -> None:
    routed = [kind for feature in FEATURES for kind in feature.takes]
    assert sorted(kind.__name__ for kind in (*routed, *OF_THE_LOOP, *NOT_FOR_AGENTS)) == sorted(
        kind.__name__ for kind in commands.COMMANDS
    )


def test_only_what_they_wait_for_begins_with_ranks() -> None:
    """A debugger, the person who types, and MPI without a world, which a rank that is alone doesn't lack."""

    def begun(**of_start: Any) -> list[str]:
        return [feature.name for feature in FEATURES if feature.begins(start(**of_start))]

    alone, two = {"environ": {"WORLD_SIZE": "1"}}, {"environ": {"WORLD_SIZE": "2"}}
    assert begun(ranks=[{"rank": 0, "debug": False, **alone}]) == []
    assert begun(ranks=[{"rank": 0, "debug": False, **two}]) == ["OwnWorlds"]
    assert begun(ranks=[{"rank": 0, "debug": False, **two}, {"rank": 1, "debug": True, **two}]) == [
        *("Debuggers", "OwnWorlds")
    ]
    assert begun(typed=True) == ["PromptWatch"]


# Parts, as the loop uses them.


class Said(Outbox):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def say(self, event: Any) -> None:
        self.events.append(event)


def test_only_the_rank_that_gets_what_is_typed_is_watched(hub: AgentHub) -> None:
    watch, one, other = PromptWatch(hub), Rank(0, 101, None), Rank(1, 102, None)
    other.typed = True
    watch.started(one)
    assert watch.deadline is None
    watch.started(other)
    assert watch.deadline is not None
    watch.exited(one, 0)
    assert watch.deadline is not None
    watch.exited(other, 0)
    assert watch.deadline is None


def test_a_rank_that_does_not_run_has_no_debugger(hub: AgentHub) -> None:
    hub.outbox = said = Said()
    Debuggers(hub).on(Debug(3))
    assert [event[1:] for event in said.events] == [(3, "it is not running")]


def test_a_rank_that_waits_for_its_debugger_has_no_deadline(hub: AgentHub) -> None:
    debuggers = Debuggers(hub)
    debuggers.starting(start(ranks=[{"rank": 0, "debug": True}]), {})
    assert debuggers.deadline is None
    hub.outbox = said = Said()
    debuggers.exited(Rank(0, 101, None), 1)
    assert [event[1:] for event in said.events] == [(0, "it has exited")]


def test_a_sample_of_no_ranks_is_reported_at_once(hub: AgentHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.GpuReader, "begin", lambda _: None)
    hub.outbox = said = Said()
    taken = sampler.Sampler(hub)
    taken.on(Sample(7, True))
    assert taken.deadline is None
    assert [event.number for event in said.events] == [7]


def test_ranks_with_worlds_of_their_own_are_told_once(hub: AgentHub) -> None:
    hub.outbox = said = Said()
    worlds = OwnWorlds(hub)
    entries = [{"rank": rank, "argv": ["solve.py"], "python": True} for rank in (0, 1)]
    worlds.starting(start(ranks=entries), {})
    first = worlds.deadline
    assert first is not None
    one, other = Rank(0, 101, None), Rank(1, 102, None)
    hub.ranks.update({101: one, 102: other})
    Path(hub.folder, "1.own_world").touch()
    worlds.tick(first)
    assert worlds.deadline is not None
    assert worlds.deadline > first
    worlds.exited(other, 0)
    assert [event.rank for event in said.events] == [1]
    Path(hub.folder, "0.own_world").touch()
    worlds.exited(one, 0)
    assert [event.rank for event in said.events] == [1, 0]


def test_there_is_no_mpi_before_there_is_a_world(hub: AgentHub) -> None:
    hub.outbox = said = Said()
    mpi = NodeMpi(hub)
    mpi.on(commands.BarrierOut(0, "", {}))
    environ = {"PMI_RANK": "3"}
    mpi.starting(start(), environ)
    mpi.finish(leave=True)
    assert (hub.mpi, environ, said.events) == (None, {"PMI_RANK": "3"}, [])
    world = commands.MpiWorld(0, "job", 1, 0, [5], [0], ["a"], [1], "", [], {}, "", "")
    mpi.on(world)
    assert hub.mpi is not None
    assert hub.mpi.has(5)
    mpi.starting(start(), environ)
    assert environ == {}, "it is another launcher's"
    assert mpi.environ(4) == {}
