"""head/machine: how the job reacts to failures, signals and deadlines; times are numbers, nothing sleeps."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.head.machine import (
    ASK_EARLIER_SECONDS,
    ASK_EARLIER_SHARE,
    GRACE_AFTER_FAILURE,
    GRACE_AFTER_REQUEST,
    GRACE_AT_PROMPT,
    HURRY_SECONDS,
    KILL_SECONDS,
    NODES_SECONDS,
    STACKS_SECONDS,
    SWEEP_SECONDS,
    TIMEOUT_DRAIN_SECONDS,
    FinishAttempt,
    GiveUp,
    HandOver,
    Judgement,
    Leave,
    Machine,
    Meet,
    Release,
    Reopen,
    Restart,
    Suspend,
    TakeStacks,
)
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.membership import Membership, Seat
from launchpad.job.outcome import NODE_LOST, Cause
from launchpad.protocol.commands import Signal as SendSignal
from launchpad.protocol.events import (
    AtPrompt,
    ConsoleClosed,
    Drained,
    ExceptionRaised,
    GaveWay,
    LeftoversAwaited,
    NodeDoubted,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NotRestarted,
    PhaseChanged,
    RankExited,
    RankFailed,
    SeatsReady,
    StacksTaken,
    Stalled,
    StartFailed,
    StopRequested,
)
from tests.support.unhurried import UNHURRIED

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
USR1 = signal.SIGUSR1
START = 100.0


def job(ranks: int = 4, grace: float | None = None, timeout: float | None = None) -> Machine:
    return machine_of(ranks, limits=Limits(grace, timeout=timeout))


def exited(rank: int, code: int = 0) -> RankExited:
    return RankExited(0, rank, code, 0, False)


def asked(signum: int) -> StopRequested:
    return StopRequested(0, signum)


def sent(actions: Sequence[Any]) -> list[int]:
    """The signals among the actions."""
    return [action.signum for action in actions if isinstance(action, SendSignal)]


UNLIMITED = Limits()


def machine_of(ranks: int, nodes: int = 1, *, restarts: int = 0, limits: Limits = UNLIMITED, **more: Any) -> Machine:
    """So many ranks, evenly on so many nodes."""
    seats = [Seat(node, ranks // nodes) for node in range(nodes)]
    return Machine(seats, limits._replace(max_restarts=RestartLimit(restarts)) if restarts else limits, START, **more)


def joined(node: int, slots: int = 1) -> NodeJoined:
    return NodeJoined(0, node, f"n{node}", slots)


def started(machine: Machine, actions: Sequence[Any], now: float = START) -> tuple[int, Cause]:
    """The nodes are told to meet, and do: the next attempt, and why it is made."""
    (meet,) = actions
    (restart,) = machine.on(SeatsReady(0, meet.seats), now)
    return restart.attempt, restart.cause


def ends(actions: Sequence[Any]) -> bool:
    """Whether the actions end the job: announce the phase, then tell the agents, once."""
    found = [action for action in actions if isinstance(action, FinishAttempt) and action.leave]
    if not found:
        return False
    changed, finish = actions[-2:]
    return isinstance(changed, PhaseChanged) and changed.phase == "over" and [finish] == found


def step(machine: Machine) -> tuple[float, list[int], bool]:
    """Let the next deadline pass. Returns its time, the signals sent, and whether the job is over."""
    assert machine.deadline is not None
    now = machine.deadline
    assert machine.tick(now - 0.001) == []
    actions = machine.tick(now)
    return now, sent(actions), ends(actions)


def test_a_job_is_over_when_every_rank_has_left() -> None:
    machine = job(3)
    assert machine.deadline is None
    assert [machine.on(exited(rank), START + rank) for rank in (2, 0)] == [[], []]
    actions = machine.on(exited(1), START + 5)
    assert actions == [PhaseChanged(105 * 10**9, "over", "", 0, 0.0, []), FinishAttempt(leave=True, grace=30.0)]
    assert (machine.exit_code, machine.cause, machine.phase, machine.deadline) == (0, None, "over", None)


def test_the_first_failure_ends_the_others() -> None:
    machine = job()
    actions = machine.on(exited(2, 7), START + 1)
    assert actions == [PhaseChanged(101 * 10**9, "stopping", "failure", TERM, 5.0, [0, 1, 3]), SendSignal(TERM)]
    assert machine.deadline == START + 1 + GRACE_AFTER_FAILURE == START + 6
    assert step(machine) == (START + 6, [KILL], False)
    assert [ends(machine.on(exited(rank, -9), START + 7)) for rank in (0, 1, 3)] == [False, False, True]
    assert (machine.cause, machine.exit_code) == (Cause("failure", rank=2, code=7), 7)


def test_no_later_failure_changes_the_cause() -> None:
    machine = job()
    machine.on(exited(2, 7), START)
    for event in (exited(0, -11), StartFailed(0, 1, "gone"), ConsoleClosed(0, "full"), exited(3, 9)):
        assert sent(machine.on(event, START)) == []
    assert (machine.phase, machine.cause) == ("over", Cause("failure", rank=2, code=7))


def test_when_the_only_rank_fails_nobody_is_signalled() -> None:
    machine = job(1)
    actions = machine.on(exited(0, 3), START)
    assert [action.phase for action in actions if isinstance(action, PhaseChanged)] == ["stopping", "over"]
    assert ends(actions)
    assert sent(actions) == []
    assert machine.exit_code == 3


def test_ranks_that_survive_sigkill_are_not_waited_for() -> None:
    machine = job(2)
    machine.on(exited(0, 1), START)
    assert step(machine) == (START + 5, [KILL], False)
    assert step(machine) == (START + 5 + KILL_SECONDS, [], True)
    assert machine.running == {1}
    assert machine.on(exited(1, -9), START + 99) == []
    assert machine.exit_code == 1


def test_an_agent_that_does_not_even_sweep_ranks_that_survive_sigkill_is_given_up() -> None:
    machine = job(3)
    machine.on(exited(0, 1), START)
    step(machine)
    step(machine)
    machine.on(exited(1, -9), START + 5)
    assert machine.deadline == START + 5 + KILL_SECONDS + SWEEP_SECONDS
    assert machine.tick(machine.deadline - 1) == []
    assert machine.tick(machine.deadline) == [GiveUp([1, 2])]
    assert machine.deadline is None


@pytest.mark.parametrize(("code", "shown"), [(1, 1), (255, 255), (-6, 134), (-9, 137), (-15, 143), (-40, 168)])
def test_a_job_exits_as_its_first_failed_rank(code: int, shown: int) -> None:
    machine = job(1)
    machine.on(exited(0, code), START)
    assert machine.exit_code == shown


def test_when_the_ranks_are_stopped_and_when_they_are_killed() -> None:
    machine = job(timeout=100.0)
    assert machine.stops_at == START + 100
    machine.on(asked(INT), START + 1)
    assert machine.stops_at == START + 1 + GRACE_AFTER_REQUEST + 5
    machine.tick(START + 31)
    assert machine.stops_at == START + 36
    assert job().stops_at is None


def test_ctrl_c_interrupts_then_terminates_then_kills() -> None:
    machine = job()
    actions = machine.on(asked(INT), START)
    assert actions == [PhaseChanged(100 * 10**9, "stopping", "signal", INT, 30.0, [0, 1, 2, 3]), SendSignal(INT)]
    assert step(machine) == (START + GRACE_AFTER_REQUEST, [TERM], False)
    assert step(machine) == (START + 35, [KILL], False)
    assert step(machine) == (START + 45, [], True)
    assert machine.exit_code == 130


def test_a_rank_at_a_prompt_gets_the_next_signal_sooner() -> None:
    machine = job()
    machine.on(AtPrompt(0, 1, True), START)
    machine.on(AtPrompt(0, 2, True), START)
    machine.on(asked(INT), START)
    machine.on(AtPrompt(0, 2, False), START + 1)
    assert machine.deadline == START + GRACE_AT_PROMPT
    assert machine.tick(START + GRACE_AT_PROMPT) == [
        PhaseChanged(103 * 10**9, "stopping", "signal", TERM, 27.0, [1]),
        SendSignal(TERM, ranks=[1]),
    ]
    assert step(machine) == (START + GRACE_AFTER_REQUEST, [TERM], False)
    assert step(machine) == (START + 35, [KILL], False)


def test_a_rank_at_a_prompt_is_not_killed_sooner() -> None:
    machine = job()
    machine.on(AtPrompt(0, 1, True), START)
    machine.on(asked(TERM), START)
    assert step(machine) == (START + GRACE_AFTER_REQUEST, [KILL], False)


def test_the_second_ctrl_c_kills_at_once() -> None:
    machine = job()
    machine.on(asked(INT), START)
    assert sent(machine.on(asked(INT), START + 1)) == [KILL]
    assert machine.deadline == START + 1 + KILL_SECONDS
    assert step(machine) == (START + 11, [], True)
    assert machine.exit_code == 130


def test_ctrl_c_after_a_failure_kills_at_once_and_keeps_the_cause() -> None:
    machine = job()
    machine.on(exited(0, 7), START)
    assert sent(machine.on(asked(INT), START + 1)) == [KILL]
    assert machine.exit_code == 7


def test_a_second_ctrl_c_limits_the_wait_for_output() -> None:
    machine = job(1)
    machine.on(asked(INT), START)
    machine.on(asked(INT), START + 1)
    assert ends(machine.on(exited(0, -9), START + 2))
    assert machine.deadline == START + 2 + HURRY_SECONDS
    assert machine.tick(START + 2 + HURRY_SECONDS) == [Leave()]


@pytest.mark.parametrize(("signum", "code"), [(TERM, 143), (HUP, 129)])
def test_a_stop_signal_is_forwarded_then_the_ranks_are_killed(signum: int, code: int) -> None:
    machine = job()
    assert sent(machine.on(asked(signum), START)) == [signum]
    assert step(machine) == (START + 30, [KILL], False)
    assert step(machine) == (START + 40, [], True)
    assert machine.exit_code == code


@pytest.mark.parametrize("signum", [TERM, HUP])
def test_a_stop_signal_while_stopping_is_forwarded_and_gains_no_time(signum: int) -> None:
    machine = job()
    machine.on(asked(INT), START)
    assert machine.on(asked(signum), START + 1) == [SendSignal(signum)]
    assert (machine.deadline, machine.exit_code) == (START + 30, 130)


def test_ranks_that_leave_with_0_when_asked_to_do_not_make_it_a_success() -> None:
    machine = job(2)
    machine.on(asked(TERM), START)
    machine.on(exited(0), START)
    assert ends(machine.on(exited(1), START))
    assert machine.exit_code == 143


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_forwarded_and_end_nothing(signum: int) -> None:
    machine = job(1)
    assert machine.on(asked(signum), START) == [SendSignal(signum)]
    assert (machine.phase, machine.cause, machine.deadline) == ("running", None, None)
    machine.on(asked(TERM), START)
    assert machine.on(asked(signum), START) == [SendSignal(signum)]
    machine.on(exited(0), START)
    assert machine.on(asked(signum), START) == []


@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_a_signal_after_the_end_leaves_at_once(signum: int) -> None:
    machine = job(1)
    machine.on(exited(0), START)
    assert machine.on(asked(signum), START) == [Leave()]
    assert machine.exit_code == 128 + signum  # giving up output is not a success


@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_a_signal_ends_the_wait_for_what_ranks_left_behind_and_the_job_has_still_ended_well(signum: int) -> None:
    machine = job(1)
    machine.on(exited(0), START)
    assert machine.on(LeftoversAwaited(0, ["71 python"], 30.0), START + 1) == []
    assert machine.on(asked(signum), START + 2) == [SendSignal(KILL)]
    assert machine.exit_code == 0
    assert machine.on(asked(signum), START + 3) == [Leave()]


@pytest.mark.parametrize(("grace", "seconds"), [(None, 30.0), (0.0, 0.0), (60.0, 60.0)])
def test_what_ranks_left_behind_has_the_grace_only_after_a_good_end(grace: float | None, seconds: float) -> None:
    machine = job(1, grace=grace)
    assert machine.on(exited(0), START)[-1] == FinishAttempt(leave=True, grace=seconds)
    machine = job(1, grace=grace)
    assert machine.on(exited(0, 1), START)[-1] == FinishAttempt(leave=True)


def test_the_users_grace_applies_to_failures_and_requests() -> None:
    machine = job(2, grace=60)
    machine.on(exited(0, 1), START)
    assert step(machine) == (START + 60, [KILL], False)
    machine = job(2, grace=60)
    machine.on(asked(INT), START)
    assert step(machine) == (START + 60, [TERM], False)
    assert step(machine) == (START + 65, [KILL], False)
    machine = job(2, grace=0)
    machine.on(asked(INT), START)
    assert [step(machine), step(machine)] == [(START, [TERM], False), (START, [KILL], False)]


def test_a_timeout_ends_the_job_with_124() -> None:
    machine = job(timeout=60)
    assert machine.tick(START + 60) == [TakeStacks("timeout")]
    actions = machine.on(StacksTaken(0, "timeout", 0, False, [], []), START + 60.5)
    assert sent(actions) == [TERM]
    assert step(machine) == (START + 60.5 + GRACE_AFTER_REQUEST, [KILL], False)  # it was planned: there is time to save
    assert step(machine) == (START + 100.5, [], True)
    assert machine.exit_code == 124


def test_the_stacks_that_a_timeout_will_need_are_asked_for_earlier() -> None:
    for timeout, before in ((600, ASK_EARLIER_SECONDS), (20, ASK_EARLIER_SHARE * 20)):
        machine = job(timeout=timeout)
        assert machine.deadline == START + timeout - before
        assert machine.tick(START + timeout - before) == [TakeStacks("soon")]
        assert machine.tick(START + timeout - before) == []
        assert (machine.deadline, machine.phase) == (START + timeout, "running")
        assert machine.tick(START + timeout) == [TakeStacks("timeout")]


def with_stop_signal(signum: int = USR1, timeout: float | None = None) -> Machine:
    return machine_of(4, limits=Limits(stop_signal=signum, timeout=timeout))


@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_the_stop_signal_comes_first_then_term_then_kill(signum: int) -> None:
    machine = with_stop_signal()
    actions = machine.on(asked(signum), START)
    assert actions[0] == PhaseChanged(100 * 10**9, "stopping", "signal", USR1, 30.0, [0, 1, 2, 3])
    assert actions[1:] == [SendSignal(USR1, stops=True)]
    assert step(machine) == (START + GRACE_AFTER_REQUEST, [TERM], False)
    assert step(machine) == (START + 35, [KILL], False)
    assert machine.exit_code == 128 + signum


def test_the_stop_signal_may_be_term() -> None:
    machine = with_stop_signal(TERM)
    assert sent(machine.on(asked(INT), START)) == [TERM]
    assert step(machine) == (START + GRACE_AFTER_REQUEST, [KILL], False)


def test_a_timeout_sends_the_stop_signal() -> None:
    machine = with_stop_signal(timeout=60)
    machine.tick(START + 60)
    assert sent(machine.on(StacksTaken(0, "timeout", 0, False, [], []), START + 60)) == [USR1]
    assert step(machine) == (START + 90, [TERM], False)
    machine = with_stop_signal(timeout=60)
    machine.tick(START + 60)
    assert step(machine) == (START + 60 + STACKS_SECONDS, [USR1], False)


@pytest.mark.parametrize(
    "event", [exited(1, 7), Stalled(0, 60.0), ConsoleClosed(0, "closed"), NodeLost(0, 0, "silent", [0, 1])], ids=repr
)
def test_what_nobody_planned_sends_term_whatever_the_stop_signal(event: Any) -> None:
    machine = with_stop_signal()
    assert sent(machine.on(event, START)) == [TERM]
    assert step(machine) == (START + GRACE_AFTER_FAILURE, [KILL], False)


def test_a_second_signal_means_the_same_whatever_the_stop_signal() -> None:
    machine = with_stop_signal()
    machine.on(asked(INT), START)
    assert sent(machine.on(asked(TERM), START + 1)) == [TERM]
    assert sent(machine.on(asked(INT), START + 2)) == [KILL]


def test_a_timeout_does_not_wait_for_ever_for_the_stacks() -> None:
    machine = job(timeout=60)
    assert machine.tick(START + 60) == [TakeStacks("timeout")]
    assert machine.on(StacksTaken(0, "asked", 0, False, [], []), START + 61) == []
    assert step(machine) == (START + 60 + STACKS_SECONDS, [TERM], False)
    assert machine.on(StacksTaken(0, "timeout", 0, False, [], []), START + 63) == []


def waited(rank: int) -> ExceptionRaised:
    return ExceptionRaised(0, rank, 1, "", {})


def in_vain(ranks: int = 4) -> Machine:
    return machine_of(ranks, limits=Limits(timeout=60.0), waited=lambda _: True)


STACKS = StacksTaken(0, "failure", 0, False, [], [])


def test_a_rank_that_waited_in_vain_ends_the_job_after_the_stacks_were_taken() -> None:
    machine = in_vain()
    assert machine.on(waited(1), START) == []
    assert machine.on(exited(1, 1), START) == [TakeStacks("failure")]
    assert machine.on(waited(3), START) == []
    assert machine.on(exited(3, 1), START) == []
    assert sent(machine.on(STACKS, START + 0.1)) == [TERM]
    assert machine.cause == Cause("failure", rank=1, code=1)


def test_a_primary_failure_does_not_wait_for_the_stacks() -> None:
    machine = in_vain()
    machine.on(waited(1), START)
    machine.on(exited(1, 1), START)
    assert sent(machine.on(exited(2, 7), START + 0.1)) == [TERM]
    assert machine.on(STACKS, START + 0.2) == []


def test_stacks_that_never_arrive_are_not_waited_for() -> None:
    machine = in_vain()
    machine.on(waited(1), START)
    assert machine.on(exited(1, 1), START) == [TakeStacks("failure")]
    assert step(machine) == (START + STACKS_SECONDS, [TERM], False)


def test_an_abort_takes_the_stacks_of_the_others_if_there_are_any() -> None:
    assert job().on(exited(2, -signal.SIGABRT), START) == [TakeStacks("failure")]
    machine = in_vain(1)
    machine.on(waited(0), START)
    assert ends(machine.on(exited(0, 1), START))
    assert machine.exit_code == 1


def test_a_stall_ends_the_job_with_124() -> None:
    machine = job()
    assert sent(machine.on(Stalled(0, 30.0), START)) == [TERM]
    assert machine.on(Stalled(0, 60.0), START) == []
    assert (machine.exit_code, machine.cause) == (124, Cause("stall", seconds=30.0))


def test_a_timeout_does_not_follow_a_job_that_is_ending() -> None:
    machine = job(2, timeout=1)
    machine.on(exited(0, 7), START)
    assert step(machine) == (START + 5, [KILL], False)
    assert machine.exit_code == 7


def lost(node: int, *ranks: int) -> NodeLost:
    return NodeLost(0, node, "killed", list(ranks))


def test_a_lost_node_ends_the_job_with_4() -> None:
    machine = job()
    actions = machine.on(lost(0, 0, 1, 2, 3), START)
    assert ends(actions)
    assert sent(actions) == []
    assert (machine.exit_code, machine.deadline) == (4, None)
    assert machine.cause == Cause("lost", node=0, text="killed")


@pytest.mark.parametrize(("at", "code", "kind"), [(99, 1, "lost"), (101, 1, "failure"), (101, -signal.SIGSEGV, "lost")])
def test_a_rank_that_fails_after_a_node_is_lost_failed_because_of_it(at: int, code: int, kind: str) -> None:
    machine = machine_of(4, 2)
    machine.on(RankExited(100, 0, code, 0, False), START)
    machine.on(lost(1, 2, 3)._replace(time=at), START)
    assert machine.cause is not None
    assert machine.cause.kind == kind


def test_a_lost_node_stops_the_ranks_of_the_others() -> None:
    machine = machine_of(4, 2)
    assert sent(machine.on(lost(1, 2, 3), START)) == [TERM]
    assert machine.on(exited(0, -15), START) == []
    assert ends(machine.on(exited(1, 0), START))
    assert machine.cause == Cause("lost", node=1, text="killed")


def test_a_node_that_may_be_silent_is_waited_for_until_that_is_known() -> None:
    machine = machine_of(2, 2, restarts=1, silence=30.0)
    machine.on(exited(0, 7), START)
    machine.tick(START + GRACE_AFTER_FAILURE)
    assert machine.deadline is not None
    assert machine.deadline > START + GRACE_AFTER_FAILURE + 30
    assert machine.on(lost(1, 1), START + 30)[-1] == FinishAttempt(leave=False)


def test_a_node_lost_while_stopping_does_not_change_the_cause() -> None:
    machine = job()
    machine.on(exited(1, 7), START)
    assert ends(machine.on(lost(0, 0, 1, 2, 3), START))
    assert machine.exit_code == 7


def test_a_lost_node_is_brought_back_before_a_restart() -> None:
    machine = machine_of(4, 2, restarts=1)
    machine.on(lost(1, 2, 3), START)
    machine.on(exited(0, -15), START)
    assert machine.on(exited(1, -15), START) == [FinishAttempt(leave=False)]
    assert machine.on(Drained(0), START, 0)[:1] == [Reopen((1,))]
    assert started(machine, machine.on(joined(1, 2), START)) == (1, Cause("lost", node=1, text="killed"))
    assert (machine.phase, machine.running, machine.exit_code) == ("running", {0, 1, 2, 3}, 0)
    machine.on(lost(1, 2, 3), START)
    machine.on(exited(0, -15), START)
    assert ends(machine.on(exited(1, -15), START)), "restarts are used up"
    assert machine.exit_code == 4


def test_a_node_that_does_not_come_back_ends_the_job() -> None:
    machine = machine_of(2, 1, restarts=3)
    assert machine.on(lost(0, 0, 1), START)[:1] == [Reopen((0,))]
    assert machine.deadline == START + NODES_SECONDS
    assert ends(machine.tick(START + NODES_SECONDS))
    assert machine.exit_code == 4


def test_a_rank_fails_and_a_node_is_lost_because_of_it() -> None:
    machine = machine_of(4, 2, restarts=3)
    machine.on(exited(0, 7), START)
    machine.on(lost(1, 2, 3), START)
    assert machine.on(exited(1, -15), START) == [FinishAttempt(leave=False)]
    assert machine.on(Drained(0), START, 0)[:1] == [Reopen((1,))]
    assert started(machine, machine.on(joined(1, 2), START)) == (1, Cause("failure", rank=0, code=7))


def test_a_node_lost_between_two_attempts_is_brought_back() -> None:
    machine = machine_of(3, 3, restarts=3)
    machine.on(exited(0, 7), START)
    machine.on(exited(2, -15), START)
    assert machine.on(exited(1, -15), START) == [FinishAttempt(leave=False)]
    assert machine.on(Drained(0), START, 0) == []
    assert machine.on(lost(1, 1), START) == [], "node 2 has not sent all yet"
    assert machine.on(Drained(0), START, 2)[:1] == [Reopen((1,))]
    assert machine.on(lost(2, 2), START) == [Reopen((2,))]
    assert machine.on(joined(1), START) == []
    assert started(machine, machine.on(joined(2), START)) == (1, Cause("failure", rank=0, code=7))


def test_a_node_lost_before_its_last_output_arrived_ends_the_job() -> None:
    machine = job(1)
    machine.on(exited(0), START)
    assert machine.on(lost(0, 0), START) == []
    assert machine.exit_code == 4


def test_the_first_failure_is_the_one_that_happened_first_not_the_one_heard_first() -> None:
    machine = job(3)
    machine.on(RankExited(2000, 1, 1, 0, False), START)
    machine.on(RankExited(1000, 2, 7, 0, False), START)
    machine.on(RankExited(3000, 0, -15, 0, False), START)
    assert machine.cause == Cause("failure", rank=2, code=7)


def test_a_rank_that_cannot_start_ends_the_others_with_2() -> None:
    machine = job(2)
    assert sent(machine.on(StartFailed(0, 1, "no such file"), START)) == [TERM]
    assert machine.on(exited(1, 127), START) == []
    assert ends(machine.on(exited(0, -15), START))
    assert (machine.exit_code, machine.cause) == (2, Cause("start", rank=1, text="no such file"))


def test_a_closed_console_ends_the_job_with_141() -> None:
    machine = job()
    assert sent(machine.on(ConsoleClosed(0, "Broken pipe"), START)) == [TERM]
    assert step(machine) == (START + 5, [KILL], False)
    assert machine.exit_code == 141


EVENTS = st.one_of(
    st.builds(exited, st.integers(0, 3), st.sampled_from([0, 1, -9])),
    st.builds(asked, st.sampled_from([INT, TERM, HUP, signal.SIGUSR1])),
    st.builds(StartFailed, st.just(0), st.integers(0, 3), st.just("no")),
    st.just(ConsoleClosed(0, "full")),
)


@UNHURRIED
@given(events=st.lists(EVENTS, max_size=12), timeout=st.none() | st.integers(0, 20))
def test_whatever_happens_a_job_that_is_stopping_ends(events: list[Any], timeout: int | None) -> None:
    machine = job(timeout=timeout)
    finished = causes = 0
    for now, event in enumerate(events, start=int(START)):
        before = machine.cause
        actions = [*machine.on(event, now), *machine.tick(now)]
        finished += ends([action for action in actions if not isinstance(action, Leave)])
        causes += machine.cause != before
    for _ in range(4):
        if machine.phase == "stopping":
            finished += step(machine)[2]
    assert machine.phase in ("running", "over")
    assert finished == (machine.phase == "over")
    assert causes <= 1
    assert (machine.cause is None) == (machine.exit_code == 0)


@UNHURRIED
@given(
    events=st.lists(
        st.one_of(
            EVENTS, st.just(Drained(0)), st.builds(RankFailed, st.just(0), st.integers(0, 3), st.just(1), st.just("no"))
        ),
        max_size=25,
    )
)
def test_whatever_happens_a_job_that_may_restart_runs_on_or_ends(events: list[Any]) -> None:
    machine = machine_of(4, restarts=2)
    finished = 0
    for now, event in enumerate(events, start=int(START)):
        actions = [*machine.on(event, now), *machine.tick(now)]
        finished += ends([action for action in actions if not isinstance(action, Leave)])
        for meet in [action for action in actions if isinstance(action, Meet)]:
            assert [type(one) for one in machine.on(SeatsReady(0, meet.seats), now)] == [Restart]
            assert (machine.phase, machine.running) == ("running", {0, 1, 2, 3})
    for _ in range(4):
        if machine.phase == "stopping":
            finished += step(machine)[2]
    assert machine.attempt <= 2
    assert finished == (machine.phase == "over")


def test_a_rank_that_could_not_start_exits_between_two_attempts() -> None:
    """A program that can't be executed is heard of twice: why, and when its process has exited."""
    machine = machine_of(2, restarts=1)
    machine.on(exited(0, 1), START)
    assert machine.on(StartFailed(0, 1, "no such file"), START) == [FinishAttempt(leave=False)]
    assert machine.on(exited(1, 127), START) == []
    assert started(machine, machine.on(Drained(0), START)) == (1, Cause("failure", rank=0, code=1))


