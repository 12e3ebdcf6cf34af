"""head/nodes and agent/host/probe: clocks, heartbeats, addresses."""

from __future__ import annotations

import importlib.util
import os
import queue
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.host import probe
from launchpad.head.node_facts import clock_note
from launchpad.head.nodes import LATE_SECONDS, Node, Nodes
from launchpad.protocol.commands import Ping
from launchpad.protocol.commands import Probe as Asked
from launchpad.protocol.events import AgentReady, LinkClosed, Pong, RankStarted
from launchpad.transport.memory import MemoryLink
from tests.support.needs import needs_torch

DEADLINE = 30.0


def nodes_of(*links: MemoryLink, silence: float = 10.0) -> tuple[Nodes, queue.SimpleQueue[Any]]:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return Nodes(links, inbox.put, silence), inbox


def test_times_are_converted_to_the_heads_clock() -> None:
    """The clock of node 1 is an hour ahead; a ping with a longer round trip does not change the estimate."""
    nodes, _ = nodes_of(MemoryLink("a"), MemoryLink("b", remote=True))
    hour = 3600 * 10**9
    asked = time.monotonic_ns()
    nodes[1].learn(Pong(asked + hour, 0))  # a sign of life tells nothing of the clock
    assert nodes.in_our_time(1, RankStarted(7, 0, 1)).time == 7
    nodes[1].learn(Pong(asked + hour, asked))
    corrected = nodes.in_our_time(1, RankStarted(asked + hour, 0, 1)).time
    assert asked <= corrected < asked + 10**9
    nodes[1].learn(Pong(asked, asked - 60 * 10**9))
    assert nodes.in_our_time(1, RankStarted(asked + hour, 0, 1)).time == corrected
    nodes[1].learn(Pong(asked, asked + hour))  # an answer from the future
    assert nodes.in_our_time(1, RankStarted(asked + hour, 0, 1)).time == corrected
    assert nodes.in_our_time(0, RankStarted(7, 0, 1)).time == 7


def test_a_node_that_is_prepared_is_read_later() -> None:
    link = MemoryLink("a")
    nodes, inbox = nodes_of(link)
    link.say(RankStarted(7, 0, 1))
    nodes.prepare(0)
    inbox.put("somebody leads")
    nodes.go_on()
    assert [inbox.get(timeout=DEADLINE) for _ in range(2)] == ["somebody leads", (0, RankStarted(7, 0, 1))]


def test_only_remote_nodes_are_pinged_and_only_with_a_heartbeat_timeout() -> None:
    here, there = MemoryLink("a"), MemoryLink("b", remote=True)
    nodes, _ = nodes_of(here, there)
    nodes.forgive(100.0)
    assert nodes.tick(100.0) == []
    assert type(there.heard.get(timeout=DEADLINE)) is Ping
    assert here.heard.empty()
    assert nodes_of(here)[0].deadline is None
    assert nodes_of(there, silence=0)[0].deadline is None


def test_what_takes_long_keeps_the_nodes_alive_meanwhile() -> None:
    there = MemoryLink("b", remote=True)
    nodes, _ = nodes_of(there, silence=1e6)
    for _ in range(3):
        nodes.keep_alive()
    assert type(there.heard.get(timeout=DEADLINE)) is Ping
    assert there.heard.empty()  # the next one is not due


def test_a_silent_node_is_lost_and_one_that_answers_is_not() -> None:
    nodes, inbox = nodes_of(*(links := [MemoryLink("a", remote=True), MemoryLink("b", remote=True)]), silence=2.0)
    nodes.read()
    start = time.monotonic()
    nodes.forgive(start)
    now = start
    while not (lost := nodes.tick(now)):
        assert time.monotonic() < start + DEADLINE
        links[1].say(Pong(0, 0))
        inbox.get(timeout=DEADLINE)
        time.sleep(max(0.0, (nodes.deadline or 0.0) - time.monotonic()))  # until the next ping is due
        now = time.monotonic()
    assert [node for node, _ in lost] == [0]
    for link in links:
        link.hang_up()


def test_a_head_that_was_paused_declares_nobody_lost() -> None:
    nodes, _ = nodes_of(MemoryLink("a", remote=True), silence=10)
    nodes.forgive(100.0)
    assert nodes.tick(100.0) == []
    assert nodes.tick(102.5 + LATE_SECONDS + 60) == []


def test_if_the_nodes_may_have_been_paused_with_the_head_they_are_asked_once_more() -> None:
    nodes, _ = nodes_of(MemoryLink("a", remote=True), MemoryLink("b", remote=True), silence=1.0)
    start = time.monotonic() + 1
    assert nodes.tick(start) == []
    assert nodes.tick(start + 1.1) == []
    nodes[1].heard = start + 1.2
    assert [node for node, _ in nodes.tick(start + 1.5)] == [0]


def test_the_end_of_a_replaced_link_is_ignored() -> None:
    first, second = MemoryLink("a", remote=True), MemoryLink("a", remote=True)
    nodes, inbox = nodes_of(first)
    nodes.read()
    nodes.forget(0)
    again = Node(second, lambda _: None)
    nodes.adopt(0, again)
    again.read()
    assert nodes.open == {0}
    first.hang_up()
    second.say(RankStarted(1, 0, 1))
    assert inbox.get(timeout=DEADLINE) == (0, RankStarted(1, 0, 1))
    second.hang_up()
    assert type(inbox.get(timeout=DEADLINE)[1]) is LinkClosed
    assert inbox.empty()


