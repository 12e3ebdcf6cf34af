"""head/supervisor: the event loop, over a link with a scripted agent."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launchpad import __version__
from launchpad.errors import NodeError, UsageError
from launchpad.head import bringup as module
from launchpad.head import machine
from launchpad.head.bringup import BringUp
from launchpad.head.flow import LARGEST_WINDOW
from launchpad.head.planner import Planner
from launchpad.head.supervisor import Supervisor
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.membership import Membership
from launchpad.job.plan import Master, NodePlacement
from launchpad.job.spec import JobSpec, Target
from launchpad.job.succession import Peer, Rosters
from launchpad.protocol.commands import Credit, DumpStacks, Finish, Hello, Ping, Profile, RosterChanged, Signal, Start
from launchpad.protocol.events import (
    AgentFailed,
    CollectivesEntered,
    Drained,
    Hindrances,
    NodeLost,
    Output,
    PhaseChanged,
    ProfileRequested,
    ProfilesTaken,
    RankExited,
    RankStarted,
    SpareReady,
    StackDump,
    StacksRequested,
    StacksTaken,
    StopRequested,
    Written,
)
from launchpad.protocol.stacks import together
from launchpad.protocol.typed import typed
from launchpad.transport.memory import MemoryLink
from tests.support.agents import DEADLINE, READY, Agent

KIB = 1 << 10


class Sink:
    """Records all events; `on` decides whether it holds their bytes."""

    deadline: float | None = None

    def __init__(self, on: Callable[[Any], bool] = lambda _: False) -> None:
        self.events: list[Any] = []
        self.ticks = 0
        self._on = on

    def on(self, event: Any) -> bool:
        self.events.append(event)
        return self._on(event)

    def tick(self, now: float) -> None:
        assert self.deadline is not None
        assert now >= self.deadline
        self.deadline = None
        self.ticks += 1

    def close(self) -> None:
        """Nothing is held open."""


Play = Callable[..., tuple[int, Sink]]

supervisors: list[Supervisor] = []  # of the jobs run so far


@pytest.fixture
def head() -> BringUp:
    return BringUp()


@pytest.fixture
def play(head: BringUp) -> Iterator[Play]:
    """Run a job against a script; returns the exit code and a sink with all events."""
    agents: list[Agent] = []

    def play(
        script: Callable[[Agent], None], *sinks: Sink, ranks: int = 1, reopen: Any = None, **limits: Any
    ) -> tuple[int, Sink]:
        agents.append(Agent(script))
        agents[-1].thread.start()
        facts = head.connect([agents[-1].link], count_gpus=False)
        assert facts == [READY]
        seen = Sink()
        supervisors.append(Supervisor(head, planner_of(ranks, **limits), [seen, *sinks], reopen=reopen))
        code, cause = supervisors[-1].run()
        assert (cause is None) == (code == 0)
        agents[-1].thread.join(DEADLINE)
        if agents[-1].error:
            raise agents[-1].error
        return code, seen

    yield play
    for agent in agents:
        agent.link.hang_up()


def planner_of(ranks: int, **limits: Any) -> Planner:
    return Planner(JobSpec(Target("program", "/bin/true"), nproc=ranks, limits=Limits(**limits)), "abc", [READY])


def phases(sink: Sink) -> list[str]:
    return [event.phase for event in sink.events if isinstance(event, PhaseChanged)]


def test_a_job_from_hello_to_hang_up(play: Play) -> None:
    def script(agent: Agent) -> None:
        start = agent.hear(Start)
        assert [entry["rank"] for entry in start.ranks] == [0]
        assert (start.stdin_rank, start.window) == (0, LARGEST_WINDOW)
        agent.say(RankStarted(1, 0, 71))
        agent.say(Output(2, 0, 1, b"hello\n"))
        agent.say(RankExited(3, 0, 0, 0, False))
        agent.hear(Finish)
        agent.say(Output(4, 0, 1, b"late\n"))
        agent.link.hang_up()

    code, seen = play(script)
    assert code == 0
    assert [type(event).__name__ for event in seen.events] == [
        *("RankStarted", "Output", "RankExited", "PhaseChanged", "Output")
    ]
    assert [event.data for event in seen.events if isinstance(event, Output)] == [b"hello\n", b"late\n"]


def test_after_a_failure_the_other_ranks_are_signalled(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(RankExited(0, 1, 7, 0, False))
        assert agent.hear(Signal).signum == 15
        agent.leave(-15)

    code, seen = play(script, ranks=2)
    assert (code, phases(seen)) == (7, ["stopping", "over"])


def test_the_timeout_ends_a_job_without_events(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.hear(DumpStacks)  # it never answers
        assert [agent.hear(Signal).signum for _ in range(2)] == [15, 9]
        agent.leave(-9)

    assert play(script, timeout=0.0, grace=0.0)[0] == 124


def test_the_timeout_counts_where_the_rank_to_be_debugged_is_gone(head: BringUp) -> None:
    """The job goes on with fewer ranks, and nobody will attach to that one."""
    lost = threading.Event()

    def stays(agent: Agent) -> None:
        agent.hear(Start)
        assert supervisor.clock.waits_for_person
        lost.set()
        assert agent.hear(Signal).signum == 15
        agent.say(RankExited(0, 0, -15, 0, False))
        agent.hear(Finish)
        agent.say(Drained(0))
        assert len(agent.hear(Start).ranks) == 1
        assert not supervisor.clock.waits_for_person
        agent.leave()

    def is_lost(agent: Agent) -> None:
        agent.hear(Start)
        assert lost.wait(DEADLINE)
        agent.link.hang_up()

    agents = [Agent(stays), Agent(is_lost)]
    for agent in agents:
        agent.thread.start()
    facts = head.connect([agent.link for agent in agents], count_gpus=False)
    places = [NodePlacement(name, 1, "python3", "/") for name in "ab"]
    spec = JobSpec(Target("program", "/bin/true"), debug=(1, 0))
    two = Membership(1, 2, changes=True)
    planner = Planner(spec, "abc", facts, places, master=Master("127.0.0.1", 29501), membership=two)
    supervisor = Supervisor(head, planner, [])
    code, _ = supervisor.run()
    agents[0].thread.join(DEADLINE)
    assert (code, agents[0].error) == (0, None)


def test_nodes_that_have_joined_know_of_a_restart_before_their_ranks_start(head: BringUp) -> None:
    """Whoever leads the job after us counts it, even if we are lost at once."""
    heard = []

    def fails(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(RankExited(0, 0, 7, 0, False))
        agent.hear(Signal)
        agent.hear(Finish)
        agent.say(Drained(0))
        agent.hear(Start)
        agent.leave()

    def joined(agent: Agent) -> None:
        heard.append(typed(Rosters, agent.hear(RosterChanged).rosters)[-1])
        agent.hear(Start)
        agent.hear(Signal)
        agent.say(RankExited(0, 1, -15, 0, False))
        agent.hear(Finish)
        agent.say(Drained(0))
        heard.append(typed(Rosters, agent.hear(RosterChanged).rosters)[-1])
        agent.hear(Start)
        agent.say(RankExited(0, 1, 0, 0, False))
        agent.hear(Finish)
        agent.link.hang_up()

    agents = [Agent(fails), Agent(joined)]
    for agent in agents:
        agent.thread.start()
    facts = head.connect([agent.link for agent in agents], count_gpus=False)
    places = [NodePlacement(name, 1, "python3", "/") for name in "ab"]
    spec = JobSpec(Target("program", "/bin/true"), limits=Limits(max_restarts=RestartLimit(1)))
    two = Membership(2, 2, returns=True)
    planner = Planner(spec, "abc", facts, places, master=Master("127.0.0.1", 29501), membership=two)
    code, _ = Supervisor(head, planner, [], door=_Door()).run()
    for agent in agents:
        agent.thread.join(DEADLINE)
        assert agent.error is None
    assert code == 0
    assert [(roster.attempt, roster.restarts) for roster in heard] == [(0, 0), (1, 1)]


class _Door:
    """Nobody comes."""

    own = Peer("head", "a")
    rosters = ()

    def peer(self, link: Any) -> Peer:  # noqa: ARG002
        return Peer("b", "b")

    def open(self, take: Any) -> None: ...
    def goes_on(self, code: int) -> bool:  # noqa: ARG002
        return False

    def give_way(self, rosters: Any) -> None: ...
    def close(self) -> None: ...


def test_a_profile_that_a_restart_cuts_short_is_answered(head: BringUp, play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        head.post(ProfileRequested(0, 5, -1, 60.0))
        agent.hear(Profile)
        agent.say(RankExited(0, 0, 7, 0, False))
        agent.hear(Finish)
        agent.say(Drained(0))
        agent.hear(Start)
        agent.leave()

    code, seen = play(script, max_restarts=RestartLimit(1))
    (taken,) = [event for event in seen.events if isinstance(event, ProfilesTaken)]
    assert (code, taken.asker, [one.problem for one in taken.profiles]) == (
        0,
        5,
        ["it has ended, and the ranks are started again"],
    )


def test_after_a_restart_the_stacks_of_a_rank_without_a_process_are_not_waited_for(head: BringUp, play: Play) -> None:
    started: queue.SimpleQueue[int] = queue.SimpleQueue()
    taken: queue.SimpleQueue[StacksTaken] = queue.SimpleQueue()

    def on(event: Any) -> bool:
        if isinstance(event, RankStarted):
            started.put(event.pid)
        elif isinstance(event, StacksTaken):
            taken.put(event)
        return False

    def script(agent: Agent) -> None:
        agent.hear(Start)
        for rank in (0, 1):
            agent.say(RankStarted(0, rank, 70 + rank))
        agent.say(RankExited(0, 0, 7, 0, False))
        agent.hear(Signal)
        agent.say(RankExited(0, 1, -15, 0, False))
        agent.hear(Finish)
        agent.say(Drained(0))
        agent.hear(Start)
        agent.say(RankStarted(0, 0, 80))
        assert [started.get(timeout=DEADLINE) for _ in range(3)][-1] == 80
        head.post(StacksRequested(0, 5, False, False))
        number = agent.hear(DumpStacks).number
        threads: Any = [{"name": "main", "frames": []}]
        agent.say(together([StackDump(0, 0, number, 80, "", threads, "S", "", 0.0, False, 0, 0, {}, "")]))
        assert taken.get(timeout=DEADLINE).starting == [1]
        agent.say(RankExited(0, 1, 0, 0, False))
        agent.leave()

    assert play(script, Sink(on), ranks=2, max_restarts=RestartLimit(1))[0] == 0


def test_an_agent_that_speaks_of_another_node_s_rank_is_a_lost_node(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(RankStarted(0, 1, 71))

    code, seen = play(script)
    assert code == 4
    (lost,) = [event for event in seen.events if isinstance(event, NodeLost)]
    assert lost.reason == "its agent sent an invalid message: RankStarted(time=0, rank=1, pid=71)"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (StopRequested(0, 77), "malformed StopRequested frame: 77 is not what it should be"),
        (
            StopRequested(0, 20),
            "its agent sent an invalid message: StopRequested(time=0, signum=20, reason='', asked=False)",
        ),
        (
            StopRequested(0, 15, "now"),
            "its agent sent an invalid message: StopRequested(time=0, signum=15, reason='now', asked=False)",
        ),
        (
            Hindrances(0, [(0, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)], {}),
            "malformed Hindrances frame: nan is not what it should be",
        ),
        (CollectivesEntered(0, 0, ["odd"]), "malformed CollectivesEntered frame: 'odd' is not what it should be"),
        (RankExited(0, 0, -77, 0, False), "malformed RankExited frame: -77 is not what it should be"),
        (Output(0, 0, 4, b"x"), "malformed Output frame: 4 is not what it should be"),
    ],
)
def test_an_agent_that_says_what_it_can_t_is_a_lost_node(play: Play, said: Any, reason: str) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(said)

    code, seen = play(script)
    assert code == 4
    assert [event.reason for event in seen.events if isinstance(event, NodeLost)] == [reason]


def test_a_rank_exits_once(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        for _ in range(2):
            agent.say(RankExited(0, 0, 0, 0, False))

    code, seen = play(script, ranks=2)
    assert code == 4
    assert len([event for event in seen.events if isinstance(event, RankExited)]) == 1


def test_an_agent_that_breaks_down_is_a_lost_node_with_its_traceback(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(AgentFailed(1, "a bug", "Traceback …"))
        agent.link.hang_up()

    code, seen = play(script)
    assert code == 4
    (lost,) = [event for event in seen.events if isinstance(event, NodeLost)]
    assert lost[1:] == (0, "a bug", [0], "Traceback …")


def test_a_posted_signal_reaches_the_ranks(head: BringUp, play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        head.post(StopRequested(0, 15))
        assert agent.hear(Signal).signum == 15
        agent.leave(0)

    assert play(script)[0] == 143


def test_a_signal_that_a_scheduler_sends_to_everyone_reaches_the_ranks_once(head: BringUp, play: Play) -> None:
    """The node's launchpad reports it too, and then we get it; the second one of ours is a new request."""

    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(StopRequested(0, 15))
        assert agent.hear(Signal).signum == 15
        head.post(StopRequested(0, 15))
        head.post(StopRequested(0, 10))
        assert agent.hear(Signal).signum == 10
        head.post(StopRequested(0, 15))
        assert agent.hear(Signal).signum == 15
        agent.leave(0)

    assert play(script)[0] == 143