def test_a_console_that_closes_while_the_ranks_are_stopped_cancels_a_restart() -> None:
    machine = machine_of(2, restarts=1)
    machine.on(exited(0, 1), START)
    assert machine.on(ConsoleClosed(0, "Broken pipe"), START) == []
    assert ends(machine.on(exited(1, -TERM), START))
    assert machine.exit_code == 141


def restarting(most: int = 1, timeout: float | None = None) -> Machine:
    """Two ranks that may be restarted; rank 1 has failed with 7, and both have left."""
    machine = machine_of(2, restarts=most, limits=Limits(timeout=timeout))
    machine.on(exited(1, 7), START)
    assert machine.on(exited(0, -TERM), START) == [FinishAttempt(leave=False)]
    return machine


def test_after_a_failure_all_ranks_start_again() -> None:
    machine = restarting()
    assert started(machine, machine.on(Drained(0), START)) == (1, Cause("failure", rank=1, code=7))
    assert (machine.phase, machine.running, machine.exit_code) == ("running", {0, 1}, 0)
    machine.on(exited(0), START)
    assert ends(machine.on(exited(1), START))
    assert machine.exit_code == 0


def test_when_restarts_are_used_up_a_failure_ends_the_job() -> None:
    machine = restarting()
    started(machine, machine.on(Drained(0), START))
    machine.on(exited(0, 9), START)
    assert ends(machine.on(exited(1, -TERM), START))
    assert machine.exit_code == 9


