"""What works through one door works through all: the command, launchpad.run, launchpad.ranks, job files."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path

import pytest

import launchpad as lp
from launchpad.api.options import NOT_FOR_RANKS, NOT_FOR_RUN, JobOptions, SharedOptions
from launchpad.cli import job_file
from launchpad.cli.run import command

MANUAL = Path(lp.__file__).parent / "manual"

HABITS = {"oversubscribe", "allow_run_as_root", "tag_output"}  # mpirun's, without effect


def options() -> set[str]:
    """The options of `launchpad run`, by the names that they have in Python."""
    names = set()
    for option in command.params:
        longest = max((name for name in option.opts if name.startswith("--")), key=len, default="")
        if longest:
            names.add(longest[2:].replace("-", "_"))
    return names - HABITS


@pytest.mark.parametrize(
    ("function", "more", "refused"),
    [(lp.run, JobOptions, NOT_FOR_RUN), (lp.ranks, SharedOptions, NOT_FOR_RANKS)],
    ids=["run", "ranks"],
)
def test_each_option_is_taken_or_refused_with_a_reason(function: object, more: type, refused: dict[str, str]) -> None:
    own = {name for name in inspect.signature(function).parameters if name not in ("fn", "args", "more")}
    taken = own | set(more.__annotations__) | set(SharedOptions.__annotations__)
    assert taken & refused.keys() == set()
    missing = {name for name in options() if ALIASES.get(name, name) not in taken | refused.keys()}
    assert missing == set()
    assert {name for name in refused if name not in options() | {"help"}} == set()


# By the option's longest name.
ALIASES = {"nproc_per_node": "nproc", "machinefile": "hostfile", "shutdown_timeout": "grace"}


def test_the_manual_names_each_parameter() -> None:
    page = (MANUAL / "functions.md").read_text()
    for name in {*JobOptions.__annotations__, *SharedOptions.__annotations__}:
        assert f"`{name}`" in page, name


def test_a_job_file_takes_every_option_of_the_job() -> None:
    assert {name.replace("_", "-") for name in options() | {"help", "hostfile"}} >= job_file._NOT_IN_FILES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"debug": "2"}, "debug='2': give a rank"),
        ({"debug": (1,)}, r"debug=\(1,\): give a rank"),
        ({"stall_timeout": 0}, "stall_timeout=0: give a positive number"),
        ({"spares": -1}, "spares=-1: give a number of hosts"),
        ({"spares": 1}, "--spares 1 needs hosts"),
        ({"nnodes": "1:2"}, "nnodes='1:2' needs hosts"),
        ({"stop_signal": "NEVER"}, "stop_signal='NEVER': there is no such signal"),
        ({"stop_signal": "KILL"}, "it can't be caught"),
        ({"ssh": "rsh"}, "ssh='rsh': give one of 'paramiko', 'openssh'"),
        ({"mpi": "mpich"}, "add backend='mpi'"),
        ({"inject": "kill"}, "--inject"),
        ({"env_file": "gone"}, "--env-file gone"),
        ({"report": "no/such/page.html"}, "no/such/page.html"),
        ({"module": True}, "launchpad.run has no parameter module: the ranks call a function"),
        ({"stall_timout": 3}, "launchpad.run has no parameter stall_timout"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(lp.UsageError, match=message):
        lp.run(os.getpid, backend=None, **given)


def test_what_ranks_that_stay_do_not_take_has_its_reason() -> None:
    with pytest.raises(lp.UsageError, match="no parameter stall_timeout: between calls the ranks only wait"):
        lp.ranks(1, backend=None, stall_timeout=5)  # type: ignore[call-arg]


def test_a_hang_is_ended_and_explained() -> None:
    def holds() -> None:
        if os.environ["RANK"] == "1":
            threading.Event().wait()

    with pytest.raises(lp.UsageError, match="it hung, with no output"):
        lp.run(holds, nproc=2, backend=None, stall_timeout=1.0, grace=2.0)
