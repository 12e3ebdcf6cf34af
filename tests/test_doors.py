"""What works through one door works through all: the command, launchpad.run, launchpad.ranks, job files."""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import launchpad as lp
from launchpad.api.options import NOT_FOR_RANKS, NOT_FOR_RUN, JobOptions, SharedOptions
from launchpad.cli import job_file
from launchpad.cli.run import command
from launchpad.record import job_store
from tests.conftest import Launchpad, wait_until
from tests.processes import with_variable
from tests.sshd import needs_sshd
from tests.test_run_hosts import Hosts

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


def test_reports_log_files_and_the_record_are_as_the_commands(
    launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(launchpad.state))
    monkeypatch.chdir(launchpad.folder)
    said = launchpad.folder / "said"
    results = lp.run(
        *(print, "hello"),
        nproc=2,
        backend=None,
        report="job.html",
        junit="job.xml",
        log_dir="logs",
        notify=f"echo $LAUNCHPAD_EXIT_CODE > {said}",
        sample=0.1,
        env_file=[],
    )
    assert results == (None, None)
    assert "succeeded" in Path("job.html").read_text()
    assert 'tests="2"' in Path("job.xml").read_text()
    assert [path.read_text() for path in Path("logs").rglob("stdout.log")] == ["hello\n", "hello\n"]
    assert said.read_text() == "0\n"
    (record,) = Path(job_store.jobs_folder(os.environ)).iterdir()
    assert (record / "samples.jsonl").exists() or (record / "events.jsonl").read_text().count("Sampled") > 0


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@needs_sshd
def test_a_lost_host_is_reached_again_and_the_function_called_again(
    launchpad: Launchpad, hosts: Hosts, tmp_path: Path
) -> None:
    """The agent on the second host is killed. Its place is taken by a new one, which gets the function anew."""
    begun = tmp_path / "begun"

    def first_waits() -> int:
        mine = Path(f"{begun}-{os.environ['RANK']}")
        if not mine.exists():
            mine.touch()
            time.sleep(600)
        return int(os.environ["RANK"])

    def kill_the_agent() -> None:
        wait_until(lambda: Path(f"{begun}-1").exists() and Path(f"{begun}-0").exists(), "both ranks to run")
        rank = next(pid for pid in with_variable("RANK", "1") if is_of(pid, launchpad.mark))
        os.kill(parent(rank), signal.SIGKILL)

    killer = threading.Thread(target=kill_the_agent)
    killer.start()
    try:
        results = lp.run(
            first_waits, hosts=["n1", "n2"], ssh_config=str(hosts.ssh_config), backend=None, max_restarts=2
        )
    finally:
        killer.join()
    assert results == (0, 1)
    assert results.places == (("n1", 0), ("n2", 0))


@needs_sshd
def test_a_spare_takes_a_lost_hosts_place(hosts: Hosts, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def first_waits() -> int:
        mine = Path(f"{begun}-{os.environ['RANK']}")
        if not mine.exists():
            mine.touch()
            time.sleep(600)
        return int(os.environ["RANK"])

    def cut() -> None:
        wait_until(lambda: Path(f"{begun}-1").exists() and Path(f"{begun}-0").exists(), "both ranks to run")
        hosts.cut_power(2)

    killer = threading.Thread(target=cut)
    killer.start()
    try:
        results = lp.run(
            first_waits,
            hosts="n1,n2,n3",
            ssh_config=str(hosts.ssh_config),
            backend=None,
            max_restarts=1,
            spares=1,
            heartbeat_timeout=5.0,
        )
    finally:
        killer.join()
    assert results == (0, 1)
    assert results.places == (("n1", 0), ("n3", 0))


def is_of(pid: int, mark: str) -> bool:
    return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()


def parent(pid: int) -> int:
    return int(re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])  # type: ignore[index]
