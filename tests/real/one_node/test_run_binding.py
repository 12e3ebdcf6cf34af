"""`launchpad run --bind`: what ranks, and their children, are really bound to, however they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.host.topology import read_topology
from launchpad.job.binding import bind_ranks, in_words, threads, written
from launchpad.job.spec import Bind
from launchpad.protocol.cpulist import written as cpus_of
from tests.support.command import PROGRAMS, Launchpad
from tests.support.hosts import Hosts
from tests.support.needs import needs_mpi, needs_torch
from tests.support.sshd import needs_sshd

HOST = os.uname().nodename
CORES = len({row[1] for row in read_topology({}).cpus})

needs_two_cores = pytest.mark.skipif(CORES < 2, reason="there is one core")

WAYS = {"executed": ("--start-method", "exec"), "forked": ("--preload", "json"), "plain": ("--no-hooks",)}


def planned(bind: Bind, count: int) -> list[dict[str, Any]]:
    """What each rank of this machine should find."""
    bindings = bind_ranks(bind, read_topology(dict(os.environ)), count, HOST)
    shown = []
    for one in bindings:
        mode = 0 if not one.memory else 1 if len(one.memory) == 1 else 5
        where = [*written(one), mode]
        shown.append({"where": where, "child": where, "threads": str(threads(bindings))})
    return shown


def found(done: subprocess.CompletedProcess[str], started: str = "executed") -> list[dict[str, Any]]:
    """What the ranks have found, in their order, and their attempts'."""
    shown = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    assert [one.pop("started") for one in shown] == [started] * len(shown)
    return shown


