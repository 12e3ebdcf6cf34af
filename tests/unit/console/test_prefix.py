"""The prefixes of --log-line-prefix-template, as torchrun 2.15 fills them in."""

from __future__ import annotations

import pytest

import launchpad as lp
from launchpad.console import prefix
from launchpad.console.prefix import PrefixTemplate, prefixes, template_of, torch_mark
from tests.support.line_prefix import BY_HOST, HERE

# What the template means.


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (BY_HOST, "b:3: "),
        ("[${role_name}${local_rank}]:", "[eval1]:"),
        ("$rank$rank ${rank}", "33 3"),  # without braces, and nothing is added
        ("$$rank ${RANK} ${nope} ${} $ $(date) 100% ", "$rank ${RANK} ${nope} ${} $ $(date) 100% "),
        ("\x1b[1m${rank}\x1b[0m\t", "\x1b[1m3\x1b[0m\t"),
        ("> ", "> "),
    ],
)
def test_what_is_filled_in(text: str, filled: str) -> None:
    assert PrefixTemplate(text, "eval").of(3, 1, "b").text == filled


@pytest.mark.parametrize(
    ("text", "ranks", "filled"),
    [
        (BY_HOST, (0, 1, 2, 3), "a,b:0-3: "),
        (BY_HOST, (0, 1), "a:0-1: "),
        (BY_HOST, tuple(range(8)), "4 hosts:0-7: "),
        ("${rank}/${local_rank} ", (0, 1, 3, 7), "0-1,3,7/0-1 "),
        ("${local_rank} ", (0, 2, 4), "0 "),
        ("${role_name}> ", (0, 1, 2), "eval> "),
    ],
)
def test_one_prefix_for_several_ranks(text: str, ranks: tuple[int, ...], filled: str) -> None:
    """Four hosts of two ranks."""
    template = PrefixTemplate(text, "eval")
    nodes = [[name, [2 * node, 2 * node + 1]] for node, name in enumerate("abcd")]
    of = prefixes(nodes, template)
    assert template.of_several({rank: of(rank // 2, rank, rank % 2) for rank in ranks}) == filled


@pytest.mark.parametrize(
    ("text", "columns"), [("[3] ", 4), ("a\tb", 9), ("\x1b[1;32m3\x1b[0m ", 2), ("火3 ", 4), ("e\u0301 ", 2)]
)
def test_the_width_of_a_prefix(text: str, columns: int) -> None:
    assert prefix.columns(text) == columns


@pytest.mark.parametrize(
    ("template", "stream", "mark"),
    [
        (None, 2, b"[rank7]:"),
        ("[${hostname} ${rank}] ", 2, b"[rank7]:"),
        ("${local_rank}> ", 2, b""),
        ("$$rank> ", 2, b""),
        (None, 1, b""),  # a program's own
    ],
)
def test_torchs_mark_is_one_too_many_where_the_prefix_has_the_rank(
    template: str | None, stream: int, mark: bytes
) -> None:
    assert torch_mark(7, stream, PrefixTemplate(template, "") if template else None) == mark


# Where lines are shown.


def speaks() -> None:
    print("x")


def test_the_variable_counts_for_launchpad_run_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prefix.VARIABLE, "${role_name} ${hostname}:$rank/$local_rank ")
    lp.run(speaks, nproc=2, backend=None)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"default {HERE}:{rank}/{rank} x" for rank in range(2)]


def test_without_one_nothing_is_changed() -> None:
    assert template_of("", "eval") is None
    assert prefixes([["a", [0]], ["bc", [1]]], None)(0, 0, 0).text == "[a  0] "
