"""--stall-timeout: what is a hang and what only looks like one, by numbers."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from launchpad.agent.host import procfs, traffic
from launchpad.agent.stacks.spinning import Mappings, MpiPlace
from launchpad.diagnosis.apart import sentences
from launchpad.head.machine import Phase, TakeStacks
from launchpad.head.pair_check import LISTEN_SECONDS, REACH_SECONDS, PairCheck
from launchpad.head.stack_requests import ANSWER_SECONDS, StackRequests
from launchpad.head.stall import StallWatch, is_stuck, stalled
from launchpad.head.vain_waits import MOST_SECONDS, SECONDS
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.protocol.commands import Listen, Reach
from launchpad.protocol.events import LeftBehind, Listening, Output, RankExited, RankStarted, Reached, StackDump
from launchpad.protocol.stacks import together
from tests.support.hubs import FakeJob, FakeNodes

C10D = "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
POLLS = "/lib/python3.11/site-packages/launchpad/collectives/mpi/work.py"


def look(frames: list[tuple[str, int, str]], text: str = "", rank: int = 0, **facts: Any) -> StackDump:
    """A rank as it was found; the last frame is the user's, with the text."""
    stack = [[file, line, name, text if file == "train.py" else ""] for file, line, name in frames]
    given = {
        "time": 0,
        "rank": rank,
        "number": 1,
        "pid": 7,
        "why": "",
        "state": "S",
        "wchan": "",
        "cpu": 1.0,
        "busy": False,
        "moved": 0,
        "beats": -1,
        "collectives": {},
        "native": "",
        **facts,
    }
    return StackDump(threads=[{"name": "MainThread", "frames": stack}] if stack else [], **given)


SLEEPS = [("train.py", 5, "read_batch"), ("train.py", 12, "main")]
GLOO = [(C10D, 3252, "all_reduce"), ("train.py", 12, "main")]
MPI_LINE = [("train.py", 12, "main")]


def polling(line: int) -> list[tuple[str, int, str]]:
    return [(POLLS, line, "_wait"), (C10D, 3252, "all_reduce"), ("train.py", 12, "main")]


def listening(wakes: int, *, thread: int = 7, descriptor: int = 3, patience: float = 0.0) -> StackDump:
    """A rank of which a thread waits for data."""
    return look(SLEEPS, collectives={"receives": [(thread, descriptor, wakes, patience)]})


BURNS = {"cpu": 11.0, "busy": True}  # all of the ten seconds since

