"""job/plan: which rank runs where, with which variables, and what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.errors import UsageError
from launchpad.job.limits import Limits, RestartLimit
from launchpad.job.membership import Seat
from launchpad.job.plan import CONTRACT, FILES_OF_AGENT, FILES_PER_RANK, Master, NodePlacement, Stdin, make_plan
from launchpad.job.spec import JobSpec, Target
from tests.support.plan import NODE
from tests.support.unhurried import UNHURRIED

SPEC = JobSpec(Target("script", "train.py", ("--lr", "0.1")), python="/venv/bin/python", cwd="/work")


def spec(**changes: object) -> JobSpec:
    return SPEC._replace(**changes)  # type: ignore[arg-type]


def test_ranks_get_torchruns_variables_and_no_others() -> None:
    plan = make_plan(spec(nproc=4), [NODE], "abc")
    (node,) = plan.nodes
    for rank, planned in enumerate(plan.ranks):
        assert planned.environ == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": "4",
            "WORLD_SIZE": "4",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29501",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "abc",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        assert planned.environ.keys() == CONTRACT - {"TORCHELASTIC_ERROR_FILE"}, "the agent sets that one"
        assert planned.argv == ("/venv/bin/python", "-u", "train.py", "--lr", "0.1")
    assert node.defaults == {"OMP_NUM_THREADS": "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert (node.index, node.name, node.cwd) == (0, "node0", "/work")


def test_ranks_are_numbered_across_nodes_with_different_counts() -> None:
    nodes = [NODE._replace(cores=3), NODE._replace(hostname="node1", cores=2, port=1)]
    plan = make_plan(spec(nproc="cpu"), nodes, "abc")
    names = "RANK ROLE_RANK LOCAL_RANK GROUP_RANK LOCAL_WORLD_SIZE WORLD_SIZE ROLE_WORLD_SIZE GROUP_WORLD_SIZE".split()
    assert [[int(rank.environ[name]) for name in names] for rank in plan.ranks] == [
        [0, 0, 0, 0, 3, 5, 5, 2],
        [1, 1, 1, 0, 3, 5, 5, 2],
        [2, 2, 2, 0, 3, 5, 5, 2],
        [3, 3, 0, 1, 2, 5, 5, 2],
        [4, 4, 1, 1, 2, 5, 5, 2],
    ]
    assert {rank.environ["MASTER_PORT"] for rank in plan.ranks} == {"29501"}
    assert [(node.index, node.name, len(node.ranks)) for node in plan.nodes] == [(0, "node0", 3), (1, "node1", 2)]


@UNHURRIED
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_ranks_are_contiguous_for_any_counts(counts: list[int]) -> None:
    plan = make_plan(spec(nproc="cpu"), [NODE._replace(cores=count) for count in counts], "abc")
    assert [rank.rank for rank in plan.ranks] == list(range(sum(counts)))
    assert [rank.local_rank for rank in plan.ranks] == list(itertools.chain(*map(range, counts)))


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 1, 8), (8, 4, 2), (8, 3, 2), (2, 2, 1), (2, 5, 1)])
def test_the_ranks_threads_together_fit_the_cores(cores: int, ranks: int, threads: int) -> None:
    plan = make_plan(spec(nproc=ranks), [NODE._replace(cores=cores)], "abc")
    assert plan.nodes[0].defaults["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("nproc", "gpus", "ranks"), [(3, 2, 3), ("cpu", 2, 8), ("gpu", 2, 2), ("auto", 2, 2), ("auto", 0, 8)]
)
def test_nproc_is_a_number_or_depends_on_the_node(nproc: int | str, gpus: int, ranks: int) -> None:
    assert len(make_plan(spec(nproc=nproc), [NODE._replace(gpus=gpus)], "abc").ranks) == ranks


def test_tensorflows_workers_are_at_the_nodes_that_take_part() -> None:
    """In the order of the ranks. A node that lost a seat keeps its ports."""
    addresses = ("10.0.0.1", "10.0.0.2", "fd77::3")
    places = [NodePlacement(f"n{node}", 2, "python", "/", "eth0", address=at) for node, at in enumerate(addresses)]
    seats, ports = [Seat(2, 2), Seat(0, 1)], [[1, 2], [3, 4], [5, 6]]
    plan = make_plan(spec(tf_config=True), [NODE] * 3, "abc", places, Master("fd77::3", 29500), seats, ports=ports)
    for rank, planned in enumerate(plan.ranks):
        assert json.loads(planned.environ["TF_CONFIG"]) == {
            "cluster": {"worker": ["[fd77::3]:5", "[fd77::3]:6", "10.0.0.1:1"]},
            "task": {"type": "worker", "index": rank},
        }


def test_nproc_gpu_is_refused_on_a_node_without_gpus() -> None:
    with pytest.raises(UsageError, match="--nproc gpu: node0 has no visible GPU"):
        make_plan(spec(nproc="gpu"), [NODE], "abc")


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_the_user_cannot_set_a_variable_of_the_contract(name: str) -> None:
    with pytest.raises(UsageError, match=f"--env {name}: .* leave it out") as caught:
        make_plan(spec(environ={"MINE": "1", name: "hunter2"}), [NODE], "abc")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES"])
def test_the_user_can_override_a_default(name: str) -> None:
    assert make_plan(spec(environ={name: "5"}), [NODE], "abc").nodes[0].environ == {name: "5"}


def test_too_many_ranks_for_the_open_files_limit_are_refused_with_the_number_that_fits() -> None:
    node = NODE._replace(open_files=FILES_OF_AGENT + 4 * FILES_PER_RANK)
    assert len(make_plan(spec(nproc=4), [node], "abc").ranks) == 4
    with pytest.raises(UsageError, match=r"the limit on node0 is 44: .* at most 4 ranks"):
        make_plan(spec(nproc=5), [node], "abc")


def test_too_many_ranks_for_the_processes_limit_are_refused() -> None:
    node = NODE._replace(processes=5)
    assert len(make_plan(spec(nproc=4), [node], "abc").ranks) == 4
    with pytest.raises(UsageError, match="--nproc 5 is too many: node0 allows 5 processes in all"):
        make_plan(spec(nproc=5), [node], "abc")


def test_the_json_plan_names_the_users_variables_and_hides_their_values() -> None:
    plan = make_plan(spec(nproc=2, environ={"TOKEN": "hunter2", "ALPHA": "s3cret"}), [NODE], "abc")
    shown = plan.as_json()
    assert shown["forwarded"] == ["ALPHA", "TOKEN"]
    assert (shown["run_id"], shown["world_size"]) == ("abc", 2)
    (node,) = shown["nodes"]
    assert (node["name"], node["cwd"], node["environ_where_unset"]["OMP_NUM_THREADS"]) == ("node0", "/work", "4")
    assert [rank["environ"] for rank in node["ranks"]] == [rank.environ for rank in plan.ranks]
    for text in (json.dumps(shown), repr(plan)):
        assert "hunter2" not in text
        assert "s3cret" not in text


def test_the_start_command_matches_the_plan() -> None:
    plan = make_plan(spec(nproc=2, environ={"TOKEN": "hunter2"}), [NODE], "abc")
    start = plan.start(plan.nodes[0], attempt=0, restarts=0, window=65536, stdin=Stdin(True, False, (24, 80)))
    assert (start.cwd, start.environ, start.defaults) == ("/work", {"TOKEN": "hunter2"}, plan.nodes[0].defaults)
    assert [entry["rank"] for entry in start.ranks] == [0, 1]
    assert start.ranks[1]["argv"] == ["/venv/bin/python", "-u", "train.py", "--lr", "0.1"]
    assert start.ranks[1]["environ"] == plan.ranks[1].environ
    assert (start.window, start.stdin_rank, start.typed, start.terminal) == (65536, 0, True, [24, 80])
    assert not start.once
    elsewhere = plan._replace(input_rank=7).start(plan.nodes[0], 0, 0, 65536, Stdin(True, True))
    assert (elsewhere.typed, elsewhere.sends_input) == (False, False)


@pytest.mark.parametrize(
    ("nproc", "nodes", "restarts", "once"),
    [(1, 1, 0, True), (2, 1, 0, False), (1, 2, 0, False), (1, 1, 1, False)],
    ids=["alone", "two ranks", "two nodes", "restarts"],
)
def test_only_a_rank_that_is_alone_and_not_started_again_needs_no_forkserver(
    nproc: int, nodes: int, restarts: int, once: bool
) -> None:
    limits = Limits(max_restarts=RestartLimit(restarts))
    plan = make_plan(spec(nproc=nproc, limits=limits), [NODE] * nodes, "abc")
    assert [plan.start(node, 0, 0, 1, Stdin()).once for node in plan.nodes] == [once] * nodes
