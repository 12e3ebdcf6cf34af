"""Whatever a node says of what messages declare, and whatever a rank leaves for us, ends no more than the sender."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launchpad import console, diagnosis, head, record, report
from launchpad.agent.poll import Poll
from launchpad.agent.ranks import rundir
from launchpad.agent.stacks.debug_channel import DebugChannel, StackAnswer
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.job.limits import Limits
from launchpad.job.plan import Master, NodePlacement, Stdin
from launchpad.job.spec import JobSpec, Target
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, DumpStacks, Finish, Listen, Signal, Start
from launchpad.protocol.events import (
    EVENTS,
    SILENT,
    Crashed,
    Drained,
    ExceptionRaised,
    Listening,
    NodeLost,
    RankExited,
    RankStarted,
    StackDump,
    StacksRequested,
)
from launchpad.protocol.stacks import together
from launchpad.protocol.typed import typed
from launchpad.runner.conductor import Conductor
from launchpad.runner.options import ReportOptions
from launchpad.runner.outlets import outlets_of
from launchpad.runner.outlets.outlet import Ended, Outlet
from launchpad.transport.memory import MemoryLink
from tests.support.agents import DEADLINE, READY
from tests.support.command import Launchpad
from tests.support.declared import ANYTHING, TEXT, declared

SAID = [event for event in EVENTS if event.about]


class Node:
    """The agent of one rank, which does what it is told; `says`: what it says besides, when its rank has started."""

    def __init__(self, rank: int, says: list[Any], over: threading.Event) -> None:
        self.link = MemoryLink(f"n{rank}", remote=True)
        self._rank = rank
        self._says = says
        self._over = over  # the other node has said what it says
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    def _play(self) -> None:
        self.link.say(READY)
        while not isinstance(command := self.link.heard.get(timeout=DEADLINE), Finish | None):
            self._do(command)
        self.link.say(Drained(0))
        self.link.hang_up()

    def end(self) -> None:
        """The head has hung up, if it has not told us to finish."""
        self.link.heard.put(None)
        self.thread.join(DEADLINE)

    def _do(self, command: Command) -> None:
        rank, say = self._rank, self.link.say
        match command:
            case Start():
                say(RankStarted(1, rank, 70 + rank))
                for event in self._says:
                    say(event)
                if rank == 0:
                    assert self._over.wait(DEADLINE)
                say(RankExited(2, rank, 0, 0, False))
            case DumpStacks(number=number):
                silent = StackDump(3, rank, number, 70 + rank, SILENT, [], "S", "", 0.0, False, 0, 0, {}, "")
                say(together([silent]))
            case Listen():
                say(Listening(4, [-1]))
            case Signal():
                self._over.set()


class Watch:
    """A sink: which nodes are lost, and when the second one has said what it says."""

    deadline: float | None = None

    def __init__(self, over: threading.Event) -> None:
        self.lost: dict[int, str] = {}
        self._over = over

    def on(self, event: Any) -> bool:
        if isinstance(event, NodeLost):
            self.lost[event.node] = event.reason
        if isinstance(event, NodeLost) or (isinstance(event, RankExited) and event.rank == 1):
            self._over.set()
        return False

    def tick(self, now: float) -> None:
        """Nothing is due."""

    def close(self) -> None:
        """Nothing is held open."""


class Notes:
    """Where outlets and notes show their lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, *, bad: bool = False) -> None:  # noqa: ARG002
        self.lines.append(text)


