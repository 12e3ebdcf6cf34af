"""--bind: from the files of real machines to the CPUs and the memory of each rank, and what a plan makes of that."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.agent.host import procfs
from launchpad.agent.host.topology import read_topology
from launchpad.console import dry_run
from launchpad.console.notes import Notes
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.errors import UsageError
from launchpad.head.bringup import BringUp
from launchpad.job.binding import Binding, bind_ranks, in_words, threads, written
from launchpad.job.membership import Seat
from launchpad.job.plan import Plan, Stdin, make_plan
from launchpad.job.spec import Bind, JobSpec, Target
from launchpad.protocol import cpulist
from launchpad.protocol.commands import ReadTopology
from launchpad.protocol.events import RanksBound, TopologyRead
from launchpad.rank import affinity
from launchpad.runner.nodes import bring_up
from launchpad.runner.options import HostOptions
from tests.support.agents import Agent
from tests.support.machines import CXL, EPYC, GRACE, POWER, VM, XEON, build
from tests.support.plan import NODE
from tests.support.unhurried import UNHURRIED

Read = Callable[..., TopologyRead]

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A machine's files, 5,000 for the largest, made once."""
    return functools.cache(lambda machine: build(machine, tmp_path_factory.mktemp("machine")))


@pytest.fixture
def read(root: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read the topology of a machine, in a cgroup with these CPUs and memory nodes; "": with all."""

    def read(
        machine: str, environ: dict[str, str] | None = None, cpus: str = "", memory: str = "0-255"
    ) -> TopologyRead:
        online = ",".join(re.findall(r"cpus (\S+)", machine))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpulist.parse(cpus or online)))
        monkeypatch.setattr(procfs, "status", lambda _: {"Mems_allowed_list": memory})
        monkeypatch.setattr(affinity, "may_prefer_memory", lambda: True)
        return read_topology(environ or {}, str(root(machine)))

    return read


def bound(topology: TopologyRead, bind: Bind, count: int) -> list[str]:
    """CPUs and memory nodes of each rank."""
    return [" ".join(written(one)) for one in bind_ranks(bind, topology, count, "host")]


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("\n", []), ("7", [7]), ("0-1,3-4", [0, 1, 3, 4])]
)
def test_lists_of_the_kernel(text: str, numbers: list[int]) -> None:
    assert cpulist.parse(text) == numbers
    assert cpulist.written(reversed(numbers)) == text.strip()


# torchrun's example, and its modes.


@pytest.mark.parametrize(
    ("bind", "ranks"),
    [
        ("numa", ["0-15,32-47 0", "0-15,32-47 0", "16-31,48-63 1", "16-31,48-63 1"]),
        ("socket", ["0-15,32-47 0", "0-15,32-47 0", "16-31,48-63 1", "16-31,48-63 1"]),
        ("exclusive", ["0-7,32-39 0", "8-15,40-47 0", "16-23,48-55 1", "24-31,56-63 1"]),
        ("core-complex", ["0-15,32-47 0", "0-15,32-47 0", "16-31,48-63 1", "16-31,48-63 1"]),
        ("core", ["0,32 0", "8,40 0", "16,48 1", "24,56 1"]),
    ],
)
def test_a_rank_is_bound_to_where_its_gpu_is(read: Read, bind: Bind, ranks: list[str]) -> None:
    assert bound(read(XEON), bind, 4) == ranks


@pytest.mark.parametrize(
    ("bind", "ranks"),
    [
        ("numa", ["48-63,176-191 3", "48-63,176-191 3", "16-31,144-159 1"]),
        ("socket", ["0-63,128-191 0-3", "0-63,128-191 0-3", "0-63,128-191 0-3"]),
        ("exclusive", ["48-55,176-183 3", "56-63,184-191 3", "16-31,144-159 1"]),
        ("core-complex", ["48-55,176-183 3", "56-63,184-191 3", "16-23,144-151 1"]),
        ("core", ["48,176 3", "56,184 3", "16,144 1"]),
    ],
)
def test_gpus_at_any_of_eight_numa_nodes(read: Read, bind: Bind, ranks: list[str]) -> None:
    assert bound(read(EPYC), bind, 3) == ranks


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, [3, 3, 1, 1, 7, 7, 5, 5]),
        ({"CUDA_VISIBLE_DEVICES": "6, 2"}, [5, 1]),
        ({"CUDA_VISIBLE_DEVICES": "7,9,1"}, [5]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-4abc,GPU-0"}, [7, 3]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-2abc/1/0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-77aa"}, [-1]),  # it could be a part of any of them
        (NO_GPUS, []),
    ],
)
def test_the_gpus_that_ranks_see(read: Read, environ: dict[str, str], nodes: list[int]) -> None:
    assert read(EPYC, environ).gpus == nodes


def test_a_container_has_only_the_gpus_whose_devices_it_has(read: Read, tmp_path: Path) -> None:
    assert len(read(EPYC).gpus) == 8
    build(EPYC, tmp_path)
    for number in range(6):
        (tmp_path / f"dev/nvidia{number}").unlink()
    assert read_topology({}, str(tmp_path)).gpus == [5, 5]


# Without GPUs, or without knowing where they are.


@pytest.mark.parametrize(
    ("count", "ranks"),
    [
        (1, ["0-15,32-47 0"]),
        (2, ["0-15,32-47 0", "16-31,48-63 1"]),
        (3, ["0-15,32-47 0", "0-15,32-47 0", "16-31,48-63 1"]),
        (4, ["0-15,32-47 0", "0-15,32-47 0", "16-31,48-63 1", "16-31,48-63 1"]),
    ],
)
def test_without_gpus_ranks_are_spread_evenly(read: Read, count: int, ranks: list[str]) -> None:
    assert bound(read(XEON, NO_GPUS), "numa", count) == ranks


def test_few_ranks_on_many_nodes_are_far_apart(read: Read) -> None:
    assert bound(read(EPYC, NO_GPUS), "numa", 2) == ["0-15,128-143 0", "64-79,192-207 4"]


def test_a_gpu_that_does_not_say_where_it_is(read: Read) -> None:
    topology = read(VM)
    assert topology.gpus == [-1, -1]
    assert bound(topology, "numa", 2) == ["0-7 0", "0-7 0"]
    assert bound(topology, "exclusive", 2) == ["0-3 0", "4-7 0"]
    assert bound(topology, "exclusive", 3) == ["0-3 0", "4-5 0", "6-7 0"]


# What is odd about some machines.


def test_memory_of_gpus_and_empty_nodes_is_not_preferred(read: Read) -> None:
    topology = read(GRACE)
    assert (topology.nodes, topology.memory) == ([0, 1, 2, 3], [0, 1])
    assert bound(topology, "numa", 1) == ["0-71 0"]
    assert bound(topology, "exclusive", 2) == ["0-35 0", "36-71 0"]


def test_numbers_with_holes_and_cpus_that_are_switched_off(read: Read) -> None:
    topology = read(POWER, NO_GPUS)
    assert bound(topology, "numa", 2) == ["0-1,4-5,8-9,12-13 0", "16-17,20-21,24-25,28-29 8"]
    assert bound(topology, "core", 4) == ["0-1 0", "8-9 0", "16-17 8", "24-25 8"]
    assert bound(topology, "core-complex", 2) == ["0-1,4-5 0", "16-17,20-21 8"]


def test_a_gpu_at_a_node_without_cpus_has_the_nearest_ones(read: Read) -> None:
    near = POWER.replace("distances 80 80 80 10", "distances 80 40 80 10")
    assert bound(read(near), "numa", 2) == ["16-17,20-21,24-25,28-29 8"] * 2


def test_a_socket_without_memory_has_the_nearest(read: Read) -> None:
    topology = read(CXL)
    assert (topology.memory, topology.gpus) == ([0, 2], [1, 0])
    assert bound(topology, "socket", 2) == ["4-7 0", "0-3 0"]
    assert bound(read(CXL.replace("20 10 25", "20 10 17")), "socket", 2) == ["4-7 2", "0-3 0"]


def test_a_cgroup_with_few_cpus_and_one_memory_node(read: Read) -> None:
    topology = read(XEON, cpus="2-3,16-21,34", memory="1")
    assert bound(topology, "numa", 4) == ["2-3,34 1", "2-3,34 1", "16-21 1", "16-21 1"]
    assert bound(topology, "core", 4) == ["2,34 1", "3 1", "16 1", "19 1"]
    # Without GPUs, as many ranks go to a node as it has cores here.
    assert bound(read(XEON, NO_GPUS, cpus="2-3,16-21,34"), "numa", 4) == ["2-3,34 0", *["16-21 1"] * 3]


def test_a_gpu_whose_node_the_cgroup_does_not_have(read: Read) -> None:
    assert bound(read(EPYC, cpus="40-47,72-79"), "numa", 8) == [*["40-47 2"] * 4, *["72-79 4"] * 4]


@pytest.mark.parametrize("bind", ["numa", "socket", "core-complex"])
def test_where_nothing_is_shown_all_cpus_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bind: Bind) -> None:
    """As in gVisor."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    topology = read_topology({}, str(tmp_path))
    assert not topology.complete
    assert bound(topology, bind, 2) == ["0-2 ", "0-2 "]
    assert bound(topology, "core", 3) == ["0 ", "1 ", "2 "]
    assert bound(topology, "exclusive", 2) == ["0-1 ", "2 "]


def test_this_machine_is_read_whole() -> None:
    topology = read_topology(dict(os.environ))
    assert [row[0] for row in topology.cpus] == sorted(os.sched_getaffinity(0))
    assert {row[4] for row in topology.cpus} <= set(topology.nodes)
    assert set(topology.memory) <= set(topology.nodes)


def test_memory_policies_may_not_be_permitted(
    read: Read, root: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read(XEON)
    monkeypatch.setattr(affinity, "may_prefer_memory", lambda: False)
    assert bound(read_topology({}, str(root(XEON))), "numa", 1) == ["0-15,32-47 "]


def test_a_system_that_does_not_show_its_cores_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def script(agent: Agent) -> None:
        assert agent.hear(ReadTopology).environ == {"A": "1"}
        agent.say(TopologyRead(0, [[0, 0, -1, -1, 0], [1, 1, -1, -1, 0]], [0], [[10]], [], [], False))

    agent = Agent(script)
    agent.thread.start()
    spec = JobSpec(Target("program", "true"), nproc=2, bind="core", environ={"A": "1"})
    plan = bring_up(BringUp(), spec, [], [agent.link], (), HostOptions(), quiet=False).plan
    agent.thread.join()
    agent.link.hang_up()
    assert [rank.binding for rank in plan.ranks] == [Binding((0,), ()), Binding((1,), ())]
    said = "launchpad: node0 doesn't show which of its CPUs are one core; each counts as a core\n"
    assert capfd.readouterr().err == said


# More ranks than there is room for.


def test_more_ranks_than_cores_share_them(read: Read) -> None:
    assert bound(read(VM), "core", 8) == [f"{core} 0" for core in ("0-1", "2-3", "4-5", "6-7") for _ in range(2)]


def test_more_ranks_than_gpus_share_them(read: Read) -> None:
    topology = read(XEON)
    assert bound(topology, "numa", 8) == bound(topology, "numa", 4) * 2
    assert len(set(bound(topology, "exclusive", 8))) == 8


def test_more_ranks_than_core_complexes_take_them_in_turn(read: Read) -> None:
    topology = read(EPYC, {"CUDA_VISIBLE_DEVICES": "0"})
    assert bound(topology, "core-complex", 3) == ["48-55,176-183 3", "56-63,184-191 3", "48-55,176-183 3"]


def test_the_largest_core_complex_comes_first(read: Read) -> None:
    topology = read(EPYC, {"CUDA_VISIBLE_DEVICES": "0"}, cpus="55-63")
    assert bound(topology, "core-complex", 2) == ["56-63 3", "55 3"]


def test_ranks_that_want_cores_of_their_own_need_enough(read: Read) -> None:
    with pytest.raises(UsageError) as caught:
        bound(read(EPYC, {"CUDA_VISIBLE_DEVICES": "2"}, cpus="16-18"), "exclusive", 4)
    assert str(caught.value) == (
        "--bind exclusive: 4 ranks of host belong to NUMA node 1, of which they may use 3 cores; start fewer ranks "
        "there, or let them share it with --bind numa"
    )


def test_an_agent_that_finds_no_cpus() -> None:
    with pytest.raises(UsageError, match="the agent on host found no CPUs to bind ranks to"):
        bound(TopologyRead(0, [[1]], [], [], [], [], True), "numa", 1)


@UNHURRIED
@given(
    rows=st.lists(
        st.lists(st.integers(-3, 9), min_size=5, max_size=5), min_size=1, max_size=20, unique_by=lambda r: r[0]
    ),
    gpus=st.lists(st.integers(-1, 9), max_size=4),
    memory=st.lists(st.integers(0, 9), max_size=3),
    count=st.integers(1, 12),
    bind=st.sampled_from([bind for bind in get_args(Bind) if bind != "none"]),
)
def test_every_rank_has_cpus(rows: list[list[int]], gpus: list[int], memory: list[int], count: int, bind: Bind) -> None:
    topology = TopologyRead(0, rows, [0, 1], [[10, 20], [20, 10]], memory, gpus, True)
    try:
        found = bind_ranks(bind, topology, count, "host")
    except UsageError:
        assert bind == "exclusive"
        return
    assert len(found) == count
    assert threads(found) >= 1
    for one in found:
        assert set(one.cpus) <= {row[0] for row in rows}
        assert one.cpus
        assert set(one.memory) <= set(memory)
        assert bool(one.memory) == bool(memory)
    if bind == "exclusive":
        assert all(not set(one.cpus) & set(other.cpus) for one, other in combinations(found, 2))


# Threads.


@pytest.mark.parametrize(
    ("sets", "each"), [([(0, 1), (2, 3)], 2), ([(0, 1), (0, 1)], 1), ([(0,), (0,)], 1), ([(0, 1, 2), (3, 4)], 2)]
)
def test_threads_of_ranks_do_not_share_cpus(sets: list[tuple[int, ...]], each: int) -> None:
    assert threads([Binding(cpus, ()) for cpus in sets]) == each


def plan_of(topology: TopologyRead, *, cores: int = 64, **changes: Any) -> Plan:
    spec = JobSpec(Target("script", "t.py"))._replace(**{"nproc": 4, "bind": "exclusive", **changes})
    return make_plan(spec, [NODE._replace(cores=cores)], "abc", topologies=[topology])


def test_a_plan_has_the_binding_and_its_threads(read: Read) -> None:
    plan = plan_of(read(XEON))
    assert [rank.binding for rank in plan.ranks] == list(bind_ranks("exclusive", read(XEON), 4, "host"))
    assert plan.nodes[0].defaults["OMP_NUM_THREADS"] == "16"
    start = plan.start(plan.nodes[0], 0, 0, 1, Stdin())
    assert [list(start.ranks[0]["bind"][0]), list(start.ranks[0]["bind"][1])] == [[*range(8), *range(32, 40)], [0]]
    assert plan.as_json()["nodes"][0]["ranks"][3]["memory_nodes"] == (1,)
    assert "    CPUs 24-31,56-63, memory of NUMA node 1" in dry_run.in_words(plan).splitlines()


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({"bind": "core"}, "2"),
        ({"bind": "numa"}, "16"),
        ({"bind": "none"}, "16"),
        ({"cores": 8}, "2"),  # the cgroup's quota
        ({"nproc": 2, "bind": "numa"}, "16"),  # both GPUs are at one node
    ],
)
def test_threads_follow_the_binding(read: Read, changes: dict[str, Any], threads: str) -> None:
    assert plan_of(read(XEON), **changes).nodes[0].defaults["OMP_NUM_THREADS"] == threads


