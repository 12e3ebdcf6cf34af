"""job/health: how --health is read."""

from __future__ import annotations

import pytest

from launchpad.errors import UsageError
from launchpad.job.health import HealthCheck, parse_health


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("doctor", ()),
        (" doctor ", ()),
        ("dcgmi diag -r 1", ("dcgmi", "diag", "-r", "1")),
        ("sh -c 'a | b; exit 3'", ("sh", "-c", "a | b; exit 3")),
        ("./doctor", ("./doctor",)),
    ],
)
def test_words_are_split_as_a_shell_would(text: str, words: tuple[str, ...]) -> None:
    assert parse_health(text, 5.0) == HealthCheck(words, 5.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--health: give a command like 'dcgmi diag -r 1', or doctor"),
        ("a 'b", "--health a 'b: no closing quotation; quote it as in a shell"),
        ("a | b", "--health 'a | b': '|' is for a shell, and none runs it; write sh -c '…'"),
        ("a; b", "--health 'a; b': 'a;' is for a shell, and none runs it; write sh -c '…'"),
    ],
)
def test_what_is_no_command_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_health(text, 5.0)
    assert str(refused.value) == said


def test_it_is_shown_as_it_would_be_typed() -> None:
    assert parse_health("sh -c 'exit 3'", 1.0).text == "sh -c 'exit 3'"
    assert parse_health("doctor", 1.0).text == "doctor"
