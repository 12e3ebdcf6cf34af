"""What each rank of a node reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad.agent.outbox import Outbox
from launchpad.agent.part import AgentHub
from launchpad.agent.poll import Poll
from launchpad.agent.ranks import rank
from launchpad.agent.ranks.input import Input
from launchpad.protocol.commands import Start
from launchpad.protocol.events import StdinTaken, StdinUnused

START = Start(0, "/", {}, {}, {}, [], [], "", [], 1, "", 1, False, True, [24, 80], False, True)


class Said(Outbox):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def say(self, event: object) -> None:
        self.events.append(event)


@pytest.fixture
def outlets() -> Iterator[rank.Outlets]:
    made = rank.open_outlets([])
    yield made
    for fd in made[:4]:
        os.close(fd)


def made(tmp_path: Path, own: int | None, *, sends_input: bool) -> tuple[Input, list[object]]:
    said = Said()
    found = Input(AgentHub(Poll(), said, str(tmp_path)), own)
    found.starting(START._replace(sends_input=sends_input))
    return found, said.events


def test_one_rank_inherits_the_input_and_has_the_terminal(tmp_path: Path, outlets: rank.Outlets) -> None:
    stdin, _ = made(tmp_path, 77, sends_input=False)
    assert stdin.descriptor(1, outlets) == 77
    assert os.readlink(f"/proc/self/fd/{stdin.descriptor(0, outlets)}") == os.devnull
    assert (stdin.terminal(0), stdin.terminal(1)) == ([], [24, 80])
    assert (stdin.is_typed(0), stdin.is_typed(1)) == (False, True)


def test_without_any_input_all_read_nothing(tmp_path: Path, outlets: rank.Outlets) -> None:
    stdin, _ = made(tmp_path, None, sends_input=False)
    assert stdin.descriptor(0, outlets) == stdin.descriptor(1, outlets)
    assert os.read(stdin.descriptor(1, outlets), 1) == b""
    assert stdin.terminal(1) == []
    assert not stdin.is_typed(1)


def test_what_the_head_sends_is_for_one_rank_and_then_for_its_successor(tmp_path: Path, outlets: rank.Outlets) -> None:
    stdin, said = made(tmp_path, None, sends_input=True)
    stdin.open(0, outlets)
    stdin.take(b"to nobody\n")
    stdin.open(1, outlets)
    reader = stdin.descriptor(1, outlets)
    stdin.take(b"one\n")
    assert os.read(reader, 100) == b"one\n"
    stdin.open(1, outlets)  # in the next attempt
    assert stdin.descriptor(1, outlets) == reader
    stdin.take(b"")
    assert os.read(reader, 1) == b""
    assert [one.size for one in said if isinstance(one, StdinTaken)] == [4]


def test_what_no_rank_has_read_is_told_at_the_end(tmp_path: Path, outlets: rank.Outlets) -> None:
    stdin, said = made(tmp_path, None, sends_input=True)
    stdin.report_unused()
    stdin.open(1, outlets)
    stdin.take(b"one\ntwo\n")
    os.read(stdin.descriptor(1, outlets), 4)
    stdin.report_unused()
    assert [one.size for one in said if isinstance(one, StdinUnused)] == [4]