def test_a_restart_that_can_not_help_ends_the_job() -> None:
    """It is asked for when all output has arrived, and once."""
    answers = ["", "no"]
    machine = machine_of(1, restarts=9, judge=lambda: Judgement(answers.pop(0)))
    machine.on(exited(0, 7), START)
    assert len(answers) == 2
    assert started(machine, machine.on(Drained(0), START)) == (1, Cause("failure", rank=0, code=7))
    assert machine.on(exited(0, 8), START)[-1] == FinishAttempt(leave=False)
    refused, *rest = machine.on(Drained(0), START)
    assert (type(refused), refused.reason, ends(rest)) == (NotRestarted, "no", True)
    assert (machine.exit_code, answers) == (8, [])


def test_a_node_whose_hardware_failed_gives_way_to_a_spare() -> None:
    doubted = [Judgement(), Judgement(doubted={1: (2, "ECC errors")}), Judgement(doubted={1: (3, "ECC errors")})]
    machine = machine_of(2, 2, restarts=9, spares={2: 1}, membership=SPARE, judge=lambda: doubted.pop(0))
    for seats in ((Seat(0, 1), Seat(1, 1)), (Seat(0, 1), Seat(2, 1)), (Seat(0, 1), Seat(2, 1))):
        machine.on(exited(1, 7), START)
        assert machine.on(exited(0, -TERM), START)[-1] == FinishAttempt(leave=False)
        actions = [*machine.on(Drained(0), START, 0)]
        for node in (1, 2):
            actions += machine.on(Drained(0), START, node)
        told = [action for action in actions if isinstance(action, NodeDoubted)]
        assert [(one.node, one.times) for one in told] == ([(1, 2)] if len(doubted) == 1 else [])
        assert actions[-1] == Meet(seats)
        machine.on(SeatsReady(0, seats), START)


