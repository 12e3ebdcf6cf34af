"""`launchpad doctor` on this machine; test_doctor_hosts.py has hosts with known faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from launchpad.agent.checkup import gpus
from launchpad.doctor.judge import judge
from launchpad.doctor.seen import Finding
from tests.support.command import Launchpad
from tests.support.doctor import QUERY, healthy, on_all

# What the hosts tell.


def test_gpus_are_known_where_their_links_are_not() -> None:
    def ask(arguments: Any) -> str:
        if "topo" not in arguments:
            return QUERY
        raise subprocess.CalledProcessError(3, "nvidia-smi") if "-m" in arguments else subprocess.TimeoutExpired("", 1)

    found = gpus.read(ask, [], False)
    assert (len(found.gpus), found.links, found.apart) == (2, [], [])
    assert judge(on_all(links=[])(healthy())) == []


# The command, on this machine.


def findings(text: str) -> list[Finding]:
    return [Finding(**one) for one in json.loads(text)["findings"]]


def test_doctor_on_this_machine(launchpad: Launchpad) -> None:
    before = sorted(os.listdir(launchpad.folder))
    done = launchpad.run("doctor", "--json", "--python", sys._base_executable)
    assert done.returncode in (0, 3), done.stderr
    result = json.loads(done.stdout)
    (one,) = result["hosts"]
    assert one["facts"]["software"]["python"].startswith("3.")
    assert (result["paths"], one["problems"]) == ([], {})
    assert sorted(os.listdir(launchpad.folder)) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-H", "a:0"], "--hosts: 'a:0'"),
        (["--include", "a"], "--include needs hosts"),
        (["--python", "/nonexistent"], "--python /nonexistent: no such interpreter"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_sentence(launchpad: Launchpad, words: list[str], says: str) -> None:
    done = launchpad.run("doctor", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_job_is_not_started_where_it_can_not_run(launchpad: Launchpad) -> None:
    launchpad.environ["GLOO_SOCKET_IFNAME"] = "none0"
    done = launchpad.run("run", "--check", "--python", sys._base_executable, "sh", "-c", "echo started")
    assert (done.returncode, done.stdout) == (3, "")
    assert "GLOO_SOCKET_IFNAME=none0 is set" in done.stderr
    del launchpad.environ["GLOO_SOCKET_IFNAME"]
    done = launchpad.run("run", "--check", "--python", sys._base_executable, "sh", "-c", "echo started")
    assert (done.returncode, done.stdout) == (0, "[0] started\n"), done.stderr