@needs_two_cores
@pytest.mark.parametrize("bind", ["core", "exclusive", "numa"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_runs_where_it_is_bound(launchpad: Launchpad, way: str, bind: Bind) -> None:
    done = launchpad.run("run", "-n", 2, "--bind", bind, *WAYS[way], "bound.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert found(done, "forked" if way == "forked" else "executed") == planned(bind, 2)


@needs_two_cores
@needs_torch
def test_a_rank_that_is_forked_from_a_kept_image(launchpad: Launchpad, keeper: Launchpad) -> None:
    launchpad.use_images(keeper)
    (launchpad.folder / "t.py").write_text(
        "import torch, runpy, sys\nassert torch.get_num_threads() == 1\n"
        "sys.argv[0] = sys.argv.pop(1)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    launchpad.environ["OMP_NUM_THREADS"] = "1"
    done = launchpad.run("run", "-v", "-n", 2, "--bind", "exclusive", "t.py", "bound.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert [one["where"] for one in found(done, "forked")] == [one["where"] for one in planned("exclusive", 2)]


@needs_two_cores
@pytest.mark.parametrize("way", ["executed", "forked"])
def test_ranks_are_bound_again_when_they_are_restarted(launchpad: Launchpad, way: str) -> None:
    words = ("--bind", "core", "--report-bindings", "--max-restarts", 1, "--restart", "always", *WAYS[way])
    done = launchpad.run("run", "-n", 2, *words, "bound.py", "once")
    assert done.returncode == 0
    rank0, rank1 = planned("core", 2)
    shown = found(done, way)
    assert shown[:2] == [rank0, rank0]
    assert shown[2:] in ([rank1], [rank1, rank1])  # it may have been stopped before it could print
    assert done.stderr.count("rank 0 on ") == 1, "the same again is not worth saying"


@needs_two_cores
@needs_sshd
def test_ranks_on_hosts_are_bound_there(launchpad: Launchpad, tmp_path: Path) -> None:
    with Hosts(launchpad, tmp_path / "ssh") as hosts:
        done = hosts.run(launchpad, "-H", "n1:2,n2:1", "--bind", "exclusive", "--report-bindings", "bound.py")
    assert done.returncode == 0, done.stderr
    two, (alone,) = planned("exclusive", 2), planned("exclusive", 1)
    assert [one["where"] for one in found(done)] == [one["where"] for one in [*two, alone]]
    names = ["n1", "n1", "n2"]
    assert done.stderr.splitlines() == [
        f"launchpad: rank {rank} on {names[rank]}: {in_words(*one['where'][:2])}"
        for rank, one in enumerate([*two, alone])
    ]


SPAWNS = """
import os, sys
from mpi4py import MPI
print(sorted(os.sched_getaffinity(0)), flush=True)
spawns = len(sys.argv) == 1
other = MPI.COMM_WORLD.Spawn(sys.executable, args=[sys.argv[0], "spawned"]) if spawns else MPI.Comm.Get_parent()
other.Disconnect()
"""


@needs_mpi
def test_ranks_that_are_spawned_are_not_bound(launchpad: Launchpad) -> None:
    (launchpad.folder / "s.py").write_text(SPAWNS)
    done = launchpad.run("run", "--backend", "mpi", "--bind", "core", "s.py")
    (one,) = bind_ranks("core", read_topology(dict(os.environ)), 1, HOST)
    assert sorted(done.stdout.splitlines()) == [f"[0] {[*one.cpus]}", f"[1] {sorted(os.sched_getaffinity(0))}"]


def test_the_affinity_of_launchpad_itself_is_a_limit(launchpad: Launchpad) -> None:
    cpu = min(os.sched_getaffinity(0))
    words = launchpad.argv("run", "-n", 2, "--bind", "core", "--report-bindings", "bound.py")
    done = subprocess.run(
        words,
        env=launchpad.environ,
        cwd=launchpad.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
    )
    assert [one["where"][0] for one in found(done)] == [str(cpu)] * 2
    assert done.stderr.startswith(f"launchpad: rank 0 on {HOST}: CPU {cpu}, memory of ")


def test_without_a_binding_ranks_run_anywhere(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--report-bindings", "bound.py")
    assert {one["where"][0] for one in found(done)} == {cpus_of(os.sched_getaffinity(0))}
    assert done.stderr.splitlines() == [f"launchpad: rank {rank} on {HOST}: not bound" for rank in range(2)]


def test_threads_that_the_user_has_set(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 1, "--bind", "core", "-x", "OMP_NUM_THREADS=7", "bound.py")
    assert found(done)[0]["threads"] == "7"


# torchrun's option.


@pytest.mark.parametrize(
    ("value", "bind"), [("node", "numa"), ("socket", "socket"), ("exclusive", "exclusive"), ("core-complex",) * 2]
)
def test_torchruns_values(launchpad: Launchpad, value: str, bind: Bind) -> None:
    done = launchpad.run("run", f"--numa-binding={value}", "bound.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert found(done) == planned(bind, 1)


def test_the_plan_shows_it(launchpad: Launchpad) -> None:
    launchpad.environ["PET_NUMA_BINDING"] = "socket"
    done = launchpad.run("run", "--dry-run", "--json", "bound.py")
    plan = json.loads(done.stdout)
    (one,) = bind_ranks("socket", read_topology(dict(os.environ)), 1, HOST)
    (rank,) = plan["nodes"][0]["ranks"]
    assert (rank["cpus"], rank["memory_nodes"]) == (list(one.cpus), list(one.memory))
    assert in_words(*written(one)) in launchpad.run("run", "--dry-run", "bound.py").stdout


def test_a_job_file_has_it_too(launchpad: Launchpad) -> None:
    (launchpad.folder / "job.toml").write_text(f'bind = "core"\ntarget = ["{PROGRAMS}/bound.py"]\n')
    done = launchpad.run("run", "--config", "job.toml", "--dry-run")
    (one,) = bind_ranks("core", read_topology(dict(os.environ)), 1, HOST)
    assert in_words(*written(one)) in done.stdout


def test_the_record_has_it(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--bind", "core", "--events", "e.jsonl", "bound.py")
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in (launchpad.folder / "e.jsonl").read_text().splitlines()]
    ((rank, host, *where),) = next(event["ranks"] for event in events if event["event"] == "RanksBound")
    assert (rank, host, where) == (0, HOST, planned("core", 1)[0]["where"][:2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bind", "core", "--numa-binding", "node"], "--bind core and --numa-binding node both say how to bind the"),
        (["--bind", "node"], "--bind: 'node' is not one of 'numa', 'core', 'socket', 'exclusive', 'core-complex', "),
        (
            ["--bind", "exclusive", "-n", CORES + 1],
            f"--bind exclusive: {{}} ranks of {HOST} belong to NUMA node ",
        ),
    ],
)
def test_what_can_not_be_met_is_one_sentence(launchpad: Launchpad, words: list[object], message: str) -> None:
    done = launchpad.run("run", *words, "bound.py")
    assert (done.returncode, done.stdout) == (2, "")
    before, _, after = message.partition("{}")
    assert done.stderr.startswith(f"launchpad: error: {before}")
    assert after in done.stderr
    assert done.stderr.count("\n") == 1


@needs_torch
def test_ranks_whose_openmp_pins_threads_are_executed(launchpad: Launchpad) -> None:
    """OpenMP chooses the CPUs when torch is imported, which must be after the rank is bound."""
    (launchpad.folder / "t.py").write_text("import sys, torch\nprint('_launchpad.rank.become' in sys.modules)\n")
    launchpad.environ |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    done = launchpad.run("run", "--bind", "core", "t.py")
    assert done.stdout == "[0] False\n"
    reason = "OMP_PROC_BIND is set, and chooses CPUs when torch is imported, before a forked rank would be bound"
    assert done.stderr == f"launchpad: ranks can't be forked, so each imports everything itself: {reason}\n"


# From Python.


@needs_two_cores
def test_a_function_of_launchpad_run(launchpad: Launchpad) -> None:
    (launchpad.folder / "f.py").write_text(
        "import os, launchpad as lp\n"
        "of = lambda: sorted(os.sched_getaffinity(0))\n"
        "print([*lp.run(of, nproc=2, backend=None, bind='core')])\n"
        "with lp.ranks(2, backend=None, bind='exclusive') as ranks: print([*ranks.run(of)])\n"
        "try: lp.run(of, bind='node')\nexcept lp.UsageError as error: print(error)\n"
    )
    command = [sys.executable, "f.py"]
    printed = subprocess.run(
        command, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    read = read_topology(dict(os.environ))
    for line, bind in zip(printed.splitlines(), ("core", "exclusive"), strict=False):
        assert line == str([list(one.cpus) for one in bind_ranks(bind, read, 2, HOST)])
    assert printed.splitlines()[2].startswith("bind='node': give one of 'none', 'numa', 'core', ")