def test_a_job_that_restarts_no_more_is_not_judged() -> None:
    machine = machine_of(1, judge=lambda: pytest.fail("asked"))
    assert ends(machine.on(exited(0, 7), START))


def fail_at(machine: Machine, now: float) -> list[Any]:
    """The only rank fails, and its output has arrived."""
    actions = machine.on(exited(0, 7), now)
    return machine.on(Drained(0), now) if actions[-1] == FinishAttempt(leave=False) else actions


def test_restarts_in_a_period_are_counted_back_from_now() -> None:
    machine = machine_of(1, limits=Limits(max_restarts=RestartLimit(2, 60.0)))
    for number, now in enumerate([0, 59, 60, 119.5, 200, 200], start=1):
        assert started(machine, fail_at(machine, START + now), START + now) == (
            number,
            Cause("failure", rank=0, code=7),
        )
    _, refused, *rest = fail_at(machine, START + 259.9)
    assert (type(refused), refused.reason) == (NotRestarted, "2 restarts in 1m are used up; not restarted")
    assert ends(rest)
    assert machine.exit_code == 7


def test_a_restart_waits_for_every_node() -> None:
    machine = machine_of(3, 3, restarts=1)
    machine.on(exited(1, 7), START)
    machine.on(exited(0, -TERM), START)
    assert machine.on(exited(2, -TERM), START) == [FinishAttempt(leave=False)]
    assert [machine.on(Drained(0), START, node) for node in (2, 0)] == [[], []]
    assert started(machine, machine.on(Drained(0), START, 1)) == (1, Cause("failure", rank=1, code=7))