def test_the_addresses_of_this_machine() -> None:
    found = probe.addresses()
    assert ("127.0.0.1", "lo") in found
    loopback = [address.startswith("127.") or address == "::1" for address, _ in found]
    assert loopback == sorted(loopback), "loopback comes last"
    assert len({address for address, _ in found}) == len(found)


def test_the_address_that_ssh_came_in_by_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ipv4", lambda: [["10.0.0.1", "docker0"], ["10.0.0.2", "eth0"], ["10.0.0.3", "ib0"]])
    monkeypatch.setattr(probe, "_ipv6", list)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 50000 10.0.0.3 22")
    assert [address for address, _ in probe.addresses()] == ["10.0.0.3", "10.0.0.2", "10.0.0.1"]


@pytest.mark.parametrize(
    ("path", "problems"),
    [
        ("", []),
        ("nowhere", ["no such folder: there is no folder {}/nowhere"]),
        ("file", ["no such folder: {}/file is not a folder"]),
    ],
)
def test_the_folder_is_checked(tmp_path: Any, path: str, problems: list[str]) -> None:
    (tmp_path / "file").touch()
    found = probe.probe(Asked(os.path.join(tmp_path, path).rstrip("/"), False, "", {}, []))
    assert found.problems == [text.format(tmp_path) for text in problems]
    assert found.torch == ""


@pytest.mark.parametrize(
    ("needs", "problem"),
    [
        ([], ""),
        (["file", "job.py"], ""),
        (["file", "none.py"], "no such file: {}/none.py"),
        (["program", "./job.py"], "no such program: {}/./job.py is not there, or not executable"),
        (["program", "sh"], ""),
        (["program", "no-such"], "no such program: no-such is not on PATH"),
        (["module", "json.tool"], ""),
        (["module", "nowhere.job"], f"no such module: nowhere.job for {sys.executable}"),
        (["module", "package.inner.job"], ""),
        (["module", "package.inner.none"], f"no such module: package.inner.none for {sys.executable}"),
        (["module", "package.plain.none"], ""),
        (["module", "package.none.job"], f"no such module: package.none.job for {sys.executable}"),
        (["module", "decides.none"], ""),
        (["module", "os.path"], ""),
    ],
)
def test_what_the_ranks_run_is_looked_for(tmp_path: Path, needs: list[str], problem: str) -> None:
    """Modules without importing their packages, unless one may decide itself where they are."""
    (tmp_path / "job.py").touch(0o600)
    for name in ("inner", "plain"):
        (tmp_path / "package" / name).mkdir(parents=True)
    for name in ("package", "package/inner"):
        (tmp_path / name / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "package" / "inner" / "job.py").touch()
    (tmp_path / "decides").mkdir()
    (tmp_path / "decides" / "__init__.py").write_text("__path__ = ['/elsewhere']\n")
    found = probe.probe(Asked(str(tmp_path), False, "", {}, needs))
    assert found.problems == ([problem.format(tmp_path)] if problem else [])


@needs_torch
def test_torch_is_looked_up_without_being_imported() -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    installed = runpy.run_path(str(Path(found.origin).with_name("version.py")))["__version__"]  # with +cpu or +cu132
    assert probe.probe(Asked("/", True, "", {}, [])).torch == installed


def test_the_ranks_interpreter_is_probed_with_its_paths(tmp_path: Path) -> None:
    """Not the launcher's, which may be installed separately; and with the PYTHONPATH of the ranks."""
    (tmp_path / "lib" / "torch").mkdir(parents=True)
    (tmp_path / "lib" / "torch" / "__init__.py").touch()
    (tmp_path / "lib" / "torch" / "version.py").write_text("__version__ = '7.8.9'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    found = probe.probe(Asked("/", True, str(python), {"PYTHONPATH": str(tmp_path / "lib")}, []))
    assert (found.python, found.torch) == (str(python), "7.8.9")
    assert probe.probe(Asked("/", True, str(python), {}, [])).torch == ""
    python.write_bytes(
        b"#!/bin/sh\necho loading caf\xe9 | tee /dev/stderr\nexec " + os.fsencode(sys.executable) + b' "$@"\n'
    )
    assert probe.probe(Asked("/", True, str(python), {}, [])).version == ".".join(map(str, sys.version_info[:3]))
    python.write_text("#!/bin/sh\necho 3.99.1\n")
    assert probe.probe(Asked("/", False, str(python), {}, [])).version == "3.99.1"


@pytest.mark.parametrize(
    ("skew", "said"), [(0, ""), (59, ""), (3600, "3600 s ahead of"), (-3600, "3600 s behind"), (-90.4, "90 s behind")]
)
def test_a_clock_that_differs_much_is_told_of(skew: float, said: str) -> None:
    """It answered 5 s ago."""
    ready = AgentReady(10**9, 1000.0 + skew, 1, "h", 2, 0, None, 1 << 20, 1 << 20, 29501)
    note = clock_note("b", ready, wall=1005.0, now=6 * 10**9)
    assert note.startswith(f"the clock of b is {said} this machine's: ") if said else note == ""
