"""PMI-1 without any MPI: requests and answers, messages between nodes and head, and cleanup."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.agent.mpi import shm
from launchpad.agent.mpi.node_worlds import Members
from launchpad.agent.mpi.pmi import (
    KEYS_PER_RANK,
    LONGEST_LINE,
    MOST_KEYS,
    Ask,
    Enter,
    Fail,
    Keys,
    PmiConnection,
    Reply,
    barrier_out,
    parse,
)
from launchpad.head.machine import Machine
from launchpad.head.mpi_worlds import MpiWorlds
from launchpad.head.pmix import MOST_PUBLISHED
from launchpad.job.limits import Limits
from launchpad.job.membership import Seat
from launchpad.job.mpi import MpiSeat, environ, process_mapping, spawned_programs
from launchpad.job.plan import Master, NodePlacement, Plan, make_plan
from launchpad.job.roles import join_plans
from launchpad.job.spec import JobSpec, RoleSpec, Target
from launchpad.protocol.commands import BarrierOut, MpiReply, MpiWorld
from launchpad.protocol.events import AgentReady, BarrierIn, MpiRequest, PmixRequest, RankExited, RankFailed
from tests.support.unhurried import UNHURRIED
from tests.support.wire import cut

MAPPING = "(vector,(0,2,2))"

# Recorded from MPICH 5.0.2 (the wheel, ch4:ucx): rank 2 of 2 hosts x 2, with shortened values, and our answers.
RECORDED = [
    ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2"),
    ("cmd=get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"),
    ("cmd=get_appnum", "cmd=appnum rc=0 appnum=0"),
    ("cmd=get_my_kvsname", "cmd=my_kvsname rc=0 kvsname=job-0"),
    ("cmd=get kvsname=job-0 key=PMI_process_mapping", f"cmd=get_result rc=0 value={MAPPING}"),
    ("cmd=get kvsname=job-0 key=PMI_hwloc_xmlfile", "cmd=get_result rc=1 msg=key_not_found"),
    ("cmd=put kvsname=job-0 key=-allgather-1-2 value=segments=2", "cmd=put_result rc=0"),
    ("cmd=put kvsname=job-0 key=-allgather-1-2-seg-1/2 value=2031[2]63", "cmd=put_result rc=0"),
    ("cmd=put kvsname=job-0 key=-allgather-1-2-seg-2/2 value=[8]", "cmd=put_result rc=0"),
    ("cmd=barrier_in", None),
    ("cmd=get kvsname=job-0 key=-allgather-1-0", "cmd=get_result rc=0 value=segments=1"),
    ("cmd=get kvsname=job-0 key=-allgather-1-2-seg-1/2", "cmd=get_result rc=0 value=2031[2]63"),
    ("cmd=get_universe_size", "cmd=universe_size rc=0 size=4"),
    ("cmd=barrier_in", None),
    ("cmd=finalize", "cmd=finalize_ack rc=0"),
]
TEXT = "".join(f"{line}\n" for line, _ in RECORDED).encode()


def keys() -> Keys:
    return Keys("job-0", 4, {"PMI_process_mapping": MAPPING, "-allgather-1-0": "segments=1"})


def talk(*data: bytes, connection: PmiConnection | None = None) -> list[Any]:
    """All actions for these bytes."""
    connection = connection or PmiConnection(keys())
    return [action for piece in data for action in connection.feed(piece)]


def test_a_recorded_exchange() -> None:
    connection = PmiConnection(keys())
    for line, answer in RECORDED:
        expected = Enter("WORLD", []) if answer is None else Reply(answer)
        assert talk(f"{line}\n".encode(), connection=connection) == [expected]


def test_new_keys_are_collected_for_the_other_nodes() -> None:
    known = keys()
    talk(TEXT, connection=PmiConnection(known))
    assert known.new == {
        "-allgather-1-2": "segments=2", "-allgather-1-2-seg-1/2": "2031[2]63", "-allgather-1-2-seg-2/2": "[8]",
    }  # fmt: skip


@UNHURRIED
@given(places=st.lists(st.integers(0, len(TEXT)), max_size=20))
def test_commands_may_be_split_anywhere(places: list[int]) -> None:
    assert talk(*cut(TEXT, places)) == talk(TEXT)


@UNHURRIED
@given(data=st.binary(max_size=300) | st.text("cmd=putgeinvalkybro_ \n:,0123", max_size=200).map(str.encode))
def test_no_input_raises(data: bytes) -> None:
    for action in talk(data + b"\n"):
        assert isinstance(action, Reply | Enter | Ask | Fail)


@pytest.mark.parametrize("line", ["cmd=dance", "hello", "", "cmd=", "cmd=mput a=b", "endcmd"])
def test_an_unknown_command_aborts_the_world(line: str) -> None:
    assert talk(f"{line}\n".encode()) == [Fail(1, f"sent an unknown PMI-1 command: {line}")]


def test_an_endless_line_is_refused() -> None:
    (action,) = talk(b"cmd=put key=a value=", b"x" * LONGEST_LINE)
    assert isinstance(action, Fail)
    (action,) = talk(b"x" * LONGEST_LINE + b"x\n")
    assert isinstance(action, Fail)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ("key=PMI_mine value=1", "rc=1 msg=Keys_with_PMI__prefix_are_reserved"),  # Hydra's wording
        (f"key={'k' * 65} value=1", "rc=1 msg=key_or_value_too_long"),
        (f"key=k value={'v' * 1025}", "rc=1 msg=key_or_value_too_long"),
        ("value=1", "rc=1 msg=key_or_value_too_long"),
        (f"key={'k' * 64} value={'v' * 1024}", "rc=0"),
    ],
)
def test_the_limits_of_put(fields: str, answer: str) -> None:
    assert talk(f"cmd=put kvsname=job-0 {fields}\n".encode()) == [Reply(f"cmd=put_result {answer}")]


def test_an_unsupported_version_is_answered_with_ours() -> None:
    (reply,) = talk(b"cmd=init pmi_version=2 pmi_subversion=0\n")
    assert reply.line.startswith("cmd=response_to_init rc=-1 pmi_version=1")


@pytest.mark.parametrize(
    ("group", "action"),
    [
        ("WORLD:7", Enter("WORLD:7", [])),
        ("NODE:3", Enter("NODE:3", None)),
        ("2,0,2:5", Enter("2,0,2:5", [0, 2])),
        ("4,0:5", Fail(1, "entered a barrier of ranks that don't exist: 4,0:5")),
        ("OTHER", Fail(1, "entered a barrier of ranks that don't exist: OTHER")),
    ],
)
def test_barriers_of_a_subset_of_ranks(group: str, action: Enter | Fail) -> None:
    assert talk(f"cmd=barrier_in group={group}\n".encode()) == [action]


def test_barrier_out_has_the_tag() -> None:
    assert barrier_out("WORLD") == "cmd=barrier_out rc=0"
    assert barrier_out("2,3:77") == "cmd=barrier_out rc=0 tag=77"


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ("exitcode=5", 5, "called MPI_Abort(5)"),
        ("exitcode=5 message=abort", 5, "called MPI_Abort(5)"),
        ("exitcode=3 message=out of luck", 3, "called MPI_Abort(3): out of luck"),
        ("exitcode=0", 1, "called MPI_Abort(0)"),
        ("exitcode=256", 1, "called MPI_Abort(256)"),
        ("exitcode=-1", 255, "called MPI_Abort(-1)"),
        ("exitcode=x", 1, "called MPI_Abort(1)"),
        ("", 1, "called MPI_Abort(1)"),
    ],
)
def test_abort(fields: str, code: int, text: str) -> None:
    assert talk(f"cmd=abort {fields}\n".encode()) == [Fail(code, text)]


@pytest.mark.parametrize(
    ("mine", "other", "inside"),
    [
        ([], [], False),
        (["init"], ["init"], True),
        (["init", "barrier", "get"], ["init", "barrier", "finalize"], True),
        (["init", "barrier"], ["init", "barrier"], False),  # _exit after MPI_Finalize
        (["init", "barrier"], ["init", "barrier", "finalize"], False),
        (["init", "barrier"], ["init", "barrier", "get"], True),  # a barrier of MPI_Init
        (["init", "barrier"], ["init", "barrier", "get", "barrier"], True),  # only the other one is finalizing
        (["init", "barrier", "finalize"], ["init"], False),
        (["init", "barrier", "finalize", "init"], ["init"], True),
    ],
)
def test_whether_a_rank_exited_too_early(mine: list[str], other: list[str], inside: bool) -> None:
    lines = {
        "init": "cmd=init pmi_version=1 pmi_subversion=1", "barrier": "cmd=barrier_in", "get": "cmd=get key=x",
        "finalize": "cmd=finalize",
    }  # fmt: skip
    one, two = PmiConnection(keys()), PmiConnection(keys())
    for connection, words in ((one, mine), (two, other)):
        talk(*(f"{lines[word]}\n".encode() for word in words), connection=connection)
    assert one.is_inside([two]) is inside


# A node's part.


def world(first: int = 0, ranks: Sequence[int] = (0, 1), size: int = 4) -> MpiWorld:
    counts = [len(ranks)] * (size // len(ranks))
    hosts = [f"n{node}" for node in range(len(counts))]
    return MpiWorld(0, "job-0", size, first, list(ranks), [0] * size, hosts, counts, MAPPING, [], {"a": "1"}, "", "")


def test_a_barrier_within_a_node_completes_there() -> None:
    here = Members(world(size=2))
    assert here.enter(1, Enter("WORLD", [])) == (False, None)
    assert here.enter(0, Enter("WORLD", [])) == (True, None)
    assert here.leave("WORLD") == {0, 1}
    here = Members(world(first=2, ranks=(2, 3)))
    assert here.enter(2, Enter("NODE:1", None)) == (False, None)
    assert here.enter(3, Enter("NODE:1", None)) == (True, None)
    assert here.enter(3, Enter("3:1", [3])) == (True, None)


def test_the_head_hears_once_of_a_barrier_across_nodes_with_the_new_keys() -> None:
    here = Members(world())
    here.keys.put("b", "2")
    assert here.enter(0, Enter("WORLD", [])) == (False, None)
    complete, event = here.enter(1, Enter("WORLD", []))
    assert (complete, event and event[1:]) == (False, (0, "WORLD", [], {"b": "2"}))
    assert here.leave("WORLD") == {0, 1}
    _, event = here.enter(1, Enter("1,2:0", [1, 2]))
    assert event is not None
    assert event[1:] == (0, "1,2:0", [1, 2], {})


# The head's part.


def plan(*counts: int) -> Plan:
    spec = JobSpec(target=Target("script", "t.py"), backend="mpi")
    nodes = [AgentReady(0, 0.0, 1, f"n{n}", 2, 0, None, 1 << 20, 1 << 20, 29501) for n in range(len(counts))]
    several = len(counts) > 1
    places = [
        NodePlacement(f"n{n}", count, "python", "/w", "eth0" if several else "") for n, count in enumerate(counts)
    ]
    return make_plan(spec, nodes, "run", places=places, master=Master("10.0.0.1", 29501) if several else None)


def test_each_node_gets_its_part_of_the_world() -> None:
    worlds = MpiWorlds(plan(2, 1).taking_part, "job-0")
    shared = ([0, 0, 0], ["n0", "n1"], [2, 1], "(vector,(0,1,2),(1,1,1))", [], {}, "eth0", "")
    assert worlds.begin(0) == MpiWorld(0, "job-0", 3, 0, [0, 1], *shared)
    assert worlds.begin(1) == MpiWorld(0, "job-0", 3, 2, [2], *shared)


def test_each_role_is_a_world_of_its_own() -> None:
    """Its MPI ranks are counted from 0, whatever numbers they have in the job."""
    spec = JobSpec(target=Target("script", "t.py"), backend="mpi", nproc=2)
    roles = [RoleSpec("a", spec), RoleSpec("b", spec._replace(backend="")), RoleSpec("c", spec._replace(mpi="openmpi"))]
    node = AgentReady(0, 0.0, 1, "n0", 2, 0, None, 1 << 20, 1 << 20, 29501)
    joined = join_plans(
        roles,
        [make_plan(role.spec, [node], "run") for role in roles],
        {role.name: [[], []] for role in roles},
        {"n0": 2},
    )
    assert {name: [node.index for node in nodes] for name, nodes in joined.mpi_worlds.items()} == {"a": [0], "c": [2]}
    world = MpiWorlds(joined.mpi_worlds["c"], "job-0").begin(2)
    assert world == MpiWorld(0, "job-0", 2, 0, [4, 5], [0, 0], ["c"], [2], "(vector,(0,1,2))", [], {}, "", "openmpi", 4)
    assert "PMI_RANK" not in joined.ranks[2].environ
    assert [joined.ranks[rank].environ["PMI_RANK"] for rank in (4, 5)] == ["0", "1"]


def test_a_barrier_completes_when_all_nodes_are_in_and_delivers_the_others_keys() -> None:
    worlds = MpiWorlds(plan(1, 1, 1).taking_part, "job-0")
    assert worlds.on(2, BarrierIn(0, 0, "WORLD", [], {"c": "3"})) == []
    assert worlds.on(0, BarrierIn(0, 0, "WORLD", [], {"a": "1"})) == []
    assert worlds.on(1, BarrierIn(0, 0, "WORLD", [], {})) == [
        (0, BarrierOut(0, "WORLD", {"c": "3"})),
        (1, BarrierOut(0, "WORLD", {"c": "3", "a": "1"})),
        (2, BarrierOut(0, "WORLD", {"a": "1"})),
    ]


def test_a_barrier_of_a_subset_involves_only_its_nodes() -> None:
    worlds = MpiWorlds(plan(2, 1, 1).taking_part, "job-0")
    assert worlds.on(0, BarrierIn(0, 0, "0,2:5", [0, 2], {"a": "1"})) == []
    assert worlds.on(1, BarrierIn(0, 0, "0,2:5", [0, 2], {})) == [
        (0, BarrierOut(0, "0,2:5", {})),
        (1, BarrierOut(0, "0,2:5", {"a": "1"})),
    ]
    for node in (0, 1):
        worlds.on(node, BarrierIn(0, 0, "WORLD", [], {}))
    assert worlds.on(2, BarrierIn(0, 0, "WORLD", [], {})) == [
        (0, BarrierOut(0, "WORLD", {})),
        (1, BarrierOut(0, "WORLD", {})),
        (2, BarrierOut(0, "WORLD", {"a": "1"})),
    ]


def test_a_missing_node_is_reported_only_in_mpi_init() -> None:
    def gone(worlds: MpiWorlds) -> int | None:
        failed = worlds.absent()
        return failed and failed.rank

    barrier = BarrierIn(0, 0, "WORLD", [], {})
    for waits_first in (True, False):
        worlds = MpiWorlds(plan(2, 1).taking_part, "job-0")
        if waits_first:
            worlds.on(1, barrier)
        worlds.left(0, RankExited(0, 1, 0, 0, False))
        assert gone(worlds) is None
        worlds.left(0, RankExited(0, 0, 0, 0, False))
        if not waits_first:
            assert gone(worlds) is None
            worlds.on(1, barrier)
        assert gone(worlds) == 0
    worlds = MpiWorlds(plan(1, 1).taking_part, "job-0")
    worlds.on(1, BarrierIn(0, 0, "1:0", [1], {}))
    worlds.left(0, RankExited(0, 0, 0, 0, False))
    assert gone(worlds) is None
    worlds = MpiWorlds(plan(1, 1).taking_part, "job-0")
    for node in (0, 1, 1):
        worlds.on(node, barrier)
    worlds.left(0, RankExited(0, 0, 0, 0, False))
    assert gone(worlds) is None  # it had passed MPI_Init


def test_impossible_events_are_recognised() -> None:
    worlds = MpiWorlds(plan(1, 1).taking_part, "job-0")
    assert worlds.makes_sense(1, BarrierIn(0, 0, "WORLD", [], {}))
    assert not worlds.makes_sense(1, BarrierIn(0, 1, "WORLD", [], {}))
    assert not worlds.makes_sense(1, BarrierIn(0, 0, "0,2:0", [0, 2], {}))
    assert not worlds.makes_sense(1, BarrierIn(0, -1, "WORLD", [], {}))


def test_the_name_service_answers_like_hydra() -> None:
    worlds = MpiWorlds(plan(1, 1).taking_part, "job-0")
    exchange = [
        ("cmd=lookup_name service=s", "cmd=lookup_result rc=1 msg=service_not_found"),
        ("cmd=publish_name service=s port=tag=0$description=x", "cmd=publish_result rc=0"),
        ("cmd=publish_name service=s port=other", "cmd=publish_result rc=1 msg=key_already_present"),
        ("cmd=lookup_name service=s", "cmd=lookup_result rc=0 port=tag=0$description=x"),
        ("cmd=publish_name service=s and more port=third", "cmd=publish_result rc=0"),
        ("cmd=lookup_name service=s and more", "cmd=lookup_result rc=0 port=third"),
        ("cmd=unpublish_name service=s", "cmd=unpublish_result rc=0"),
        ("cmd=unpublish_name service=s", "cmd=unpublish_result rc=1 msg=service_not_found"),
    ]
    for line, answer in exchange:
        assert talk(f"{line}\n".encode()) == [Ask([line])]
        assert worlds.on(1, MpiRequest(0, 1, [line])) == [(1, MpiReply(1, answer))]


def machine() -> Machine:
    return Machine([Seat(0, 2)], Limits(), 0.0)


def test_a_rank_that_aborts_is_the_cause_whatever_follows() -> None:
    state = machine()
    state.on(RankFailed(10, 1, 5, "called MPI_Abort(5)"), 1.0)
    assert state.running == {0, 1}  # its process may still be running
    state.on(RankExited(20, 0, -15, 0, False), 1.0)
    state.on(RankExited(21, 1, 0, 0, False), 1.0)
    assert state.cause is not None
    assert (state.exit_code, state.cause.rank, state.cause.text) == (5, 1, "called MPI_Abort(5)")
    assert state.phase == "over"


def test_an_abort_while_the_job_is_being_stopped_is_not_the_cause() -> None:
    state = machine()
    state.on(RankExited(10, 0, 7, 0, False), 1.0)
    state.on(RankFailed(20, 1, 5, "called MPI_Abort(5)"), 1.0)
    assert state.exit_code == 7


# Placement and environment.


@pytest.mark.parametrize(
    ("counts", "mapping"),
    [
        ([4], "(vector,(0,1,4))"),
        ([2, 2, 2], "(vector,(0,3,2))"),
        ([1, 3], "(vector,(0,1,1),(1,1,3))"),
        ([2, 2, 1, 2], "(vector,(0,2,2),(2,1,1),(3,1,2))"),
        ([1, 2] * 80, ""),  # too long for a value
    ],
)
def test_the_mapping_of_ranks_to_nodes(counts: list[int], mapping: str) -> None:
    assert process_mapping(counts) == mapping


def test_the_ranks_environment() -> None:
    first, *_, last = plan(2, 1).ranks
    assert first.environ["PMI_RANK"] == first.environ["OMPI_COMM_WORLD_RANK"] == "0"
    assert {name: last.environ[name] for name in environ(MpiSeat(0, 1, 0, 1, "h"))} == environ(
        MpiSeat(2, 3, 0, 1, "n1")
    )
    assert last.environ["LAUNCHPAD_BACKEND"] == "mpi"
    assert last.environ["WORLD_SIZE"] == "3"
    assert "PMI_HOSTNAME" not in plan(1).ranks[0].environ


# Spawning.

SPAWN = """mcmd=spawn
nprocs=2
execname=/bin/python3
totspawns=2
spawnssofar=1
argcnt=3
arg1=s.py
arg2=a b
arg3=
preput_num=1
preput_key_0=PARENT_ROOT_PORT_NAME
preput_val_0=tag#0$x=y$
info_num=2
info_key_0=wdir
info_val_0=sub
info_key_1=host
info_val_1=elsewhere
endcmd
mcmd=spawn
nprocs=1
execname=prog
totspawns=2
spawnssofar=2
argcnt=0
info_num=1
info_key_0=path
info_val_0=/opt
endcmd
"""


def test_a_spawn_of_several_programs_is_a_single_request() -> None:
    (ask,) = talk(SPAWN.encode())
    assert ask == Ask(SPAWN.splitlines())
    first, second = spawned_programs(ask.lines)
    assert first.argv == ["/bin/python3", "-u", "s.py", "a b", ""]
    assert (first.nproc, first.cwd, first.python) == (2, "sub", True)
    assert first.keys == {"PARENT_ROOT_PORT_NAME": "tag#0$x=y$"}
    assert (second.argv, second.nproc, second.python) == (["/opt/prog"], 1, False)


@pytest.mark.parametrize(
    ("words", "argv", "python"),
    [
        (["python", "-u", "s.py"], ["python", "-u", "s.py"], True),
        (["python", "-m", "mod", "x"], ["python", "-u", "-m", "mod", "x"], True),
        (["python", "-c", "pass"], ["python", "-c", "pass"], False),
        (["python"], ["python"], False),
        (["pythonista", "s.py"], ["pythonista", "s.py"], False),
        (["sh", "-c", "cd x\n\ny=1 z", "w"], ["sh", "-c", "cd x\n\ny=1 z", "w"], False),
    ],
)
def test_a_spawned_program_may_be_python(words: list[str], argv: list[str], python: bool) -> None:
    args = [f"arg{place}={word}" for place, word in enumerate(words[1:], 1)]
    lines = ["mcmd=spawn", "nprocs=1", f"execname={words[0]}", f"argcnt={len(args)}", *args, "endcmd"]
    (program,) = spawned_programs("\n".join(lines).split("\n"))
    assert (program.argv, program.python) == (argv, python)


def test_the_spawned_world_is_on_the_first_node() -> None:
    worlds = MpiWorlds(plan(1, 2).taking_part, "job-0", 1)
    made, entries = worlds.spawn(MpiRequest(0, 2, SPAWN.splitlines()), 3)
    assert (made.number, made.name, made.size, made.first) == (1, "job-0-1", 3, 0)
    assert (made.ranks, made.programs, made.mapping) == ([3, 4, 5], [0, 0, 1], "(vector,(0,1,3))")
    assert [entry["cwd"] for entry in entries] == ["/w/sub", "/w/sub", "/w/"]
    own = entries[1]["environ"]
    assert [own[name] for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMI_SPAWNED")] == list("13131")
    assert own["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert worlds.on(0, BarrierIn(0, 1, "WORLD", [], {})) == [(0, BarrierOut(1, "WORLD", {}))]
    again, _ = worlds.spawn(MpiRequest(0, 3, SPAWN.splitlines()), 6)
    assert (again.name, again.ranks) == ("job-0-2", [6, 7, 8])


@pytest.mark.parametrize("line", ["nprocs=0", "nprocs=many", "execname=", "preput_num=5", "argcnt=x"])
def test_a_malformed_spawn(line: str) -> None:
    worlds = MpiWorlds(plan(1).taking_part, "job-0")
    with pytest.raises((ValueError, LookupError)):
        worlds.spawn(MpiRequest(0, 0, ["mcmd=spawn", "execname=x", "nprocs=1", line, "endcmd"]), 1)
    assert worlds.spawn(MpiRequest(0, 0, SPAWN.splitlines()), 1)[0].ranks == [1, 2, 3]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 512 MiB more than now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def small_plan(most: int) -> Plan:
    """Two ranks on a node that can hold `most`."""
    spec = JobSpec(target=Target("script", "t.py"), backend="mpi")
    nodes = [AgentReady(0, 0.0, 1, "n0", 2, 0, None, 1 << 20, most + 1, 29501)]
    return make_plan(spec, nodes, "run", places=[NodePlacement("n0", 2, "python", "/w", "")])


def pmix_spawn(count: Any, **other: Any) -> PmixRequest:
    app = {"count": count, "argv": ["x"], "environ": [], "cwd": ""} | other
    return PmixRequest(0, 1, "spawn", [[0, 0]], [[app]])


def pmi_spawn(*lines: str) -> MpiRequest:
    return MpiRequest(0, 0, ["mcmd=spawn", "execname=x", *lines, "endcmd"])


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "request_",
    [
        pmi_spawn("nprocs=99999999"),
        pmi_spawn("nprocs=9"),
        pmi_spawn("nprocs=1", "argcnt=999999999"),
        pmi_spawn("nprocs=1", "info_num=999999999"),
        pmi_spawn("nprocs=1", "argcnt=1", "arg1=a\0b"),
        pmix_spawn(2**31 - 1),
        pmix_spawn(1e300),
        pmix_spawn(True),
        pmix_spawn(1, argv=["x", 5]),
        pmix_spawn(1, environ=["=5"]),
        pmix_spawn(1, cwd=None),
        pmix_spawn(8, argv=["x", "y" * (2 << 20)]),
    ],
    ids=lambda request: f"{type(request).__name__} {str(request)[-40:]}",
)
def test_a_spawn_that_its_node_can_not_hold_or_not_run(request_: Any) -> None:
    worlds = MpiWorlds(small_plan(10).taking_part, "job-0")
    with pytest.raises((ValueError, LookupError, TypeError)):
        worlds.spawn(request_, 2)
    assert worlds.spawn(pmi_spawn("nprocs=8"), 2)[0].ranks == list(range(2, 10))


def test_the_room_of_ranks_that_have_exited_is_free_again() -> None:
    worlds = MpiWorlds(small_plan(10).taking_part, "job-0")
    worlds.spawn(pmi_spawn("nprocs=8"), 2)
    with pytest.raises(ValueError, match="at most 0"):
        worlds.spawn(pmi_spawn("nprocs=1"), 2)
    worlds.left(0, RankExited(0, 5, 0, 0, None))
    assert worlds.spawn(pmi_spawn("nprocs=1"), 10)[0].ranks == [10]


@pytest.mark.usefixtures("little_memory")
def test_a_rank_that_never_ends_its_spawn_takes_no_memory() -> None:
    session = PmiConnection(Keys("job-0", 1, {}))
    (fail,) = session.feed(b"mcmd=spawn\n" + b"\n" * (5 << 20))
    assert isinstance(fail, Fail)


@pytest.mark.usefixtures("little_memory")
def test_keys_and_names_are_counted() -> None:
    session = PmiConnection(Keys("job-0", 1, {}))
    value = "v" * 1000
    puts = (b"cmd=put key=%d value=%b\n" % (number, value.encode()) for number in range(10_000))
    replies = [reply.line for put in puts for reply in session.feed(put) if isinstance(reply, Reply)]
    assert replies.count("cmd=put_result rc=0") == MOST_KEYS + KEYS_PER_RANK
    assert replies[-1] == "cmd=put_result rc=1 msg=too_many_keys"
    worlds = MpiWorlds(small_plan(10).taking_part, "job-0")
    lines = [f"cmd=publish_name service={number} port=p" for number in range(MOST_PUBLISHED + 1)]
    answers = [worlds.on(0, MpiRequest(0, 0, [line]))[0][1].line for line in lines]
    assert answers[-2:] == ["cmd=publish_result rc=0", "cmd=publish_result rc=1 msg=too_many_names"]


# Cleanup.


def test_the_id_of_a_world() -> None:
    assert f"{shm.world_id('launchpad-503d59cbec258a71-0'):x}" == "dbc63bf4"  # the name of MPICH 5.0.2's file


def test_only_files_of_our_worlds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, folder = tmp_path / "shm", tmp_path / "job"
    memory.mkdir()
    folder.mkdir()
    monkeypatch.setattr(shm, "_SHM", str(memory))
    number = shm.world_id("ours")
    ours = [f"mpich_shm_{number:x}_0", f"mpich_vci_{number:x}_12"]
    others = [f"mpich_shm_{number + 1:x}_0", f"mpich_shm_{number:x}", "torch_1", f"mpich_shm_{number:x}_0_x"]
    for name in itertools.chain(ours, others):
        (memory / name).touch()
    shm.remove(str(folder))
    assert len(os.listdir(memory)) == 6
    shm.remember(str(folder), "ours")
    shm.remove(str(folder))
    assert sorted(os.listdir(memory)) == sorted(others)
    assert os.listdir(folder) == []


def test_words_with_and_without_values() -> None:
    assert parse("cmd=abort exitcode=1 message=no such  file a=b") == {
        "cmd": "abort", "exitcode": "1", "message": "no such file", "a": "b",
    }  # fmt: skip