@pytest.mark.parametrize(
    ("event", "code"),
    [(asked(INT), 130), (asked(TERM), 143), (ConsoleClosed(0, "why"), 141)],
)
def test_a_reason_to_stop_between_two_attempts_ends_the_job(event: Any, code: int) -> None:
    machine = restarting()
    assert ends(machine.on(event, START))
    assert machine.exit_code == code
    assert machine.on(Drained(0), START) == []


def test_the_timeout_covers_all_attempts_together() -> None:
    machine = restarting(timeout=60)
    assert machine.deadline == START + 60
    started(machine, machine.on(Drained(0), START + 50), START + 50)
    assert machine.deadline == START + 60 - ASK_EARLIER_SECONDS
    assert machine.tick(START + 60) == [TakeStacks("timeout")]
    assert step(machine)[1] == [TERM]
    assert machine.exit_code == 124


def test_a_stop_request_cancels_a_restart() -> None:
    machine = machine_of(2, restarts=3)
    machine.on(exited(1, 7), START)
    machine.on(asked(TERM), START)
    assert ends(machine.on(exited(0, -TERM), START))
    assert machine.exit_code == 143


def test_a_rank_that_can_not_start_is_not_restarted() -> None:
    machine = machine_of(1, restarts=3)
    assert ends(machine.on(StartFailed(0, 0, "why"), START))
    assert machine.exit_code == 2