def run(folder: Path, says: list[Any], backend: Any = "gloo", *more: Outlet) -> tuple[int, dict[int, str], list[str]]:
    """A job of two nodes with all of its reports, of which the second says this. Its exit code, who was lost, notes."""
    over, bringup, notes = threading.Event(), BringUp(), Notes()
    nodes = [Node(0, [], over), Node(1, says, over)]
    facts = bringup.connect([node.link for node in nodes], count_gpus=False)
    limits = Limits(stall_timeout=1000.0)
    spec = JobSpec(Target("program", "/bin/true"), limits=limits, backend=backend, sample=1000.0)
    places = [NodePlacement(f"n{node}", 1, "python3", "/") for node in range(2)]
    planner = Planner(spec, "abc", facts, places, master=Master("127.0.0.1", 29501))
    reports = ReportOptions(
        junit=str(folder / "junit.xml"), report=str(folder / "report.html"), events=str(folder / "events.jsonl")
    )
    outlets = [*outlets_of(reports, notes, bringup.post, {}), *more]
    conductor = Conductor(bringup, planner, notes.say, verbose=True, outlets=outlets)
    watch = Watch(over)
    conductor.begin([watch])
    bringup.post(StacksRequested(0, 0, native=False, full=True))
    try:
        conductor.run(stdin=Stdin())
        ended = conductor.conclude()
        conductor.over()
        conductor.close(ended)
    finally:
        for node in nodes:
            node.end()
    return ended.code, watch.lost, [*notes.lines, *ended.lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For records and reports.

    What jobs load late is loaded before: Python 3.11 can't always compile while Hypothesis has changed its recursion
    limit.
    """
    for room in (console, diagnosis, head, record, report):
        for module in pkgutil.iter_modules(room.__path__):
            importlib.import_module(f"{room.__name__}.{module.name}")
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), backend=st.sampled_from(["gloo", "mpi"]))
def test_whatever_is_declared_a_node_ends_only_itself(
    folder: Path, kind: Any, data: st.DataObject, backend: Any
) -> None:
    says = data.draw(st.lists(declared(kind, 1), min_size=1, max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        code, lost, lines = run(folder, says, backend)
    assert 0 <= code <= 255
    assert lost.keys() <= {1}, lost
    assert not [line for line in lines if "can't be written" in line], lines


@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_field_of_another_value_is_a_malformed_frame(kind: Any, data: st.DataObject) -> None:
    """Or one that there is: both are drawn from all of JSON."""
    message = data.draw(declared(kind))
    place = data.draw(st.integers(0, len(kind._fields) - 1 - (kind.raw is not None)))
    odd = data.draw(ANYTHING)
    if kind.raw is not None:
        return
    changed = [*message[:place], odd, *message[place + 1 :]]
    with contextlib.suppress(wire.WireError):
        (found,) = wire.Decoder().feed(wire.encode(kind._make(changed)))
        assert type(found) is kind


class Breaks(Outlet):
    """A report with a bug in it."""

    name = "--breaks"

    def conclude(self, ended: Ended) -> None:  # noqa: ARG002
        """Fail."""
        raise RecursionError("too deep")

    def finish(self, ended: Ended) -> None:
        """Fail again."""
        raise ValueError(ended.code)


def test_a_report_that_fails_is_a_line_and_changes_no_exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    code, lost, lines = run(folder, [], "gloo", Breaks())
    assert (code, lost) == (0, {})
    failed = [line.rpartition(" (")[0] for line in lines if line.startswith("--breaks failed")]
    assert failed == [
        "--breaks failed because of a bug in launchpad: RecursionError: too deep",
        "--breaks failed because of a bug in launchpad: ValueError: 0",
    ]


# What a rank says.

SAYS = st.sampled_from(["No space left on device: '/\0/x'", f"Address already in use, port {'9' * 5000}"]) | ANYTHING
RECORD = {
    "time": st.sampled_from([0, 1 << 70, True]) | ANYTHING,
    "pid": ANYTHING,
    "thread": TEXT,
    "traceback": st.fixed_dictionaries(
        {}, optional={**dict.fromkeys(["type", "cause", "why"], ANYTHING), "message": SAYS}
    ),
    "milestones": st.dictionaries(TEXT, st.just(1 << 70) | ANYTHING, max_size=2),
    "entered": ANYTHING,
    "collectives": ANYTHING,
}
RAISED = {"type": "OSError", "message": "Address already in use: port 99", "frames": []}
GOOD = {"time": 5, "pid": 71, "thread": "", "traceback": RAISED}
CRASH = st.lists(
    st.sampled_from(["Current thread 0x1 (most recent call first):\n", '  File "', '", line ', " in f\n", "9" * 5000])
    | st.sampled_from(["\\x1b", "\\U00110000", "\\xzz", "\0", "٣", "\n"])
    | TEXT,
    max_size=12,
).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    odd=st.fixed_dictionaries({}, optional=RECORD) | ANYTHING,
    crash=CRASH,
    noise=st.binary(max_size=20),
)
def test_whatever_a_rank_leaves_in_its_files_its_agent_passes_on_what_a_head_takes(
    tmp_path_factory: pytest.TempPathFactory, odd: Any, crash: str, noise: bytes
) -> None:
    place = tmp_path_factory.mktemp("left")
    record = {**GOOD, **odd} if isinstance(odd, dict) else odd
    lines = [json.dumps(record).encode(), noise, json.dumps(GOOD).encode()]
    (place / "1.raised").write_bytes(b"\n".join(lines))
    (place / "1.crash").write_text(crash, errors="surrogateescape" if crash.isascii() else "replace")
    said = [*rundir.take_exceptions(str(place), 1, str(place)), Crashed(6, 1, rundir.take_crash(str(place), 1, "/"))]
    found = list(wire.Decoder().feed(b"".join(map(wire.encode, said))))
    assert [type(one) for one in found] == [type(one) for one in said]
    assert ExceptionRaised in map(type, found)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=declared(StackAnswer) | st.fixed_dictionaries({"number": st.just(1), "threads": ANYTHING}) | ANYTHING)
def test_whatever_a_rank_answers_is_what_is_declared_or_dropped(
    tmp_path_factory: pytest.TempPathFactory, said: Any
) -> None:
    dropped: list[str] = []
    poll = Poll()
    channel = DebugChannel(poll, str(tmp_path_factory.mktemp("channel")), lambda _, why: dropped.append(why))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(channel.path)
        poll.wait(time.monotonic() + DEADLINE)
        channel.ask(os.getpid(), 1, everything=True)
        rank.send(zlib.compress(json.dumps(said).encode()))
        poll.wait(time.monotonic() + DEADLINE)
        answer = channel.answer(os.getpid(), 1)
        channel.close()
    assert dropped or answer is not None or said.get("number") != 1
    if answer:
        assert typed(StackAnswer, json.loads(json.dumps(answer))) == answer


LEAVES = """
import json, os, sys
place = os.environ["TORCHELASTIC_ERROR_FILE"].removesuffix(".error.json") + ".raised"
deep = {"type": "E", "message": "", "frames": []}
for _ in range(980):
    deep = {"type": "E", "message": "", "frames": [], "cause": deep}
good = {"time": 1, "pid": 1, "thread": "", "traceback": {"type": "E", "message": "", "frames": []}}
odds = [{"time": 2**70}, {"time": True}, {"milestones": {"torch": 2**70}}, {"traceback": deep}, {"entered": [5]}]
with open(place, "w") as file:
    for odd in odds:
        file.write(json.dumps(good | odd) + "\\n")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_odd_files_of_a_rank_cost_a_line_each(launchpad: Launchpad, code: int) -> None:
    script = launchpad.folder / "leaves.py"
    script.write_text(LEAVES)
    done = launchpad.run("run", "-n", 1, "--report", "report.html", "--junit", "junit.xml", script, code)
    assert done.returncode == code, done.stderr
    dropped = [line for line in done.stderr.splitlines() if "can't be used" in line]
    assert sorted(dropped) == [
        "launchpad: rank 0: an exception that it recorded can't be used: it is nested too deeply",
        "launchpad: rank 0: its latest collectives can't be used: 5 is not what it should be",
        f"launchpad: rank 0: its milestones can't be used: {2**70} is not what it should be",
    ]
    assert (launchpad.folder / "report.html").exists()


JUNK = """
import json, os, zlib
from launchpad.rank import stack_server
from launchpad.protocol.stacks import together
line = stack_server._connected(os.path.join(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), "answers"))
for junk in ({"number": 1, "threads": [5]}, {"number": 1, "threads": [{"name": 1, "frames": 2}]}, [], 5):
    line.recv(1000)
    line.send(zlib.compress(json.dumps(junk).encode()))
"""


def test_junk_on_the_stack_channel_costs_a_line(launchpad: Launchpad) -> None:
    script = launchpad.folder / "junk.py"
    script.write_text(JUNK)
    done = launchpad.run("run", "-n", 1, "--stall-timeout", "0.5", script)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "launchpad: rank 0: its answer about where it is can't be used: 5 is not what it should be\n"
