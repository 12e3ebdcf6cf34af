"""protocol/printable: what others say moves no cursor, begins no line, and commands no CI system."""

from __future__ import annotations

import pytest

from launchpad.protocol.printable import printable, printable_line, printable_lines


def test_text_of_others_moves_no_cursor() -> None:
    assert printable("é ∑\x1b[2J\n\t\r\x07\udcff") == "é ∑\\x1b[2J\\n\\t\\r\\x07\\udcff"
    assert printable("\x1b]52;c;aGk=\x07\x9b2J\x85\u2028\u202e") == "\\x1b]52;c;aGk=\\x07\\x9b2J\\x85\\u2028\\u202e"


def test_other_scripts_are_not_escaped() -> None:
    text = "10\u202f000\xa0€, 全角\u3000空白, \u0645\u06cc\u200c\u062e\u0648, 👩\u200d💻"
    assert printable(text) == text


@pytest.mark.parametrize("command", ["##[error]forged", "##teamcity[buildStatus status='SUCCESS']"])
def test_text_of_others_commands_no_ci_system(command: str) -> None:
    said = printable(f"RuntimeError: {command}")
    assert command not in said
    assert printable(said) == said


@pytest.mark.parametrize("line", ["::error::forged", "  ::stop-commands::x", "\t\xa0::warning file=a::b"])
def test_no_line_begins_like_a_command_of_github(line: str) -> None:
    said = printable_line(line)
    assert not said.lstrip().startswith("::")
    assert printable_line(said) == said
    assert printable_line("std::vector") == "std::vector"


def test_lines_of_a_text_stay_lines() -> None:
    assert printable_lines("a\n\tb\r\n\x1b[2J") == ["a", "        b\\r", "\\x1b[2J"]
