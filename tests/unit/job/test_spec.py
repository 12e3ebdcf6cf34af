"""job/spec, job/user_environment, job/outcome and the parsers of options: what the user writes, and what it means."""

from __future__ import annotations

import signal
from typing import Literal

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchpad.cli import options
from launchpad.errors import UsageError
from launchpad.job.outcome import Cause, CauseKind, exit_in_words, ranks_in_words
from launchpad.job.spec import JobSpec, StreamMap, Target
from launchpad.job.user_environment import forwarded, parse_file, parse_option
from tests.support.unhurried import UNHURRIED

# StreamMap.


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_one_number_means_all_ranks(number: int) -> None:
    streams = StreamMap.parse(str(number), "--tee")
    assert [streams.has(7, 1), streams.has(7, 2)] == [bool(number & 1), bool(number & 2)]
    assert bool(streams) == (number != 0)


@UNHURRIED
@given(st.dictionaries(st.integers(0, 200), st.integers(0, 3), min_size=1, max_size=5))
def test_pairs_mean_those_local_ranks_and_no_others(wanted: dict[int, int]) -> None:
    streams = StreamMap.parse(", ".join(f"{rank}:{number}" for rank, number in wanted.items()), "--tee")
    for rank in [*wanted, 201]:
        assert streams.has(rank, 1) + 2 * streams.has(rank, 2) == wanted.get(rank, 0)
    assert bool(streams) == any(wanted.values())


def test_two_digit_ranks_are_parsed() -> None:
    streams = StreamMap.parse("10:3,11:1", "-r")
    assert streams.by_local_rank == {10: 3, 11: 1}
    assert not streams.has(1, 1)


@pytest.mark.parametrize(
    "text", ["", "4", "-1", "12", "all", "0:4", "0:", ":3", "0:3,", "0:3,x:1", "0:3;1:2", "-1:3", "0:3 1:2", "0: 3"]
)
def test_a_malformed_stream_map_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(UsageError, match="is not LOCAL_RANK:STREAMS") as caught:
        StreamMap.parse(text, "--redirects")
    assert str(caught.value).startswith(f"--redirects {text}: ")


def test_a_local_rank_may_be_given_only_once() -> None:
    with pytest.raises(UsageError, match="--tee 0:1,0:2: local rank 0 is given twice"):
        StreamMap.parse("0:1,0:2", "--tee")


@pytest.mark.parametrize(
    ("kind", "name", "argv"),
    [
        ("script", "dir/a b.py", ("py", "-u", "dir/a b.py", "-x", "")),
        ("module", "pkg.mod", ("py", "-u", "-m", "pkg.mod", "-x", "")),
        ("program", "/bin/ls", ("/bin/ls", "-x", "")),
    ],
)
def test_a_target_becomes_a_command_line(
    kind: Literal["script", "module", "program"], name: str, argv: tuple[str, ...]
) -> None:
    assert Target(kind, name, ("-x", "")).argv("py", 0) == argv


# Variables.


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("A=b", ("A", "b")),
        ("A=", ("A", "")),
        ("_a1=x=y", ("_a1", "x=y")),
        ("A= b '", ("A", " b '")),
        ("HERE", ("HERE", "v")),
    ],
)
def test_an_option_sets_a_variable_or_passes_one_on(text: str, pair: tuple[str, str]) -> None:
    assert parse_option(text, {"HERE": "v"}) == dict([pair])


@pytest.mark.parametrize(
    "text", ["", "=hunter2", "1A=hunter2", "a-b=hunter2", "A B=hunter2", "hunter2!", "/etc/hunter2"]
)
def test_a_malformed_variable_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="write VAR=VALUE") as caught:
        parse_option(text, {})
    assert "hunter2" not in str(caught.value)


def test_a_value_with_a_nul_byte_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="value of A contains a NUL byte") as caught:
        parse_option("A=hunter2\0", {})
    assert "hunter2" not in str(caught.value)


def test_a_variable_that_is_not_set_here_cannot_be_passed_on() -> None:
    with pytest.raises(UsageError, match=r"^--env NOPE: NOPE is not set here"):
        parse_option("NOPE", {"HERE": "v"})


def test_a_file_is_parsed_as_people_write_them() -> None:
    text = """
        # a comment

        A=1
        export B=two words
        C = "quoted # not a comment"
        D='it is'
        E=
        F="one-sided
        export HERE
        A=3
        G='"'
        H="
    """
    assert parse_file(text, "job.env", {"HERE": "v"}) == {
        "A": "3",
        "B": "two words",
        "C": "quoted # not a comment",
        "D": "it is",
        "E": "",
        "F": '"one-sided',
        "HERE": "v",
        "G": '"',
        "H": '"',
    }


