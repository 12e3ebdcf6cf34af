"""job/roles: several worlds in one plan, and what is refused."""

from __future__ import annotations

import pytest

from launchpad.errors import UsageError
from launchpad.job.plan import Plan, make_plan
from launchpad.job.roles import RoleNames, check_roles, join_plans, parse_ready
from launchpad.job.spec import JobSpec, Ready, RoleSpec, Target
from tests.support.plan import NODE

SPEC = JobSpec(Target("script", "serve.py"), python="/py", cwd="/work")
ROLLOUT = RoleSpec("roll-out", SPEC._replace(nproc=2), service=True, ports=("http", "grpc"))
TRAIN = RoleSpec("train", SPEC._replace(target=Target("script", "train.py"), nproc=2), after=("roll-out",))


def joined() -> Plan:
    plans = [make_plan(role.spec, [NODE._replace(port=port)], "abc") for role, port in ((ROLLOUT, 1), (TRAIN, 2))]
    return join_plans([ROLLOUT, TRAIN], plans, {"roll-out": [[10, 11], [20, 21]], "train": [[], []]}, {"node0": 8})


def test_each_role_is_a_world_and_the_job_numbers_its_ranks_through() -> None:
    plan = joined()
    assert plan.roles == (("roll-out", [0, 1]), ("train", [2, 3]))
    assert [rank.rank for rank in plan.ranks] == [0, 1, 2, 3]
    assert [(node.index, node.name, len(node.ranks)) for node in plan.nodes] == [(0, "roll-out", 2), (1, "train", 2)]
    names = "RANK WORLD_SIZE MASTER_PORT ROLE_NAME LAUNCHPAD_ROLE".split()
    assert [[rank.environ[name] for name in names] for rank in plan.ranks] == [
        ["0", "2", "1", "roll-out", "roll-out"],
        ["1", "2", "1", "roll-out", "roll-out"],
        ["0", "2", "2", "train", "train"],
        ["1", "2", "2", "train", "train"],
    ]
    assert plan.nodes[1].defaults["OMP_NUM_THREADS"] == "2", "they share 8 cores"


def test_everyone_knows_the_ports_and_each_rank_its_own() -> None:
    ranks = joined().ranks
    assert {rank.environ["LAUNCHPAD_ROLL_OUT_HTTP"] for rank in ranks} == {"127.0.0.1:10,127.0.0.1:20"}
    assert {rank.environ["LAUNCHPAD_ROLL_OUT_GRPC"] for rank in ranks} == {"127.0.0.1:11,127.0.0.1:21"}
    assert [rank.environ.get("LAUNCHPAD_PORT_GRPC") for rank in ranks] == ["11", "21", None, None]


@pytest.mark.parametrize(
    ("text", "ports", "ready"),
    [
        ("tcp:http", ["http", "grpc"], Ready("tcp", "http")),
        ("http:http/health", ["http", "grpc"], Ready("http", "http", "/health")),
        ("http:/health", ["http"], Ready("http", "http", "/health")),
        ("line:Uvicorn running: on", [], Ready("line", text="Uvicorn running: on")),
        ("command:test -e up", [], Ready("command", text="test -e up")),
    ],
)
def test_what_says_that_a_role_is_ready(text: str, ports: list[str], ready: Ready) -> None:
    found = parse_ready(text, ports, 60.0, "f: jobs.j.roles.r, ready")
    assert found == ready
    assert parse_ready(found.words, ports, 60.0, "") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tcp:http", "needs a port"),
        ("tcp", "says nothing"),
        ("line:", "says nothing"),
        ("soon", "write tcp:PORT, http:PORT/PATH, line:TEXT or command:COMMAND"),
    ],
)
def test_what_says_nothing(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_ready(text, [], 60.0, "here")


def after(name: str, *others: str, service: bool = False) -> RoleSpec:
    return RoleSpec(name, SPEC, service=service, after=others)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ([after("a", "b")], "here.a, after: there is no role 'b', only a"),
        ([after("a", "a")], "wait for each other: a → a"),
        ([after("a", "b"), after("b", "c"), after("c", "b")], "wait for each other: b → c → b"),
        ([after("a", service=True)], "all roles are services"),
    ],
)
def test_roles_that_could_never_start_or_end(roles: list[RoleSpec], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_roles(roles, "here")


def test_names_of_ranks() -> None:
    names = RoleNames([("rollout", [0]), ("train", [1, 2, 3])])
    assert names.one(2) == "train rank 1"
    assert names.several([0, 1, 2, 3]) == "rollout rank 0, train ranks 0-2"
    assert names.one(9) == "rank 9", "it was spawned"


def test_spawned_ranks_are_of_the_role_of_who_has_spawned_them() -> None:
    names = RoleNames([("serve", [0]), ("train", [1, 2])])
    names.join(2, [3, 4])
    assert (names.one(3), names.several([1, 3, 4])) == ("train rank 3", "train ranks 0, 3-4")
