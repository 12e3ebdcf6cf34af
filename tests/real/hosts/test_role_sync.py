"""--sync and --sync-env with roles: the worlds on a host share its copies."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

import launchpad as lp
from launchpad import Role
from tests.support.command import Launchpad
from tests.support.hosts import Hosts
from tests.support.hosts import hosts as hosts
from tests.support.sshd import needs_sshd

pytestmark = [needs_sshd, pytest.mark.usefixtures("from_image")]

SHOW = "import os, sys\nprint('has', open('data').read(), os.getcwd(), sys.prefix)\n"

FILE = """
[jobs.j]
hosts = "n1:2,n2:1"

[jobs.j.roles.a]
target = "show.py"
replicas = 2

[jobs.j.roles.b]
target = "show.py"
wdir = "inner"

[jobs.j.roles.c]
target = "show.py"
hosts = ["n1"]
"""


def run(launchpad: Launchpad, hosts: Hosts, *args: object) -> subprocess.CompletedProcess[str]:
    return hosts.run(launchpad, "--config", "job.toml", "--job", "j", *args)


def write(launchpad: Launchpad) -> None:
    (launchpad.folder / "job.toml").write_text(FILE)
    for folder in (launchpad.folder, launchpad.folder / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "show.py").write_text(SHOW)
        (folder / "data").write_text(folder.name)


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """What each world has: the words of its data, its folder and its environment."""
    assert done.returncode == 0, done.stderr
    return {name: text.split() for name, text in re.findall(r"^\[(\S+) +0\] has (.*)$", done.stdout, re.M)}


def test_worlds_run_in_the_copy_of_their_folder(launchpad: Launchpad, hosts: Hosts) -> None:
    write(launchpad)
    done = run(launchpad, hosts, "--sync")
    found, copies = shown(done), f"{hosts.cache}/launchpad/copy-"
    assert (sorted(found), done.stderr) == (["a.0", "a.1", "b", "c"], "")
    assert {found[name][0] for name in ("a.0", "a.1", "c")} == {launchpad.folder.name}
    assert found["b"][0] == "inner"
    assert len({found[name][1] for name in ("a.0", "a.1", "c")}) == 1, "the hosts of a test share a cache"
    assert found["a.0"][1].startswith(f"{copies}{launchpad.folder.name}-")
    assert found["b"][1].startswith(f"{copies}inner-")
    (launchpad.folder / "data").write_text("changed")
    assert shown(run(launchpad, hosts, "--sync"))["c"][0] == "changed"


def test_a_host_is_sent_an_environment_once_for_all_its_worlds(
    launchpad: Launchpad, hosts: Hosts, tmp_path: Path
) -> None:
    write(launchpad)
    prefix = tmp_path / "made" / "venv"
    venv.create(prefix, symlinks=True)
    done = run(launchpad, hosts, "--sync", "--sync-env", "--python", prefix / "bin" / "python")
    places = {words[2] for words in shown(done).values()}
    assert len(places) == 1
    assert places.pop().startswith(f"{hosts.cache}/launchpad/env-venv-")
    assert re.fullmatch(rf"launchpad: sent \d+ MB of {prefix} to n1, n2\n", done.stderr)


def test_functions_of_a_module_that_is_only_here(
    launchpad: Launchpad, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def where() -> tuple[str, str]:
        with open("data") as data:
            return data.read(), os.getcwd()

    write(launchpad)
    monkeypatch.chdir(launchpad.folder)
    found = lp.run(
        {"a": Role(where, backend=None), "b": Role(where, backend=None, replicas=2)},
        hosts=["n1:2", "n2:1"],
        ssh_config=str(hosts.ssh_config),
        sync=True,
    )
    assert [one[0][0] for one in (found["a"], *found["b"])] == [launchpad.folder.name] * 3
    assert found["a"][0][1].startswith(f"{hosts.cache}/launchpad/copy-")


def test_a_folder_needs_hosts_to_be_copied_to(launchpad: Launchpad) -> None:
    (launchpad.folder / "job.toml").write_text('[jobs.j.roles.a]\ntarget = "true"\n')
    done = launchpad.run("run", "--config", "job.toml", "--job", "j", "--sync")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "launchpad: error: --sync needs hosts; name them with --hosts or --hostfile, or leave it out\n"
    )