@pytest.mark.parametrize("value", [" spaced ", "'quoted'", '"{}"'])
def test_a_value_that_a_file_passes_on_is_unchanged(value: str) -> None:
    assert parse_file("HERE\n", "job.env", {"HERE": value}) == {"HERE": value}


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_a_newline_ends_a_line(character: str) -> None:
    assert parse_file(f"A=x{character}y\n", "job.env", {}) == {"A": f"x{character}y"}


@pytest.mark.parametrize("line", ["hunter2!", "a-b=hunter2", "=hunter2", "A=hunter2\0", "NOPE"])
def test_an_error_in_a_file_names_the_file_and_the_line_and_not_the_value(line: str) -> None:
    with pytest.raises(UsageError, match=r"^job\.env, line 3: ") as caught:
        parse_file(f"A=1\n# comment\n{line}\nB=2\n", "job.env", {})
    assert "hunter2" not in str(caught.value)


# Outcome.


@pytest.mark.parametrize(
    ("kind", "details", "code"),
    [
        ("failure", {"code": 7}, 7),
        ("failure", {"code": -11}, 139),
        ("signal", {"signum": signal.SIGINT}, 130),
        ("signal", {"signum": signal.SIGTERM}, 143),
        ("signal", {"signum": signal.SIGHUP}, 129),
        ("timeout", {}, 124),
        ("console", {}, 141),
        ("start", {}, 2),
        ("lost", {}, 4),
    ],
)
def test_each_cause_has_its_exit_code(kind: CauseKind, details: dict[str, int], code: int) -> None:
    assert Cause(kind, **details).exit_code == code  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (7, "exit code 7"),
        (-11, "killed by SIGSEGV (Segmentation fault)"),
        (-9, "killed by SIGKILL (Killed)"),
        (-40, "killed by signal 40 (Real-time signal 6)"),
    ],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert exit_in_words(code) == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([4, 0, 2, 1], "ranks 0-2, 4"),
        ([9, 10, 11], "ranks 9-11"),
        ([0, 2, 4], "ranks 0, 2, 4"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


# The parsers of options.


def test_nproc_is_a_number_or_a_word() -> None:
    assert [options.rank_count(text) for text in ("1", "64", "auto", "gpu", "xpu")] == [1, 64, "auto", "gpu", "xpu"]


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5", "1e3", "GPU"])
def test_a_malformed_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"number of ranks|at least 1"):
        options.rank_count(text)


def test_a_duration_may_have_a_unit() -> None:
    assert [options.seconds(text) for text in ("0", "1.5", "30s", "5m", "2h", "1d")] == [0, 1.5, 30, 300, 7200, 86400]


@pytest.mark.parametrize("text", ["", "s", "-1", "soon", "nan", "inf", "1w", "5ms", "1e99", "1 2"])
def test_a_malformed_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time"):
        options.seconds(text)


def test_local_ranks_are_separated_by_commas() -> None:
    assert options.local_ranks("0, 10,3,0") == {0, 3, 10}


@pytest.mark.parametrize("text", ["", "0,", "-1", "0-3", "all", "²"])
def test_a_malformed_list_of_local_ranks_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a list of local ranks"):
        options.local_ranks(text)


def test_a_pattern_passes_on_every_variable_that_matches() -> None:
    environ = {"HF_HOME": "/x", "HF_TOKEN": "secret", "HOME": "/h"}
    assert parse_option("HF_*", environ) == {"HF_HOME": "/x", "HF_TOKEN": "secret"}
    assert parse_option("H?ME", environ) == {"HOME": "/h"}
    with pytest.raises(UsageError, match=r"^--env NCCL_\*: no variable that is set here matches"):
        parse_option("NCCL_*", environ)


def test_variables_that_are_forwarded_by_default() -> None:
    there = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "lib",
        "PYTHONHASHSEED": "0",
        "TORCH_LOGS": "all",
        "OMPI_MCA_btl": "tcp,self",
        "MPI4PY_MPIABI": "openmpi",
    }
    here = {"PATH": "/bin", "PYTHONHOME": "/usr", "CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}
    here |= {"MPI4PY_LIBMPI": "/lib/libmpi.so", "OMPI_MCA_orte_node_regex": "n[1:1-2]"}
    assert forwarded({**there, **here}) == there


def test_which_option_keeps_a_stream_off_the_console() -> None:
    spec = JobSpec(Target("program", "true"), redirects=StreamMap(3), tee=StreamMap(by_local_rank={1: 1}))
    assert [spec.hides(0, 1), spec.hides(1, 1), spec.hides(1, 2)] == ["--redirects", "", "--redirects"]
    filtered = JobSpec(Target("program", "true"), shown_local_ranks=frozenset([1]))
    assert [filtered.hides(0, 1), filtered.hides(1, 1)] == ["--local-ranks-filter", ""]