def test_ctrl_z_and_quit_end_nothing() -> None:
    machine = job()
    assert machine.on(asked(signal.SIGTSTP), START) == [Suspend()]
    assert machine.on(asked(signal.SIGQUIT), START) == []
    assert sent(machine.on(asked(signal.SIGCONT), START)) == [signal.SIGCONT]
    assert machine.phase == "running"


def test_the_timeout_limits_the_wait_for_output() -> None:
    machine = job(1, timeout=60)
    assert machine.tick(START + 60) == [TakeStacks("timeout")]
    step(machine)
    assert ends(machine.on(exited(0, -TERM), START + 61))
    assert machine.deadline == START + 61 + TIMEOUT_DRAIN_SECONDS
    assert machine.tick(machine.deadline) == [Leave()]
    assert machine.exit_code == 124


# Other nodes.

SPARE = Membership(2, 2, changes=True)
ELASTIC = Membership(1, 3, changes=True)


def on_two(membership: Membership, spares: dict[int, int] | None = None) -> Machine:
    """A rank on each of two nodes."""
    return machine_of(2, 2, spares=spares, membership=membership)


def test_a_spare_takes_the_place_of_a_lost_node_which_is_no_restart() -> None:
    machine = on_two(SPARE, {2: 1})
    actions = machine.on(lost(1, 1), START)
    assert Reopen((1,)) in actions
    assert sent(actions) == [TERM]
    machine.on(exited(0, -TERM), START)
    (meet,) = machine.on(Drained(0), START, 0)
    assert meet == Meet((Seat(0, 1), Seat(2, 1)))
    (restart,) = machine.on(SeatsReady(0, (Seat(0, 1), Seat(2, 1))), START)
    assert (restart.attempt, restart.restarts, restart.counted) == (1, 0, False)
    assert (machine.phase, machine.running) == ("running", {0, 1})
    assert machine.on(joined(1), START) == [], "the new spare"
    machine.on(lost(0, 0), START)
    machine.on(exited(1, -TERM), START)
    again = started(machine, machine.on(Drained(0), START, 2))
    assert again == (2, Cause("lost", node=0, text="killed"))