def test_the_users_threads_stay(read: Read) -> None:
    assert "OMP_NUM_THREADS" not in plan_of(read(XEON), environ={"OMP_NUM_THREADS": "3"}).nodes[0].defaults


def test_another_number_of_ranks_is_bound_anew(read: Read) -> None:
    """A node that is seated with fewer ranks, and a spare, whose ranks are to come."""
    topology = read(XEON, NO_GPUS)
    spec = JobSpec(Target("script", "t.py"), nproc=4, bind="exclusive")
    nodes = [NODE._replace(cores=64), NODE._replace(hostname="spare", cores=64)]
    for seats, wanted in ((Seat(0, 4), "0-7,32-39"), (Seat(0, 2), "0-15,32-47")):
        plan = make_plan(spec, nodes, "abc", seats=[seats], topologies=[topology, topology])
        assert written(plan.ranks[0].binding)[0] == wanted
        assert plan.nodes[1].ranks == ()
        assert plan.nodes[1].defaults["OMP_NUM_THREADS"] == "16"


# In words.


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("0-7,64-71", "0"), "CPUs 0-7,64-71, memory of NUMA node 0"),
        (("3", "0-1"), "CPU 3, memory of NUMA nodes 0-1"),
        (("3", ""), "CPU 3, memory of any NUMA node"),
        (("", ""), "not bound"),
    ],
)
def test_a_binding_in_words(where: tuple[str, str], words: str) -> None:
    assert in_words(*where) == words


def said(events: Iterable[RanksBound], *, reports: bool) -> list[str]:
    notes: list[str] = []
    sink = Notes(Diagnosis(), notes.append, quiet=False, reports_bindings=reports)
    for event in events:
        sink.on(event)
    return notes


def test_bindings_are_said_on_request_and_again_when_they_change() -> None:
    first, other = (RanksBound(0, [[0, "a", cpus, "0"], [1, "b", "", ""]]) for cpus in ("0-1", "2"))
    lines = ["rank 0 on a: CPUs 0-1, memory of NUMA node 0\nrank 1 on b: not bound"]
    assert said([first, first], reports=True) == lines
    assert said([first, other], reports=True) == [*lines, lines[0].replace("CPUs 0-1", "CPU 2")]
    assert said([first], reports=False) == []
