"""job/programs: which ranks of a node run which of a job's programs, and what is refused."""

from __future__ import annotations

import pytest

from launchpad.errors import UsageError
from launchpad.job.plan import NodePlacement, Plan, Stdin, make_plan
from launchpad.job.programs import check_order, labels, on_node
from launchpad.job.spec import JobSpec, Program, Share, Target
from tests.support.plan import NODE

SERVER = Program(0, Target("script", "a/server.py", ("--port", "0")), (Share(0, 1),), forks=True)
WORKER = Program(
    1, Target("module", "pkg.worker"), (Share(0, 2), Share(1, 1)), python="/other/python", environ={"LR": "secret"}
)
SOLVER = Program(2, Target("program", "./solver"), (Share(1, 2),), cwd="/data")
SPEC = JobSpec(
    SERVER.target, (SERVER, WORKER, SOLVER), python="/py", cwd="/work", nproc=3, preload=("torch",), backend="mpi"
)


def planned(spec: JobSpec = SPEC) -> Plan:
    nodes = [NODE, NODE._replace(hostname="node1")]
    places = [NodePlacement("a", 3, "/py", "/work"), NodePlacement("b", 3, "/py", "/work")]
    return make_plan(spec, nodes, "abc", places)


def test_ranks_are_numbered_from_left_to_right() -> None:
    plan = planned()
    assert plan.programs == [("server.py", [0]), ("pkg.worker", [1, 2, 3]), ("solver", [4, 5])]
    assert [rank.argv for rank in plan.ranks] == [
        ("/py", "-u", "a/server.py", "--port", "0"),
        *[("/other/python", "-u", "-m", "pkg.worker")] * 3,
        *[("./solver",)] * 2,
    ]
    assert [rank.environ["LOCAL_RANK"] for rank in plan.ranks] == ["0", "1", "2", "0", "1", "2"]
    assert {rank.environ["WORLD_SIZE"] for rank in plan.ranks} == {"6"}


def test_each_rank_starts_as_its_program_does() -> None:
    plan = planned()
    first, second = (plan.start(node, 0, 0, 1, Stdin()) for node in plan.nodes)
    server, worker, _ = first.ranks
    assert (server["python"], server["executes"], "cwd" in server, server["environ"].get("LR")) == (
        *(True, False, False),
        None,
    )
    assert (worker["python"], worker["executes"], worker["environ"]["LR"]) == (True, True, "secret")
    assert [(one["python"], one.get("cwd")) for one in second.ranks] == [(True, None), *[(False, "/data")] * 2]
    # Only where a program's ranks are forked is there something to fork them from.
    assert (first.preload, second.preload) == (["torch"], [])
    assert (first.store, second.store) == ("serve", "")


def test_a_dry_run_shows_no_values() -> None:
    plan = planned()
    assert "secret" not in repr(plan)
    ranks = [rank for node in plan.as_json()["nodes"] for rank in node["ranks"]]
    assert ranks[1]["forwarded"] == ["LR"]
    assert (ranks[1]["program"], ranks[4]["cwd"]) == (1, "/data")
    assert "secret" not in str(ranks)


def test_the_contract_is_not_set_by_a_program() -> None:
    wrong = Program(1, WORKER.target, WORKER.shares, environ={"RANK": "7"})
    with pytest.raises(UsageError, match="--env RANK: launchpad sets RANK for each rank"):
        planned(SPEC._replace(programs=(SERVER, wrong, SOLVER)))


def test_what_runs_on_a_node() -> None:
    assert on_node(SPEC.programs, 0) == [(SERVER, 1), (WORKER, 2)]
    assert on_node(SPEC.programs, 1) == [(WORKER, 1), (SOLVER, 2)]


def test_a_hosts_ranks_follow_one_another() -> None:
    check_order([[Share(0, 1)], [Share(0, 1), Share(1, 1)], [Share(1, 2)]], ["a", "b"])
    with pytest.raises(UsageError, match="program 2 has ranks on a, and so has one before it"):
        check_order([[Share(0, 1), Share(1, 1)], [Share(0, 2)]], ["a", "b"])


def test_programs_of_one_name_have_no_labels() -> None:
    assert labels([("a.py", [0]), ("b.py", [1, 2])]) == {0: "a.py", 1: "b.py", 2: "b.py"}
    assert labels([("a.py", [0]), ("a.py", [1, 2])]) == {}