def test_when_no_spare_is_left_a_lost_node_ends_the_job() -> None:
    machine = on_two(SPARE)
    machine.on(lost(1, 1), START)
    assert ends(machine.on(exited(0, -TERM), START))
    assert machine.exit_code == 4


def test_a_lost_spare_stops_nobody() -> None:
    machine = on_two(SPARE, {2: 1})
    assert machine.on(lost(2), START) == [Reopen((2,))]
    assert (machine.phase, machine.cause) == ("running", None)


def test_a_failure_is_a_restart_even_with_spares() -> None:
    machine = on_two(SPARE, {2: 1})
    machine.on(exited(1, 7), START)
    assert ends(machine.on(exited(0, -TERM), START))
    assert machine.exit_code == 7


def test_a_job_of_varying_size_goes_on_with_those_that_are_left() -> None:
    machine = on_two(ELASTIC)
    machine.on(lost(0, 0), START)
    machine.on(exited(1, -TERM), START)
    (meet,) = machine.on(Drained(0), START, 1)
    assert meet == Meet((Seat(1, 1),))
    machine.on(SeatsReady(0, (Seat(1, 1),)), START)
    assert machine.running == {0}


def test_too_few_nodes_wait_for_others() -> None:
    machine = on_two(Membership(2, 3, changes=True))
    machine.on(lost(0, 0), START)
    machine.on(exited(1, -TERM), START)
    (awaited,) = machine.on(Drained(0), START, 1)
    assert (awaited.nodes, awaited.seconds) == ([0], NODES_SECONDS)
    assert machine.on(joined(2), START + 1) == [Meet((Seat(2, 1), Seat(1, 1)))]
    assert machine.deadline is None


def test_all_ranks_start_again_with_a_node_that_joins() -> None:
    machine = on_two(ELASTIC)
    assert sent(machine.on(joined(2, slots=4), START)) == [TERM]
    machine.on(exited(0, 0), START)
    machine.on(exited(1, -TERM), START)
    machine.on(Drained(0), START, 0)
    assert started(machine, machine.on(Drained(0), START, 1)) == (1, Cause("joined", node=2))
    assert machine.running == set(range(6))
    assert machine.on(joined(3), START) == [], "there are enough"


@pytest.mark.parametrize("membership", [SPARE, Membership(1, 3, changes=True, waits=True)])
def test_a_node_that_joins_may_have_to_wait(membership: Membership) -> None:
    assert on_two(membership).on(joined(2), START) == []


def test_nobody_is_let_in_when_the_first_rank_has_ended_well() -> None:
    machine = on_two(ELASTIC)
    machine.on(exited(0), START)
    assert machine.on(joined(2), START) == []
    assert ends(machine.on(exited(1), START))
    assert machine.exit_code == 0


def test_a_node_that_is_lost_while_the_others_meet() -> None:
    machine = on_two(ELASTIC, {2: 1})
    machine.on(lost(0, 0), START)
    machine.on(exited(1, -TERM), START)
    assert machine.on(Drained(0), START, 1) == [Meet((Seat(2, 1), Seat(1, 1)))]
    assert machine.on(lost(2), START)[-1] == Meet((Seat(1, 1),))
    assert machine.on(SeatsReady(0, (Seat(2, 1), Seat(1, 1))), START) == [], "too late"
    assert type(machine.on(SeatsReady(0, (Seat(1, 1),)), START)[0]) is Restart


def outvoted(node: int) -> GaveWay:
    return GaveWay(0, node, "others may go on")


def test_a_node_without_which_others_may_go_on_ends_the_job() -> None:
    machine = machine_of(3, 3, membership=ELASTIC)
    machine.on(lost(1, 1), START)
    machine.on(lost(2, 2), START)
    assert sent(machine.on(outvoted(2), START)) == [KILL], "nobody needs what they would save"
    refused, *rest = machine.on(exited(0, -TERM), START)
    assert isinstance(refused, NotRestarted)
    assert refused.reason == "others may go on"
    assert ends(rest)
    assert machine.exit_code == 4


def test_a_node_without_which_others_may_go_on_ends_it_between_attempts_and_after_losing_spares() -> None:
    machine = on_two(ELASTIC)
    machine.on(lost(1, 1), START)
    machine.on(exited(0, -TERM), START)
    assert machine.phase == "clearing"
    refused, *rest = machine.on(outvoted(1), START)
    assert isinstance(refused, NotRestarted)
    assert ends(rest)
    machine = on_two(SPARE, {2: 1, 3: 1, 4: 1})
    assert sent(machine.on(outvoted(4), START)) == [KILL]
    machine.on(exited(0, -KILL), START)
    assert ends(machine.on(exited(1, -KILL), START))
    assert machine.exit_code == 4


def test_ctrl_c_while_the_ranks_are_stopped_for_a_new_node() -> None:
    machine = on_two(ELASTIC)
    machine.on(joined(2), START)
    machine.on(asked(TERM), START)
    machine.on(exited(0, -TERM), START)
    assert ends(machine.on(exited(1, -TERM), START))
    assert machine.exit_code == 143


def leaving(node: int, signum: int = TERM) -> NodeLeaving:
    return NodeLeaving(0, node, signum)


