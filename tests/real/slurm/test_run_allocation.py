"""`launchpad run` in a batch allocation: its nodes are the hosts, each behind an sshd of its own, or this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Launchpad
from tests.support.hosts import SHOW, Hosts
from tests.support.sshd import needs_sshd

HERE = socket.gethostname()


@pytest.fixture
def hosts(launchpad: Launchpad, tmp_path: Path) -> Iterator[Hosts]:
    (launchpad.folder / "show.py").write_text(SHOW)
    with Hosts(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


def pbs(launchpad: Launchpad, *names: str) -> Path:
    """Be in a PBS allocation with a slot for each of these names."""
    file = launchpad.folder.parent / "nodefile"
    file.write_text("".join(f"{name}\n" for name in names))
    launchpad.environ["PBS_NODEFILE"] = str(file)
    return file


def ended(done: subprocess.CompletedProcess[str]) -> tuple[list[str], list[str]]:
    """What the ranks wrote, in order, and what launchpad said."""
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr.splitlines()


# Other machines.


@needs_sshd
def test_the_nodes_of_the_allocation_are_the_hosts(launchpad: Launchpad, hosts: Hosts) -> None:
    pbs(launchpad, "n2", "n1", "n2")
    names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK PBS_NODEFILE".split()
    output, said = ended(hosts.run(launchpad, "show.py", *names))
    # The variables of the allocation stay here, as they do with --hosts.
    assert output == ["[n1 2] 2 0 3 1 -", "[n2 0] 0 0 3 0 -", "[n2 1] 1 1 3 0 -"]
    assert said == ["launchpad: using the 2 nodes of this PBS allocation: n2:2, n1:1"]


@needs_sshd
def test_nproc_comes_before_the_slots_and_quiet_says_nothing(launchpad: Launchpad, hosts: Hosts) -> None:
    pbs(launchpad, "n1", "n2", "n2")
    output, said = ended(hosts.run(launchpad, "--quiet", "-n", 2, "show.py", "LOCAL_WORLD_SIZE"))
    assert output == ["[n1 0] 2", "[n1 1] 2", "[n2 2] 2", "[n2 3] 2"]
    assert said == []


@needs_sshd
def test_several_programs_take_its_slots_one_after_the_other(launchpad: Launchpad, hosts: Hosts) -> None:
    pbs(launchpad, "n1", "n1", "n2", "n2")
    words = ["-n", 1, "show.py", "RANK", ":", "-n", 2, "show.py", "RANK", ":", "-H", "n2", "sh", "-c", "echo $RANK"]
    output, _ = ended(hosts.run(launchpad, "--quiet", *words))
    assert output == ["[n1 show.py 0] 0", "[n1 show.py 1] 1", "[n2 sh      3] 3", "[n2 show.py 2] 2"]
    done = hosts.run(launchpad, "--quiet", "-n", 1, "show.py", ":", "-n", 4, "show.py")
    assert done.returncode == 2
    assert "-n 4: only 3 of the allocation's 4 slots are left for it" in done.stderr
    done = hosts.run(launchpad, "--quiet", "show.py", ":", "-H", "elsewhere", "show.py")
    assert "elsewhere is none of the allocation's nodes, which are n1, n2" in done.stderr


@needs_sshd
def test_a_part_of_the_allocation_is_chosen_and_shown(launchpad: Launchpad, hosts: Hosts) -> None:
    pbs(launchpad, "n1", "n2", "n2", "n3")
    done = hosts.run(launchpad, "--include", "n[12]", "--exclude", "n1", "--dry-run", "--json", "show.py")
    assert done.stderr == "launchpad: using 1 of the 3 nodes of this PBS allocation: n2:2\n"
    assert [(node["name"], len(node["ranks"])) for node in json.loads(done.stdout)["nodes"]] == [("n2", 2)]


@needs_sshd
def test_flux_is_asked_for_the_nodes(launchpad: Launchpad, hosts: Hosts) -> None:
    execution = {"R_lite": [{"rank": "3-4", "children": {"core": "0-1"}}], "nodelist": ["n[1-2]"]}
    flux = launchpad.folder / "bin" / "flux"
    flux.parent.mkdir()
    flux.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['job', 'info', 'f2oLkTLb', 'R']\n"
        f"print('''{json.dumps({'version': 1, 'execution': execution})}''')\n"
    )
    flux.chmod(0o755)
    launchpad.environ |= {
        "PATH": f"{flux.parent}:{launchpad.environ['PATH']}",
        "FLUX_JOB_ID": "f2oLkTLb",
        "FLUX_URI": "local:///run/flux/local",
    }
    output, said = ended(hosts.run(launchpad, "show.py", "RANK", "FLUX_JOB_ID"))
    assert output == ["[n1 0] 0 -", "[n1 1] 1 -", "[n2 2] 2 -", "[n2 3] 3 -"]
    assert said == ["launchpad: using the 2 nodes of this Flux allocation: n1:2, n2:2"]


# This machine.


@pytest.fixture
def without_ssh(launchpad: Launchpad) -> None:
    """Have ssh fail wherever it is asked."""
    ssh = launchpad.folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\necho ssh was run >&2\nexit 255\n")
    ssh.chmod(0o755)
    launchpad.environ["PATH"] = f"{ssh.parent}:{launchpad.environ['PATH']}"


@pytest.mark.usefixtures("without_ssh")
def test_a_job_of_one_node_runs_here_with_as_many_ranks_as_slots(launchpad: Launchpad) -> None:
    pbs(launchpad, HERE, HERE, HERE)
    output, said = ended(launchpad.run("run", "sh", "-c", "echo $RANK of $WORLD_SIZE"))
    assert output == ["[0] 0 of 3", "[1] 1 of 3", "[2] 2 of 3"]
    assert said == [f"launchpad: using the node of this PBS allocation: {HERE}:3"]
    output, said = ended(launchpad.run("run", "-q", "-n", 1, "sh", "-c", "echo $RANK of $WORLD_SIZE"))
    assert (output, said) == (["[0] 0 of 1"], [])


@pytest.mark.parametrize("words", [["--hosts", "localhost"], ["--nnodes", 1], ["--standalone"]])
def test_who_says_where_to_run_is_not_in_the_allocation(launchpad: Launchpad, words: list[object]) -> None:
    pbs(launchpad, "no-such-node", "another")
    assert ended(launchpad.run("run", *words, "echo", "here")) == (["[0] here"], [])


def test_the_environment_can_say_where_to_run(launchpad: Launchpad) -> None:
    pbs(launchpad, "no-such-node")
    launchpad.environ["PET_NNODES"] = "1"
    assert ended(launchpad.run("run", "echo", "here")) == (["[0] here"], [])


def test_a_job_that_a_rank_starts_stays_with_it(launchpad: Launchpad) -> None:
    pbs(launchpad, HERE, HERE)
    inner = " ".join(launchpad.argv("run", "echo", "inner"))
    output, said = ended(launchpad.run("run", "sh", "-c", inner))
    assert output == ["[0] [0] inner", "[1] [0] inner"]
    assert said == [f"launchpad: using the node of this PBS allocation: {HERE}:2"]


def test_jobs_of_a_file_use_the_allocation_too(launchpad: Launchpad) -> None:
    pbs(launchpad, HERE, HERE)
    (launchpad.folder / "jobs.toml").write_text('[jobs.one]\ntarget = ["echo", "one"]\n')
    done = launchpad.run("run", "--config", "jobs.toml", "--job", "one")
    assert ended(done)[0] == ["[0] one", "[1] one"]
    (launchpad.folder / "jobs.toml").write_text('nnodes = "1"\n[jobs.one]\ntarget = ["echo", "one"]\n')
    done = launchpad.run("run", "--config", "jobs.toml", "--job", "one")
    assert ended(done) == (["[0] one"], [])


# What is wrong.

INSTEAD = "name the hosts with --hosts; --hosts localhost is this machine alone"


@pytest.mark.parametrize("command", [["run", "echo"], ["bench"]])
def test_a_node_file_that_can_not_be_used_is_named_with_its_line(launchpad: Launchpad, command: list[str]) -> None:
    file = pbs(launchpad, HERE, "two words")

    def said() -> str:
        done = launchpad.run(*command)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    line = "PBS writes one host per line, and this has 2 words"
    assert said() == f"launchpad: error: {file}, line 2: {line}; {INSTEAD}\n"
    file.write_text("")
    assert said() == f"launchpad: error: {file} lists no nodes of this PBS allocation; {INSTEAD}\n"
    file.unlink()
    assert said() == f"launchpad: error: PBS_NODEFILE names {file}: No such file or directory; {INSTEAD}\n"
    file.mkdir()
    assert said() == f"launchpad: error: PBS_NODEFILE names {file}: Is a directory; {INSTEAD}\n"
    file.rmdir()


def test_a_node_that_is_not_in_the_allocation(launchpad: Launchpad) -> None:
    pbs(launchpad, "a", "b")
    done = launchpad.run("run", "--include", "c", "echo")
    assert done.returncode == 2
    assert done.stderr == "launchpad: error: --include 'c': 'c' matches none of the hosts, which are a, b\n"