def test_a_second_signal_after_the_end_leaves_without_the_agent(head: BringUp, play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(RankExited(0, 0, 0, 0, False))
        agent.hear(Finish)
        head.post(StopRequested(0, 2))

    assert play(script)[0] == 130
    assert supervisors[-1].leaving


def test_a_sink_is_called_at_its_deadline(play: Play) -> None:
    sink = Sink()
    sink.deadline = 0.0

    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.leave()

    play(script, sink)
    assert sink.ticks == 1


def test_a_flood_of_output_delays_no_deadline(play: Play) -> None:
    said = threading.Event()
    ticks: list[int] = []  # how many there had been, at each output

    def on(event: Any) -> bool:
        if type(event) is Output:
            assert said.wait(DEADLINE)
            ticks.append(sink.ticks)
            sink.deadline = 0.0
            time.sleep(0.001)  # such an output may have thousands of lines
        return False

    sink = Sink(on)

    def script(agent: Agent) -> None:
        agent.hear(Start)
        for _ in range(200):
            agent.say(Output(0, 0, 1, b"x"))
        said.set()
        agent.leave()

    play(script, sink)
    assert len(ticks) == 200
    assert ticks[-1] - ticks[0] >= 5


# Credit.


def test_credit_is_given_back_in_batches(play: Play) -> None:
    def script(agent: Agent) -> None:
        portion = agent.hear(Start).window // 4
        agent.say(Output(0, 0, 1, b"x" * (portion - 1)))
        agent.say(Output(0, 0, 2, b"x" * 10))
        agent.say(Output(0, 0, 1, b"x" * 2))
        assert agent.hear(Credit) == Credit(0, 1, portion + 1)
        agent.say(Output(0, 0, 2, b"x" * portion))
        assert agent.hear(Credit) == Credit(0, 2, portion + 10)
        agent.say(Output(0, 0, 1, b"x" * portion))
        assert agent.hear(Credit) == Credit(0, 1, portion)
        agent.leave()

    assert play(script)[0] == 0


@pytest.mark.parametrize("holders", [1, 2])
def test_held_bytes_give_no_credit_until_all_sinks_have_written(head: BringUp, play: Play, holders: int) -> None:
    sinks = [Sink(lambda event: isinstance(event, Output)) for _ in range(holders)]
    marks: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_mark(event: Any) -> bool:
        if isinstance(event, RankStarted):
            marks.put(event.pid)
        return False

    def passed(agent: Agent, number: int) -> None:
        """Wait until the loop has reached a mark: all credit for earlier output has then arrived."""
        agent.say(RankStarted(0, 0, number))
        assert marks.get(timeout=DEADLINE) == number

    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(Output(0, 0, 1, b"x" * 600 * KIB))
        for number in range(holders):
            passed(agent, number)
            assert agent.link.heard.empty()
            (held,) = [event for event in sinks[number].events if isinstance(event, Output)]
            head.post(Written(held))
        assert agent.hear(Credit) == Credit(0, 1, 600 * KIB)
        agent.leave()

    assert play(script, *sinks, Sink(on_mark))[0] == 0


def test_equal_outputs_are_told_apart(head: BringUp, play: Play) -> None:
    held: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def hold(event: Any) -> bool:
        if isinstance(event, Output):
            held.put(event)
        return isinstance(event, Output)

    def script(agent: Agent) -> None:
        agent.hear(Start)
        for _ in range(2):
            agent.say(Output(0, 0, 1, b"x" * 300 * KIB))
        for output in [held.get(timeout=DEADLINE) for _ in range(2)]:
            head.post(Written(output))
            assert agent.hear(Credit) == Credit(0, 1, 300 * KIB)
        agent.leave()

    assert play(script, Sink(hold))[0] == 0


# Lost agents.


def test_a_link_that_closes_early_ends_the_job_with_4(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.link.hang_up()

    code, seen = play(script)
    assert (code, phases(seen)) == (4, ["over"])


def test_garbage_on_the_link_ends_the_job_with_4(play: Play) -> None:
    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.link._frames.put(b"Segmentation fault\n")

    code, seen = play(script)
    assert code == 4
    assert [event.reason for event in seen.events if isinstance(event, NodeLost)] == [
        "not a frame: b'Segmentation fault\\n'"
    ]


def test_the_only_node_comes_back(play: Play) -> None:
    def comes_back(agent: Agent) -> None:
        assert agent.hear(Start).ranks == []
        agent.say(SpareReady(0))
        assert len(agent.hear(Start).ranks) == 1
        agent.leave()

    second = Agent(comes_back)
    second.thread.start()

    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.link.hang_up()

    code, seen = play(script, max_restarts=RestartLimit(1), reopen=lambda _: second.link)
    assert (code, phases(seen)) == (0, ["over"])


def test_a_node_that_can_not_be_dialled_any_more_ends_the_job(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, because its ssh_config has changed meanwhile."""
    monkeypatch.setattr(machine, "NODES_SECONDS", 0.0)

    def reopen(_: int) -> MemoryLink:
        raise UsageError("ssh's configuration is wrong")

    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.link.hang_up()

    assert play(script, max_restarts=RestartLimit(1), reopen=reopen)[0] == 4


def test_a_node_that_comes_back_after_the_end_is_abandoned(head: BringUp) -> None:
    dialled, ended = threading.Event(), threading.Event()
    late = MemoryLink("b")

    def reopen(_: int) -> MemoryLink:
        dialled.set()
        assert ended.wait(DEADLINE)
        return late

    def stays(agent: Agent) -> None:
        agent.hear(Start)
        assert agent.hear(Signal).signum == 15
        agent.say(RankExited(0, 0, -15, 0, False))
        assert not agent.hear(Finish).leave
        agent.say(Drained(0))
        assert dialled.wait(DEADLINE)
        head.post(StopRequested(0, 15))
        assert agent.hear(Finish).leave
        (dialling,) = (thread for thread in threading.enumerate() if thread.name == "reopen-1")
        ended.set()
        dialling.join(DEADLINE)
        agent.link.hang_up()

    agents = [Agent(stays), Agent(lambda agent: (agent.hear(Start), agent.link.hang_up()))]  # type: ignore[arg-type, return-value]
    for agent in agents:
        agent.thread.start()
    facts = head.connect([agent.link for agent in agents], count_gpus=False)
    places = [NodePlacement(name, 1, "python3", "/") for name in "ab"]
    spec = JobSpec(Target("program", "/bin/true"), limits=Limits(max_restarts=RestartLimit(1)))
    planner = Planner(spec, "abc", facts, places, master=Master("127.0.0.1", 29501))
    code, _ = Supervisor(head, planner, [], reopen=reopen).run()
    agents[0].thread.join(DEADLINE)
    assert (code, agents[0].error) == (143, None)
    assert late.heard.empty()


def test_an_agent_that_never_answers_is_a_node_error(head: BringUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_SECONDS", 0.01)
    link = MemoryLink()
    with pytest.raises(NodeError, match=r"no answer from the agent within 0\.01 s"):
        head.connect([link], count_gpus=True)
    assert link.heard.get(timeout=DEADLINE) == Hello(__version__, True, 0, 0.0)
    link.hang_up()


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda link: link.say(AgentFailed(0, "no /tmp")), "ended before any rank was started: no /tmp"),
        (lambda link: link.say(AgentFailed(0, "a bug", "Traceback …")), "any rank was started: a bug\n  Traceback …"),
        (lambda link: link.hang_up(), "ended before any rank"),
        (lambda link: link._frames.put(b"command not found\n"), "not a frame: .*command not found"),
    ],
)
def test_an_agent_that_cannot_start_is_a_node_error(
    head: BringUp, say: Callable[[MemoryLink], None], message: str
) -> None:
    link = MemoryLink()
    say(link)
    with pytest.raises(NodeError, match=message):
        head.connect([link], count_gpus=False)
    link.hang_up()


def test_a_busy_inbox_does_not_delay_heartbeats(head: BringUp) -> None:
    agent = Agent(lambda _: None)
    agent.link.remote = True
    agent.thread.start()
    head.connect([agent.link], count_gpus=False, silence=1e-6)
    while not agent.link.heard.empty():
        agent.link.heard.get()
    head.inbox.put((0, Drained(0)))
    assert head.hear(head.clock() + DEADLINE) == (0, Drained(0))
    assert type(agent.link.heard.get(timeout=DEADLINE)) is Ping
    agent.link.hang_up()


def test_a_node_whose_agent_answers_nothing_is_lost_in_the_end(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a rank has stopped."""
    monkeypatch.setattr("launchpad.head.machine.KILL_SECONDS", 0.0)
    monkeypatch.setattr("launchpad.head.machine.SWEEP_SECONDS", 0.0)

    def script(agent: Agent) -> None:
        agent.hear(Start)
        agent.say(RankExited(1, 0, 3, 0, False))
        assert [agent.hear(Signal).signum for _ in range(2)] == [15, 9]
        agent.hear(Finish)

    code, seen = play(script, ranks=2, grace=0.0)
    assert code == 3
    assert [event.reason for event in seen.events if isinstance(event, NodeLost)] == [
        "its agent doesn't answer; a process there may have stopped it"
    ]


def test_a_signal_before_the_agent_has_answered_ends_launchpad(head: BringUp) -> None:
    link = MemoryLink()
    head.post(StopRequested(0, 15))
    with pytest.raises(SystemExit) as caught:
        head.connect([link], count_gpus=False)
    assert caught.value.code == 143
    link.hang_up()
