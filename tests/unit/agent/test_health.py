"""agent/host/health: what becomes of a check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launchpad.agent.host.child import ChildEnded
from launchpad.agent.host.health import by_command, by_doctor


@pytest.mark.parametrize(
    ("ended", "problem", "missing", "lines"),
    [
        (ChildEnded(0, b"fine\n"), "", False, []),
        (ChildEnded(127, b"sh: x: not found\n"), "", True, []),
        (ChildEnded(3, b"a\n\nb\x1b[1m\n"), "ended with exit code 3", False, ["a", "b\\x1b[1m"]),
        (ChildEnded(1, b"1\n2\n3\n4\n5\n6\n"), "ended with exit code 1", False, ["2", "3", "4", "5", "6"]),
        (ChildEnded(-9, b""), "was killed by SIGKILL", False, []),
        (ChildEnded(None, b"half a li"), "did not end within 2 s, and was killed", False, ["half a li"]),
        (ChildEnded(1, b"\xff" + b"x" * 500), "ended with exit code 1", False, ["\ufffd" + "x" * 199]),
    ],
)
def test_a_command_is_judged_by_its_exit_code(ended: ChildEnded, problem: str, missing: bool, lines: list[str]) -> None:
    assert by_command(ended, 2.0)[1:] == (problem, missing, lines, [])


def test_doctor_tells_what_it_has_seen() -> None:
    seen: list[Any] = [["limits", [1, 2], ""], ["gpus", [], "OSError: no"]]
    assert by_doctor(ChildEnded(0, json.dumps(seen).encode()), 2.0)[1:] == ("", False, [], [tuple(one) for one in seen])
    for code, problem in ((1, "ended with exit code 1"), (None, "did not end within 2 s, and was killed")):
        assert by_doctor(ChildEnded(code, b""), 2.0)[1:] == (problem, False, [], [])
    assert by_doctor(ChildEnded(0, b""), 2.0)[1:] == ("saw nothing", False, [], [])