def test_a_node_that_is_told_to_leave_is_released_when_its_ranks_have_saved_their_work() -> None:
    machine = on_two(ELASTIC)
    assert machine.can_spare(1, START)
    assert sent(machine.on(leaving(1), START)) == [TERM]
    assert machine.deadline == START + GRACE_AFTER_REQUEST
    assert machine.can_spare(1, START), "a second signal"
    assert not machine.can_spare(0, START), "nobody would be left"
    machine.on(exited(0, 0), START)
    machine.on(exited(1, -TERM), START)
    assert machine.on(Drained(0), START, 1) == [Release(1, TERM)]
    assert machine.on(Drained(0), START, 0) == [Meet((Seat(0, 1),))]
    (restart,) = machine.on(SeatsReady(0, (Seat(0, 1),)), START)
    assert (restart.cause, restart.counted, machine.running) == (Cause("left", node=1), False, {0})


def test_the_place_of_a_node_that_leaves_is_taken_by_a_spare() -> None:
    machine = on_two(SPARE, {2: 1})
    machine.on(leaving(1), START)
    machine.on(exited(0, -TERM), START)
    machine.on(exited(1, -TERM), START)
    assert machine.on(Drained(0), START, 1) == [Release(1, TERM)]
    assert machine.on(Drained(0), START, 0) == [Meet((Seat(0, 1), Seat(2, 1)))]


def test_the_head_leaves_once_nothing_is_left_of_the_attempt() -> None:
    machine = on_two(ELASTIC)
    assert machine.can_spare(0, START)
    assert sent(machine.on(leaving(0), START)) == [TERM]
    machine.on(exited(0, -TERM), START)
    machine.on(exited(1, -TERM), START)
    assert machine.on(Drained(0), START, 0) == []
    assert machine.on(Drained(0), START, 1) == [HandOver()]
    assert machine.on(joined(2), START) == [], "the next head takes it"
    refused, *_, finish = machine.on(GaveWay(0, 0, "it has left"), START)
    assert refused == NotRestarted(int(START * 1e9), "it has left")
    assert finish == FinishAttempt(leave=True)
    assert machine.exit_code == 128 + TERM


def test_the_head_leaves_though_others_may_go_on_without_it_already() -> None:
    machine = on_two(ELASTIC)
    machine.on(leaving(0), START)
    assert sent(machine.on(outvoted(1), START)) == [KILL]
    machine.on(exited(0, -KILL), START)
    machine.on(exited(1, -KILL), START)
    assert (machine.phase, machine.cause) == ("over", Cause("signal", signum=TERM))


def test_a_head_whose_part_has_ended_may_be_told_to_leave() -> None:
    machine = on_two(ELASTIC)
    machine.on(outvoted(1), START)
    machine.on(exited(0, -KILL), START)
    machine.on(exited(1, -KILL), START)
    assert (machine.phase, machine.exit_code) == ("over", NODE_LOST)
    assert machine.on(StopRequested(0, TERM), START) == [Leave()]
    assert machine.exit_code == 128 + TERM


def test_a_scheduler_stops_all_nodes_the_leading_one_first() -> None:
    """The ranks get its signal once."""
    machine = on_two(ELASTIC)
    assert sent(machine.on(leaving(0), START)) == [TERM]
    assert not machine.can_spare(1, START), "then no node would be left"
    assert machine.on(StopRequested(0, TERM), START) == []
    machine.on(exited(0, -TERM), START)
    machine.on(exited(1, -TERM), START)
    assert (machine.phase, machine.cause) == ("over", Cause("signal", signum=TERM))


def test_a_spare_leaves_at_once() -> None:
    machine = on_two(SPARE, {2: 1})
    assert machine.on(leaving(2), START) == [Release(2, TERM)]
    assert (machine.phase, machine.cause) == ("running", None)
    assert not machine.can_spare(0, START), "no spare is left"


def test_a_node_that_leaves_between_two_attempts() -> None:
    machine = on_two(ELASTIC, {2: 1})
    machine.on(lost(0, 0), START)
    machine.on(exited(1, -TERM), START)
    assert machine.on(Drained(0), START, 1) == [Meet((Seat(2, 1), Seat(1, 1)))]
    assert machine.on(leaving(1), START) == [Release(1, TERM), Meet((Seat(2, 1),))]


def test_a_node_that_is_lost_while_it_leaves() -> None:
    machine = on_two(ELASTIC)
    machine.on(leaving(1), START)
    machine.on(lost(1, 1), START)
    assert machine.cause == Cause("left", node=1)
    machine.on(exited(0, -TERM), START)
    assert machine.on(Drained(0), START, 0) == [Meet((Seat(0, 1),))]


def test_ctrl_c_twice_on_a_node_that_leaves_kills_the_ranks() -> None:
    machine = on_two(ELASTIC)
    assert sent(machine.on(leaving(1, INT), START)) == [INT]
    assert sent(machine.on(leaving(1, INT), START)) == [KILL]


def test_the_whole_job_can_be_stopped_while_a_node_leaves() -> None:
    machine = on_two(ELASTIC)
    machine.on(leaving(1), START)
    machine.on(asked(TERM), START)
    machine.on(exited(0, -TERM), START)
    assert ends(machine.on(exited(1, -TERM), START))
    assert machine.exit_code == 143


def test_no_node_is_spared_by_a_job_of_a_fixed_size_or_one_that_ends() -> None:
    assert not on_two(Membership(2, 2)).can_spare(1, START)
    machine = on_two(ELASTIC)
    machine.on(exited(0, 7), START)
    assert not machine.can_spare(1, START)


def test_ranks_that_lost_their_peers_may_be_heard_of_before_the_lost_node() -> None:
    machine = machine_of(2, 2, spares={2: 1}, membership=SPARE, waited=lambda _: True)
    machine.on(waited(0), START)
    assert machine.on(RankExited(1000, 0, 1, 0, False), START) == [TakeStacks("failure")]
    assert machine.on(lost(1, 1)._replace(time=9000), START)[-1] == FinishAttempt(leave=False)
    assert machine.on(Drained(0), START, 0) == [Meet((Seat(0, 1), Seat(2, 1)))]