# before, after, whether it is stuck
CASES = {
    "the same stack and no processor": (look(SLEEPS), look(SLEEPS), True),
    "another line": (look(SLEEPS), look([("train.py", 6, "read_batch"), SLEEPS[1]]), False),
    "computes": (look(SLEEPS), look(SLEEPS, **BURNS), False),
    "waits for a processor that others have": (look(SLEEPS), look(SLEEPS, busy=True), False),
    "reads a file": (look(SLEEPS), look(SLEEPS, moved=10 << 20), False),
    "a helper thread wakes now and then": (look(SLEEPS), look(SLEEPS, cpu=1.2), True),
    "receives over a socket whose bytes nobody counts": (listening(5), listening(7), False),
    "is woken by a signal only": (listening(5), listening(6), True),
    "receives elsewhere than before": (listening(5, descriptor=4), listening(900), True),
    "its child gets a heartbeat every second": (listening(5, thread=8), listening(15, thread=8), True),
    "its child receives": (listening(5, thread=8), listening(105, thread=8), False),
    "wakes by itself five times a second": (listening(5, patience=0.2), listening(55, patience=0.2), True),
    "receives before it would wake by itself": (listening(5, patience=60.0), listening(55, patience=60.0), False),
    "waits in gloo": (look(GLOO), look(GLOO), True),
    "entered another collective of the same line": (
        look(GLOO, collectives={"counts": {"0": 4}}),
        look(GLOO, collectives={"counts": {"0": 5}}),
        False,
    ),
    "burns in a collective, and has run Python code since": (look(GLOO, beats=3), look(GLOO, beats=4, **BURNS), False),
    "burns in a collective, and has not": (look(GLOO, beats=3), look(GLOO, beats=3, **BURNS), True),
    "burns in a collective, and can't be asked": (look(GLOO), look(GLOO, **BURNS), False),
    "polls in the mpi frontend": (
        look(polling(155), beats=1, collectives={"counts": {"0": 4}, "waiting": 1}),
        look(polling(148), beats=2, collectives={"counts": {"0": 4}, "waiting": 1}, **BURNS),
        True,
    ),
    "polls in the mpi frontend for the next one": (
        look(polling(155), beats=1, collectives={"counts": {"0": 4}, "waiting": 1}),
        look(polling(148), beats=2, collectives={"counts": {"0": 5}, "waiting": 1}, **BURNS),
        False,
    ),
    "mpi4py's recv": (
        look(MPI_LINE, "x = comm.recv(source=1)", beats=0, collectives={"mpi": True}),
        look(MPI_LINE, "x = comm.recv(source=1)", beats=0, collectives={"mpi": True}, **BURNS),
        True,
    ),
    "mpi4py's recv again and again": (
        look(MPI_LINE, "x = comm.recv(source=1)", beats=0, collectives={"mpi": True}),
        look(MPI_LINE, "x = comm.recv(source=1)", beats=1, collectives={"mpi": True}, **BURNS),
        False,
    ),
    "mpi4py's allreduce of objects, which keeps the interpreter's lock": (
        look(MPI_LINE, "x = comm.allreduce(1)", collectives={"mpi": True, "unanswered": 3}),
        look(MPI_LINE, "x = comm.allreduce(1)", collectives={"mpi": True, "unanswered": 3}, **BURNS),
        True,
    ),
    "mpi4py's allreduce of objects again and again": (
        look(MPI_LINE, "x = comm.allreduce(1)", collectives={"mpi": True, "unanswered": 3}),
        look(MPI_LINE, "x = comm.allreduce(1)", collectives={"mpi": True, "unanswered": 5}, **BURNS),
        False,
    ),
    "C code that keeps the lock and computes": (
        look(MPI_LINE, "x = numpy.dot(a, b)", collectives={"mpi": True, "unanswered": 3}),
        look(MPI_LINE, "x = numpy.dot(a, b)", collectives={"mpi": True, "unanswered": 3}, **BURNS),
        False,
    ),
    "C code that computes, in a program with mpi4py": (
        look(MPI_LINE, "x = numpy.dot(a, b)", beats=0, collectives={"mpi": True}),
        look(MPI_LINE, "x = numpy.dot(a, b)", beats=0, collectives={"mpi": True}, **BURNS),
        False,
    ),
    "waits for the GPU, which waits for NCCL": (
        look(MPI_LINE, "loss.item()", beats=0, collectives={"counts": {"0": 4}, "waiting": 1}),
        look(MPI_LINE, "loss.item()", beats=0, collectives={"counts": {"0": 4}, "waiting": 1}, **BURNS),
        True,
    ),
    "waits for the GPU, which computes": (
        look(MPI_LINE, "loss.item()", beats=0, collectives={"counts": {"0": 4}, "waiting": 0}),
        look(MPI_LINE, "loss.item()", beats=0, collectives={"counts": {"0": 4}, "waiting": 0}, **BURNS),
        False,
    ),
    "no Python, and sleeps": (look([]), look([]), True),
    "no Python, and computes": (look([]), look([], **BURNS), False),
    "no Python, and spins in MPI": (
        look([], collectives={"spins": ["libmpi.so.12", "7:a"]}),
        look([], collectives={"spins": ["libmpi.so.12", "7:a"]}, **BURNS),
        True,
    ),
    "no Python, and calls MPI again and again": (
        look([], collectives={"spins": ["libmpi.so.12", "7:a"]}),
        look([], collectives={"spins": ["libmpi.so.12", "7:b"]}, **BURNS),
        False,
    ),
    "no Python, and spins in MPI, which writes": (
        look([], collectives={"spins": ["libmpi.so.12", "7:a"]}),
        look([], collectives={"spins": ["libmpi.so.12", "7:a"]}, moved=10 << 20, **BURNS),
        False,
    ),
    "another process": (look(SLEEPS), look(SLEEPS, pid=8), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_stuck_or_not(name: str) -> None:
    before, after, stuck = CASES[name]
    assert is_stuck(before, after, 10.0) is stuck


def test_a_job_stalls_when_all_its_ranks_do() -> None:
    still = {0: look(GLOO), 1: look(SLEEPS, rank=1)}
    assert stalled(still, still, [0, 1], 10.0)
    assert stalled(still, still, [1], 10.0)  # the others have left
    assert not stalled(still, {**still, 1: look(SLEEPS, rank=1, **BURNS)}, [0, 1], 10.0)
    assert not stalled(still, {0: still[0]}, [0, 1], 10.0)  # one did not answer
    assert not stalled({}, {}, [], 10.0)


def test_a_sleep_for_a_given_time_is_no_stall_if_nobody_waits() -> None:
    asleep = look(SLEEPS, collectives={"asleep": "7 12"})
    again = look(SLEEPS, collectives={"asleep": "7 13"})
    assert not stalled({0: asleep, 1: asleep}, {0: asleep, 1: asleep}, [0, 1], 10.0)
    assert stalled({0: asleep}, {0: again}, [0], 10.0)  # it looks again and again for what does not come
    assert stalled({0: asleep, 1: look(GLOO)}, {0: asleep, 1: look(GLOO)}, [0, 1], 10.0)


def test_a_connection_that_is_closed_has_moved_bytes() -> None:
    assert not is_stuck(look(SLEEPS, moved=10 << 20), look(SLEEPS, moved=0), 10.0)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


def test_what_a_process_receives_over_a_connection_counts(pair: tuple[socket.socket, socket.socket]) -> None:
    """recv(2) is not in /proc/PID/io."""
    one, other = pair
    before = procfs.use(os.getpid(), traffic.by_socket())[2]
    one.sendall(bytes(100_000))
    received = 0
    while received < 100_000:
        received += len(other.recv(100_000))
    assert procfs.use(os.getpid(), traffic.by_socket())[2] - before >= 100_000


class Stacks:
    """A job's requests for stacks."""

    def __init__(self, stall_timeout: float | None = None, *, advises: bool = False, plan: Plan | None = None) -> None:
        self.job = FakeJob(FakeNodes(0), plan)
        self.sent, self.posted = self.job.nodes.sent, self.job.posted
        self.requests = StackRequests(self.job.hub, stall_timeout, advises=advises)
        for rank in (0, 1):
            self.requests.on(0, RankStarted(0, rank, 100 + rank))

    def ask(self, why: str) -> None:
        self.requests.on(-1, TakeStacks(why))

    def answer(self, dump: StackDump) -> None:
        """To the last request."""
        self.requests.on(0, together([dump._replace(number=self.sent[-1].number)]))

    def tick(self, now: float, *running: int, phase: Phase = "clearing") -> None:
        """In a phase other than "running", nobody looks for a stall."""
        self.requests.tick(self.job.at(now, *running, phase=phase))


def test_the_stacks_are_waited_for_as_long_as_an_agent_may_need() -> None:
    stacks = Stacks()
    stacks.ask("timeout")
    stacks.tick(0.0, 0, 1, 2)
    stacks.answer(look(SLEEPS, rank=0))
    stacks.tick(8.0, 0, 1, 2)
    assert stacks.posted == []
    stacks.answer(look(SLEEPS, rank=1))
    stacks.tick(9.0, 0, 1, 2)  # rank 2 has no process that could answer
    (taken,) = stacks.posted
    assert (taken.ranks, [one.rank for one in taken.dumps], taken.starting) == ([0, 1, 2], [0, 1], [2])
    stacks.ask("asked")
    stacks.tick(10.0, 0, 1, 2)
    assert stacks.requests.deadline == 10.0 + ANSWER_SECONDS
    stacks.tick(10.0 + ANSWER_SECONDS, 1, 2)  # rank 0 has left meanwhile
    asked = stacks.posted[1]
    assert (asked.ranks, asked.dumps, asked.starting) == ([1, 2], [], [2])


def test_a_person_is_told_once_that_nothing_moves() -> None:
    stacks = Stacks(advises=True)
    for now in (30.0, 60.0, 60.1, 120.0, 180.0):
        stacks.tick(now, 0, 1, phase="running")
        for rank in (0, 1):
            stacks.answer(look(GLOO, rank=rank))
        stacks.tick(now, 0, 1, phase="running")
    (taken,) = stacks.posted
    assert (taken.why, taken.ranks, stacks.requests.deadline) == ("idle", [0, 1], None)
    assert [one.everything for one in stacks.sent] == [False, False, True]
    assert not any(one.insists for one in stacks.sent)  # nobody is interrupted for it


class Store(Stacks):
    """A job whose store launchpad serves at port 29500. Rank 0 has returned."""

    def __init__(self, *, serves: bool = True) -> None:
        ranks = (RankPlan(0, 0, (), {"MASTER_PORT": "29500"}), RankPlan(1, 1, (), {}))
        node = NodePlan(0, "h0", "/", {}, ranks, {}, store="serve" if serves else "")
        super().__init__(plan=Plan("", (node,)))
        self.requests.on(0, RankExited(0, 0, 0, 0, False))

    def sampled(self, now: float, **collectives: Any) -> None:
        self.tick(now, 1, phase="running")
        self.answer(look(SLEEPS, rank=1, collectives=collectives))
        self.tick(now, 1, phase="running")


def test_a_wait_in_the_store_for_what_nobody_can_set_ends_the_job() -> None:
    store = Store()
    for _ in range(2):
        assert store.posted == []
        store.sampled(store.requests.deadline or 0.0, reads_port=29500)
    store.sampled(store.job.now, reads_port=29500, alone=True)
    taken, stalled = store.posted
    assert (taken.why, taken.ranks) == ("vain", [1])
    assert (stalled.vain, stalled.seconds) == (True, 2 * SECONDS)


@pytest.mark.parametrize(
    "facts",
    [{"reads_port": 29500}, {"reads_port": 29501, "alone": True}, {"alone": True}],
    ids=["not alone", "port", "none"],
)
def test_a_wait_that_may_end_well_goes_on(facts: dict[str, Any]) -> None:
    store = Store()
    times = []
    while store.requests.deadline is not None and len(times) < 10:
        times.append(store.requests.deadline)
        store.sampled(times[-1], **facts)
        if store.sent[-1].everything:
            store.sampled(times[-1], **facts)
    assert store.posted == []
    if "alone" in facts:  # they do something else: they are looked at less and less often
        assert times[-1] - times[-2] == MOST_SECONDS
    else:
        assert len(times) == 2  # until another rank ends


def test_what_a_rank_has_left_behind_may_set_the_key() -> None:
    store = Store()
    store.requests.on(0, LeftBehind(0, 0))
    store.requests.on(0, RankExited(0, 0, 0, 0, False))
    assert store.requests.deadline is None


def test_a_store_that_is_not_ours_is_not_watched() -> None:
    assert Store(serves=False).requests.deadline is None


def test_after_a_restart_nobody_waits_for_ranks_that_have_no_process_yet() -> None:
    stacks = Stacks()
    stacks.requests.start()
    stacks.requests.on(0, RankStarted(0, 0, 200))
    stacks.ask("asked")
    stacks.tick(0.0, 0, 1)
    stacks.answer(look(SLEEPS, rank=0))
    stacks.tick(0.0, 0, 1)
    (taken,) = stacks.posted
    assert ([one.rank for one in taken.dumps], taken.starting) == ([0], [1])


@pytest.mark.parametrize("left", [[], [0], [0, 1]])
def test_a_job_whose_ranks_end_while_their_stacks_are_taken_does_not_hang(left: list[int]) -> None:
    stacks = Stacks(1.0)
    for now in (1.0, 2.0):
        stacks.tick(now, 0, 1, phase="running")
        for rank in (0, 1):
            stacks.answer(look(GLOO, rank=rank))
        stacks.tick(now, 0, 1, phase="running")
    assert stacks.sent[-1].number == 3  # for the message
    for rank in (0, 1):
        if rank in left:
            stacks.answer(look(GLOO, rank=rank))
        else:
            stacks.requests.on(0, RankExited(0, rank, 0, 0, False))
    stacks.tick(2.1, *left, phase="running")
    assert bool(stacks.posted) == (left == [0, 1])


def test_what_was_seen_while_someone_waited_for_a_person_is_no_stall() -> None:
    stacks = Stacks(1.0)
    clock = stacks.job.hub.clock
    clock.note_wait("prompt", begins=True)
    for now in (1.0, 2.0):
        stacks.tick(now, 0, 1, phase="running")
    assert stacks.sent == []
    clock.note_wait("prompt", begins=False)
    stacks.tick(3.0, 0, 1, phase="running")
    assert (stacks.sent, stacks.requests.deadline) == ([], 3.5)


def test_the_stacks_that_were_taken_shortly_before_the_timeout_are_used() -> None:
    stacks = Stacks()

    def answer(rank: int, why: str = "") -> None:
        stacks.answer(look([] if why else SLEEPS, rank=rank, why=why))

    def when_time_is_up() -> list[int]:
        stacks.ask("timeout")
        asked = len(stacks.sent)
        stacks.tick(5.0, 0, 1)
        return [one.number for one in stacks.sent[asked:]]

    stacks.ask("soon")
    stacks.tick(0.0, 0, 1)
    assert not stacks.sent[-1].insists
    answer(0)
    answer(1)
    stacks.tick(0.1, 0, 1)
    assert (stacks.posted, when_time_is_up()) == ([], [])  # nothing is said, nor asked again
    stacks.tick(5.0, 0, 1)
    assert [one.rank for one in stacks.posted.pop().dumps] == [0, 1]
    stacks.ask("soon")
    stacks.tick(1.0, 0, 1)
    answer(1)
    answer(0, "it did not answer")
    stacks.tick(1.0, 0, 1)
    assert when_time_is_up()  # one is missing
    answer(1, "it did not answer")  # it did before
    answer(0)
    stacks.tick(5.0, 0, 1)
    assert [(one.rank, bool(one.threads)) for one in stacks.posted.pop().dumps] == [(0, True), (1, True)]
    stacks.ask("soon")
    stacks.tick(1.0, 0, 1)
    answer(0)
    answer(1)
    stacks.tick(1.0, 0, 1)
    stacks.requests.on(0, Output(0, 0, 1, b"step 7\n"))  # by now they may be elsewhere
    assert when_time_is_up()
    stacks.tick(5.0 + ANSWER_SECONDS, 0, 1)
    stacks.ask("soon")
    stacks.tick(1.0, 0, 1)
    assert when_time_is_up()  # although that request is still under way


def test_when_it_looks_and_when_it_tells() -> None:
    watch, still = StallWatch(10.0, 100.0), {0: look(SLEEPS)}
    assert watch.deadline == 105
    watch.asked(105)
    assert not watch.sampled(105, still, [0])
    watch.moved(106)  # a line came
    assert watch.deadline == 111
    for now, told in ((111.0, False), (116.0, True)):
        assert watch.deadline == now
        watch.asked(now)
        assert watch.sampled(now, still, [0]) is told
    assert watch.quiet(116) == 10


def test_who_seems_to_spin_in_mpi_is_looked_at_more_often() -> None:
    watch = StallWatch(8.0, 0.0)

    def spins(now: float) -> dict[int, StackDump]:
        return {0: look([], collectives={"spins": ["libmpi.so.12", "7:a"]}, cpu=now, busy=True)}

    told = {}
    while not any(told.values()):
        now = watch.deadline
        watch.asked(now)
        told[now] = watch.sampled(now, spins(now), [0])
    assert list(told) == [4.0, 8.0, 10.0, 12.0, 14.0]
    watch = StallWatch(8.0, 0.0)
    for now in (4.0, 8.0, 10.0, 12.0):
        assert not watch.sampled(now, spins(now), [0])
    assert not watch.sampled(14.0, {0: look([], cpu=14.0, busy=True)}, [0])  # it computes
    for now in (16.0, 18.0, 20.0, 22.0):
        assert not watch.sampled(now, spins(now), [0])
    assert watch.sampled(24.0, spins(24.0), [0])


@pytest.mark.parametrize("beats", [-1, 4])
def test_a_rank_that_gets_no_cpu_is_not_judged_yet(beats: int) -> None:
    watch = StallWatch(8.0, 0.0)
    waits = {"mpi": True, **({"unanswered": 3} if beats < 0 else {})}

    def at(cpu: float, **facts: Any) -> dict[int, StackDump]:
        starved = look(MPI_LINE, "x = comm.recv()", 1, cpu=cpu, busy=True, beats=beats, collectives=waits, **facts)
        return {0: look(GLOO), 1: starved}

    assert not watch.sampled(4.0, at(1.0), [0, 1])
    for now in (8.0, 12.0, 16.0):
        assert not watch.sampled(now, at(1.0 + now / 1600), [0, 1])
    assert watch.sampled(20.0, at(1.04), [0, 1])  # it runs, little as it is, and gets nowhere
    watch.moved(21.0)
    assert not watch.sampled(25.0, at(1.04), [0, 1])
    assert not watch.sampled(29.0, at(1.04), [0, 1])
    assert watch.sampled(33.0, at(1.04), [0])  # it has left


MAPS = """\
1000-2000 r-xp 00000000 08:01 1 /home/ann/solve
2000-3000 rw-p 00001000 08:01 1 /home/ann/solve
3000-4000 rw-p 00000000 00:00 0
5000-6000 r-xp 00000000 08:01 2 /opt/mpi/libmpi.so.12
6000-7000 rw-p 00001000 08:01 2 /opt/mpi/libmpi.so.12
8000-9000 r-xp 00000000 08:01 3 /lib/libc.so.6
9000-a000 rw-p 00001000 08:01 3 /lib/libc.so.6
a000-b000 r-xp 00000000 08:01 4 /lib/libucp.so.0
b000-c000 r-xp 00000000 08:01 4 /lib/libopenblas.so.0
f000-10000 rw-p 00000000 00:00 0 [stack]
"""
SOLVE, MPI, LIBC, UCX, BLAS, NONE = 0x1100, 0x5100, 0x8100, 0xA100, 0xB100, 0x7


@pytest.mark.parametrize(
    ("counter", "stack", "library"),
    [
        pytest.param(MPI, [NONE, MPI, SOLVE, 1], "libmpi.so.12", id="mpi"),
        pytest.param(LIBC, [UCX, MPI, SOLVE, 1], "libmpi.so.12", id="sched_yield"),
        pytest.param(SOLVE, [MPI, SOLVE, 1], None, id="own"),
        pytest.param(BLAS, [SOLVE, MPI, 1], None, id="blas"),
        pytest.param(LIBC, [SOLVE, MPI, SOLVE], None, id="memcpy"),
        pytest.param(UCX, [LIBC, NONE], "", id="a helper thread"),
    ],
)
def test_where_a_thread_is(counter: int, stack: list[int], library: str | None) -> None:
    mappings = Mappings(MAPS.splitlines(), "solve")
    assert mappings.variables == [(0x2000, 0x1000), (0x3000, 0x1000), (0x6000, 0x1000)]

    def place(stack: list[int]) -> MpiPlace | None:
        return mappings.place([counter], 0xF000, struct.pack(f"{len(stack)}Q", *stack), 0)

    found = place(stack)
    assert (found and found.library) == library
    if found and found.call:
        assert place([MPI + 1, *stack[1:]]) == found  # another step of the wait
        assert place([*stack[:-1], 2]) != found  # another turn of the program's loop


# Which nodes can't reach each other.

NAMES = [f"h{number}" for number in range(5)]


def mutual(*pairs: tuple[int, int]) -> list[list[int]]:
    return [list(pair) for one, other in pairs for pair in ((one, other), (other, one))]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], []),
        (mutual((1, 4)), ["h1 and h4 can't reach each other"]),
        ([[1, 4]], ["h1 can't reach h4, which reaches h1"]),
        (mutual((2, 0), (2, 1), (2, 3), (2, 4)), ["h2 and the other nodes can't reach each other"]),
        (mutual((0, 1), (0, 2), (0, 3)), ["h0 and h1, h2 and h3 can't reach each other"]),
        (mutual((0, 1), (2, 3)), ["h0 and h1 can't reach each other", "h2 and h3 can't reach each other"]),
        (
            [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]],
            [f"h{one} can't reach h{one + 1}, which reaches h{one}" for one in range(3)] + ["… (2 more like this)"],
        ),
    ],
)
def test_nodes_that_can_not_reach_each_other_in_words(pairs: list[list[int]], said: list[str]) -> None:
    assert sentences(pairs, NAMES) == said


