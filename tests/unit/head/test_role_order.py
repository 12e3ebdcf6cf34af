"""head/role_order: when each role starts, and when services end."""

from __future__ import annotations

from launchpad.head.role_order import Begin, EndServices, FailRole, Look, RoleOrder
from launchpad.job.spec import JobSpec, Ready, RoleSpec, Target

SPEC = JobSpec(Target("script", "t.py"))
SERVICE = RoleSpec("serve", SPEC, service=True, ready=Ready("tcp", "http"))
TRAIN = RoleSpec("train", SPEC, after=("serve",))
RANKS = {"serve": [0, 1], "train": [2, 3]}


def begun(*roles: RoleSpec) -> RoleOrder:
    order = RoleOrder(roles, RANKS)
    order.begin()
    return order


def test_a_role_waits_until_all_ranks_of_a_service_run_and_it_is_ready() -> None:
    order = RoleOrder([TRAIN, SERVICE], RANKS)
    assert order.begin() == [Begin("serve")]
    assert (order.held(), order.awaited("train")) == (["train"], ["serve"])
    assert order.started(0) == []
    assert order.started(1) == [Look("serve")]
    assert order.got_ready("serve") == [Begin("train")]
    assert order.held() == []


def test_a_service_without_a_check_is_ready_when_it_runs() -> None:
    order = begun(SERVICE._replace(ready=Ready("started")), TRAIN)
    order.started(0)
    assert order.started(1) == [Begin("train")]


def test_a_role_that_is_no_service_is_waited_for_until_it_has_ended_well() -> None:
    first, then = RoleSpec("serve", SPEC), RoleSpec("train", SPEC, after=("serve",))
    order = begun(first, then)
    assert [order.started(0), order.started(1), order.exited(1, 3), order.exited(0, 0)] == [[], [], [], []]
    order = begun(first, then)
    order.exited(0, 0)
    assert order.exited(1, 0) == [Begin("train")]


def test_services_end_when_all_others_have_ended_well() -> None:
    order = begun(SERVICE, TRAIN)
    order.got_ready("serve")
    assert order.exited(2, 0) == []
    assert order.exited(3, 0) == [EndServices([0, 1])]
    assert order.exited(0, 0) == []


def test_nothing_is_stopped_where_there_are_no_services() -> None:
    order = begun(TRAIN._replace(after=()))
    order.exited(2, 0)
    assert order.exited(3, 0) == []


def test_a_service_that_exits_with_0_before_that_has_failed() -> None:
    order = begun(SERVICE, TRAIN)
    assert order.exited(1, 0) == [FailRole(1, "is a service, and exited with code 0 while other roles still ran")]
    assert order.exited(0, 3) == [], "a failure is the state machine's"


def test_a_role_that_ends_before_it_was_ready_leaves_the_others_waiting_forever() -> None:
    order = begun(RoleSpec("serve", SPEC, ready=Ready("line", text="up")), TRAIN)
    order.exited(0, 0)
    assert order.exited(1, 0) == [FailRole(1, "exited with code 0 before it was ready (line:up)")]


def test_who_has_not_begun_waits_again_for_a_service_that_is_started_again() -> None:
    order = RoleOrder(
        [SERVICE, RoleSpec("other", SPEC), TRAIN._replace(after=("serve", "other"))], {**RANKS, "other": [4]}
    )
    order.begin()
    order.got_ready("serve")
    order.restarted("serve")
    assert order.exited(4, 0) == []
    assert (order.started(0), order.started(1)) == ([], [Look("serve")])
    assert order.got_ready("serve") == [Begin("train")]


def test_a_rank_that_had_ended_well_runs_again_with_its_world() -> None:
    order = begun(SERVICE, TRAIN)
    order.got_ready("serve")
    order.exited(2, 0)
    order.restarted("train")
    assert order.exited(3, 0) == []
    assert order.exited(2, 0) == [EndServices([0, 1])]


def test_how_a_role_ends_that_is_about_to_start_again_does_not_count() -> None:
    order = begun(SERVICE, TRAIN)
    order.got_ready("serve")
    for name, ranks in RANKS.items():
        order.stopping(name)
        assert [order.exited(rank, 0) for rank in ranks] == [[], []]
        order.restarted(name)
    order.exited(2, 0)
    assert order.exited(3, 0) == [EndServices([0, 1])]


def test_a_service_that_is_stopped_may_end() -> None:
    order = begun(SERVICE, TRAIN)
    assert order.dismiss("serve") == [0, 1]
    assert [order.exited(0, 0), order.exited(1, 0), order.runs("serve")] == [[], [], False]
