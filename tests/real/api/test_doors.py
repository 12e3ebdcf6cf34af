"""What works through one door works through all: the command, launchpad.run, launchpad.ranks, job files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import launchpad as lp
from launchpad.record import job_store
from tests.support.command import MARK, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.processes import with_variable
from tests.support.sshd import needs_sshd


def test_reports_log_files_and_the_record_are_as_the_commands(
    launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(launchpad.state))
    monkeypatch.chdir(launchpad.folder)
    said = launchpad.folder / "said"

    def hello(jobs: str) -> None:
        print("hello")
        until = time.monotonic() + 30
        while not list(Path(jobs).glob("*/samples.jsonl")) and time.monotonic() < until:
            time.sleep(0.01)

    jobs = job_store.jobs_folder(os.environ)
    results = lp.run(
        *(hello, jobs),
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
    assert list(Path(jobs).glob("*/samples.jsonl"))


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


def waiting_at_first(begun: Path) -> Callable[[], int]:
    """A function that each rank calls in vain at first, and then returns from."""

    def call() -> int:
        mine = Path(f"{begun}-{os.environ['RANK']}")
        if not mine.exists():
            mine.touch()
            time.sleep(600)
        return int(os.environ["RANK"])

    return call


@contextlib.contextmanager
def struck(begun: Path, strike: Callable[[], object]) -> Iterator[None]:
    """Both ranks call the function in this block. Once they have begun, `strike` is called."""

    def wait() -> None:
        wait_until(lambda: all(Path(f"{begun}-{rank}").exists() for rank in (0, 1)), "both ranks to run")
        strike()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@needs_sshd
def test_a_lost_host_is_reached_again_and_the_function_called_again(
    launchpad: Launchpad, hosts: Hosts, tmp_path: Path
) -> None:
    """The agent on the second host is killed. Its place is taken by a new one, which gets the function anew."""

    def kill_the_agent() -> None:
        mine = set(with_variable(MARK, launchpad.mark))
        rank = next(pid for pid in with_variable("RANK", "1") if pid in mine)
        os.kill(parent(rank), signal.SIGKILL)

    begun, ssh_config = tmp_path / "begun", str(hosts.ssh_config)
    with struck(begun, kill_the_agent):
        there = {"hosts": ["n1", "n2"], "ssh_config": ssh_config}
        results = lp.run(waiting_at_first(begun), backend=None, max_restarts=2, **there)
    assert results == (0, 1)
    assert results.places == (("n1", 0), ("n2", 0))


@needs_sshd
def test_a_spare_takes_a_lost_hosts_place(hosts: Hosts, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with struck(begun, lambda: hosts.cut_power(2)):
        results = lp.run(
            waiting_at_first(begun),
            hosts="n1,n2,n3",
            ssh_config=str(hosts.ssh_config),
            backend=None,
            max_restarts=1,
            spares=1,
            heartbeat_timeout=5.0,
        )
    assert results == (0, 1)
    assert results.places == (("n1", 0), ("n3", 0))


def parent(pid: int) -> int:
    return int(re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])  # type: ignore[index]