class Nodes:
    """Hears what the nodes of a check are asked, and has them answer."""

    def __init__(self, *addresses: str) -> None:
        self.asked: dict[int, list[Any]] = {}
        self.check = PairCheck(dict(enumerate(addresses)), self._ask, 0.0)

    def _ask(self, node: int, command: Any) -> None:
        self.asked.setdefault(node, []).append(command)

    def listen(self, *nodes: int) -> None:
        for node in nodes:
            self.check.on(node, Listening(0, [5000 + node]), 0.1)

    def reach(self, node: int, *addresses: str) -> None:
        for address in addresses:
            self.check.on(node, Reached(0, address, "eth0"), 0.2)


def test_each_pair_is_tried_once_all_listen() -> None:
    nodes = Nodes("10.0.0.1", "10.0.0.2", "10.0.0.3")
    nodes.listen(0, 1)
    assert [[type(one) for one in asked] for asked in nodes.asked.values()] == [[Listen]] * 3
    nodes.listen(2)
    assert [type(asked[-1]) for asked in nodes.asked.values()] == [Reach] * 3
    assert sorted(nodes.asked[0][-1].places) == [["10.0.0.2", 5001], ["10.0.0.3", 5002]]
    for node in range(3):
        nodes.reach(node, *(f"10.0.0.{other + 1}" for other in range(3) if (node, other) != (0, 2)))
    assert (nodes.check.over, nodes.check.apart) == (False, [(0, 2)])
    nodes.reach(0, "10.0.0.3")
    assert (nodes.check.over, nodes.check.apart) == (True, [])


def test_a_node_that_does_not_listen_is_not_blamed() -> None:
    nodes = Nodes("10.0.0.1", "10.0.0.2", "10.0.0.3")
    nodes.listen(0, 2)
    nodes.check.tick(LISTEN_SECONDS)
    assert nodes.check.deadline == LISTEN_SECONDS + REACH_SECONDS
    nodes.reach(0, "10.0.0.3")
    assert nodes.check.apart == [(2, 0)]
    nodes.listen(1)
    nodes.reach(2, "10.0.0.1")
    assert nodes.check.over


@pytest.mark.parametrize(
    "addresses", [(), ("10.0.0.1",), ("10.0.0.1", ""), ("10.0.0.1", "10.0.0.1"), ("::1", "127.0.0.1")]
)
def test_nodes_that_can_not_be_told_apart_are_not_tried(addresses: tuple[str, ...]) -> None:
    nodes = Nodes(*addresses)
    nodes.listen(*nodes.asked)
    assert (nodes.check.over, nodes.check.apart) == (True, [])
