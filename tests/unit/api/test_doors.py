"""What works through one door works through all: command, launchpad.run, launchpad.ranks, files, nodes that join."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path

import pytest

import launchpad as lp
from launchpad.api.options import JobOptions, SharedOptions
from launchpad.cli import job_file
from launchpad.cli.run import command
from launchpad.job import offer
from launchpad.runner.doors import NOT_FOR_RANKS, NOT_FOR_RUN, NOT_IN_FILES, NOT_ON_JOINED_NODES
from launchpad.runner.options import HostOptions, ReportOptions

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
    """By all of its names, or by none."""
    taken = {name.replace("-", "_") for name in job_file._options(command)}
    assert options() - taken == NOT_IN_FILES.keys() - {"help"}
    for option in command.params:
        names = {name[2:].replace("-", "_") for name in option.opts if name.startswith("--")}
        assert names <= taken or not names & taken, names


@pytest.mark.parametrize("name", ["detach", "dry-run", "dry_run", "help"])
def test_what_a_job_file_does_not_take_has_its_reason(name: str) -> None:
    with pytest.raises(lp.UsageError, match=f"^f.toml: {name}: it belongs on the command line: [a-z]"):
        job_file.parse_jobs(f'{name} = "1"', "f.toml", job_file._options(command))


def test_a_node_that_joins_has_no_say_in_what_is_the_job_s() -> None:
    assert NOT_ON_JOINED_NODES.keys() <= options()
    refused = {ALIASES.get(name, name) for name in NOT_ON_JOINED_NODES}
    told = {name[2:].replace("-", "_") for name in offer._OF_THE_JOB}
    assert told <= refused
    own = {"env" if name == "environ" else "no_hooks" if name == "hooks" else name for name in offer._OWN}
    assert not own & refused
    # It shows its own ranks' output.
    assert set(ReportOptions._fields) - {"job", "fold", "quiet", "verbose"} <= refused
    assert set(HostOptions._fields) - {"allocation", "by_srun", "joined"} <= refused


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
