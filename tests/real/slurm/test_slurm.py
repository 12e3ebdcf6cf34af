"""Slurm: `launchpad run` in an allocation, on real clusters of this machine (tests/support/slurm.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.needs import needs_torch
from tests.support.netns import Network, needs_namespaces
from tests.support.ports import free_port
from tests.support.slurm import Slurm, needs_slurm

EXAMPLE = Path(__file__).parents[3] / "examples" / "all_reduce.py"


# A single launchpad that never gets as far as Slurm.


def in_allocation(launchpad: Launchpad, srun: str) -> None:
    """Be in an allocation whose srun is this shell script."""
    launchpad.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    program = launchpad.folder / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{srun}\n")
    program.chmod(0o755)
    launchpad.environ["PATH"] = f"{program.parent}:{launchpad.environ['PATH']}"


def test_what_srun_says_is_shown_if_it_fails(launchpad: Launchpad) -> None:
    in_allocation(launchpad, "echo 'srun: error: Unable to create step: no' >&2; exit 1")
    done = launchpad.run("run", "-q", "true")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "launchpad: error: no launchpad on a, b of the Slurm allocation: srun has ended; name the hosts with "
        "--hosts; --hosts localhost is this machine alone\n"
        "  srun: error: Unable to create step: no\n"
    )


def test_nodes_that_never_come_are_named(launchpad: Launchpad) -> None:
    in_allocation(launchpad, "echo 'srun: waiting for something'; exec sleep 600")
    done = launchpad.run("run", "-q", "--rdzv-conf", "join_timeout=6", "true")
    assert done.returncode == 3
    assert "no launchpad on a, b of the Slurm allocation within 6 s\n  srun: waiting for something\n" in done.stderr


def test_ctrl_c_while_nodes_are_awaited(launchpad: Launchpad) -> None:
    in_allocation(launchpad, f"touch {launchpad.folder}/waits; exec sleep 600")
    job = launchpad.start("run", "-q", "true")
    wait_until((launchpad.folder / "waits").exists, "srun to be started")
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=DEADLINE) == (b"", b"")
    assert job.returncode == 130


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_srun_that_is_a_script_leaves_nothing_when_launchpad_is_stopped(launchpad: Launchpad, signum: int) -> None:
    in_allocation(launchpad, f"touch {launchpad.folder}/waits; sleep 600; true")
    job = launchpad.start("run", "true")
    wait_until((launchpad.folder / "waits").exists, "srun to be started")
    job.send_signal(signum)
    _, err = job.communicate(timeout=DEADLINE)
    assert job.returncode == 128 + signum
    assert f"launchpad: stopped by {signal.Signals(signum).name} before any rank was started\n" in err.decode()
    assert not launchpad.survivors()


def test_without_srun(launchpad: Launchpad) -> None:
    in_allocation(launchpad, "")
    launchpad.environ["PATH"] = str(launchpad.folder)
    done = launchpad.run("run", "-q", EXAMPLE)
    assert done.returncode == 3
    assert "srun: No such file or directory; this is a Slurm allocation" in done.stderr
    assert "--hosts localhost is this machine alone" in done.stderr


def test_what_is_no_allocation_is_this_machine(launchpad: Launchpad) -> None:
    """As in a container, or a shell that an IDE has opened."""
    launchpad.environ["SLURM_JOB_ID"] = "7"
    for quiet, said in (
        ((), "SLURM_JOB_ID is set, but no list of nodes: using this machine alone; --hosts names others\n"),
        (("-q",), ""),
    ):
        done = launchpad.run("run", *quiet, "-n", 2, "true")
        assert (done.returncode, done.stderr.removeprefix("launchpad: ")) == (0, said)


@pytest.mark.parametrize("words", [["--hosts", "localhost"], ["--nnodes", 1], ["--standalone"]])
def test_who_says_where_to_run_is_not_in_the_allocation(launchpad: Launchpad, words: list[object]) -> None:
    in_allocation(launchpad, "exit 1")
    done = launchpad.run("run", *words, "echo", "here")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] here\n", "")


def test_several_addresses_of_the_head_are_tried(launchpad: Launchpad) -> None:
    port = free_port()
    common = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j")
    head = launchpad.start("run", *common, "echo", "here")
    places = f"no-such-host.invalid:1,127.0.0.1:{free_port()},[::1]:1,127.0.0.1:{port}"
    assert launchpad.run("join", places, "--rdzv-id=j").returncode == 0
    out, _ = head.communicate(timeout=DEADLINE)
    assert out.count(b"here") == 2


# --stop-before.


def test_the_job_is_stopped_before_the_allocation_ends(launchpad: Launchpad) -> None:
    launchpad.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 3602)
    done = launchpad.run("run", "--stop-before", "1h", "-n", 2, "exits.py", "wait", "wait")
    assert done.returncode == 143
    assert "launchpad: the job was stopped: the allocation is about to end (--stop-before)\n" in done.stderr
    assert "the allocation is about to end" in launchpad.run("why").stdout


def test_a_job_that_is_over_in_time(launchpad: Launchpad) -> None:
    launchpad.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 3600)
    done = launchpad.run("run", "--stop-before", "300", "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_when_the_end_is_not_known(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--stop-before", "5m", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("launchpad: error: --stop-before needs to know when the allocation ends, and ")
    assert done.stderr.count("\n") == 1


# A cluster.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), 2) as running:
        yield running


@pytest.fixture
def slurm(cluster: Slurm, launchpad: Launchpad) -> Iterator[Slurm]:
    """The cluster, with nothing of the test left on it afterwards."""
    (launchpad.folder / "show.py").write_text(SHOW)
    (launchpad.folder / "waits.py").write_text(WAITS)
    yield cluster
    if not cluster.is_idle():
        cluster.ask("scancel", "--user", str(os.getuid()))
        wait_until(cluster.is_idle, "the cluster to be idle", lambda: cluster.ask("squeue"))


SHOW = "import os, sys\nprint(*(os.environ.get(name, '-') for name in sys.argv[1:]))\n"

# Says which signals it gets; TERM ends it.
WAITS = (
    "import os, signal, sys\n"
    "def on(signum, _):\n    os.write(1, b'got %d\\n' % signum)\n    if signum == 15: sys.exit(0)\n"
    "for signum in (15, 10): signal.signal(signum, on)\n"
    "print('ready', flush=True)\nwhile True: signal.pause()\n"
)

# Says which signals it gets, and ends when the test says so.
HEEDS = (
    "import os, signal, time\n"
    "for signum in (15, 10): signal.signal(signum, lambda signum, _: os.write(1, b'got %d\\n' % signum))\n"
    "print('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
)


# Says in a world of how many ranks it is, and ends when the test says so.
STAYS = (
    "import os, time\nfrom os import environ as e\n"
    "print(e['SLURMD_NODENAME'], e['RANK'], 'of', e['WORLD_SIZE'], flush=True)\n"
    "while not os.path.exists('go'): time.sleep(0.01)\n"
)


@needs_slurm
def test_all_nodes_of_an_allocation(slurm: Slurm, launchpad: Launchpad) -> None:
    """With as many ranks as tasks; rank 0 on the first node; what srun knows, and the secret is not passed on."""
    names = "RANK LOCAL_RANK WORLD_SIZE SLURMD_NODENAME SLURM_NODEID SLURM_CPUS_PER_TASK LAUNCHPAD_SECRET".split()
    launchpad.environ["LAUNCHPAD_SECRET"] = "mine"
    done = slurm.salloc(launchpad, ["-N2", "-n3", "-c1"], "run", "show.py", *names)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "launchpad: using the 2 nodes of this Slurm allocation: c1:2, c2:1\n"
    assert sorted(done.stdout.splitlines()) == [
        "[c1 0] 0 0 3 c1 0 1 -",
        "[c1 1] 1 1 3 c1 0 1 -",
        "[c2 2] 2 0 3 c2 1 1 -",
    ]


@needs_slurm
def test_input_reaches_rank_0_and_a_plan_can_be_shown(slurm: Slurm, launchpad: Launchpad) -> None:
    done = slurm.salloc(launchpad, ["-N2"], "run", "-q", "sh", "-c", "read x; echo $x", input="hello\n")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[c1 0] hello", "[c2 1] "])
    done = slurm.salloc(launchpad, ["-N2"], "run", "-n2", "--exclude=c1", "--dry-run", "--json", "show.py")
    assert done.stderr == "launchpad: using 1 of the 2 nodes of this Slurm allocation: c2:2\n"
    assert [(node["name"], len(node["ranks"])) for node in json.loads(done.stdout)["nodes"]] == [("c2", 2)]


@needs_slurm
@needs_torch
def test_a_batch_job(slurm: Slurm, launchpad: Launchpad) -> None:
    """Its head is on the first node, and its own ranks are too."""
    job = slurm.sbatch(launchpad, ["-N2", "--ntasks-per-node=1"], f"launchpad run --nproc 2 {EXAMPLE}")
    code, out = job.end()
    assert code == 0, out
    assert "using the 2 nodes of this Slurm allocation: c1:2, c2:2\n" in out
    assert out.count("of 4: the sum of all ranks is [6.0, 6.0, 6.0]") == 4


@needs_slurm
def test_a_batch_job_of_one_node_needs_no_srun(slurm: Slurm, launchpad: Launchpad) -> None:
    job = slurm.sbatch(launchpad, ["-N1", "-n2"], "launchpad run show.py RANK SLURM_STEP_ID")
    code, out = job.end()
    said, *shown = out.splitlines()
    assert (code, said) == (0, "launchpad: using the node of this Slurm allocation: c1:2")
    assert sorted(shown) == ["[0] 0 -", "[1] 1 -"]


@needs_slurm
def test_launchpad_under_srun_is_told_the_right_line(slurm: Slurm, launchpad: Launchpad) -> None:
    job = slurm.sbatch(
        launchpad, ["-N2"], f"srun -n4 --overcommit {shlex.join(launchpad.argv('run', 'show.py', 'a b'))}"
    )
    code, out = job.end()
    assert code == 2
    assert "error: srun has started 4 launchpads" in out
    assert ": launchpad run --nproc 2 " in out
    assert "show.py 'a b' (or start one on each node" in out


@needs_slurm
@needs_torch
def test_torchs_own_recipe(slurm: Slurm, launchpad: Launchpad) -> None:
    """https://docs.pytorch.org/tutorials/: sbatch_run.sh, with launchpad instead of torchrun."""
    command = " ".join(launchpad.argv("run"))
    job = slurm.sbatch(
        launchpad,
        ["-N2"],
        "nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )\nnodes_array=($nodes)\n"
        "head_node=${nodes_array[0]}\n"
        'head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address | cut -d" " -f1)\n'
        f"srun --ntasks-per-node=1 {command} --nnodes 2 --nproc-per-node 2 --rdzv-id $RANDOM --rdzv-backend c10d "
        f"--rdzv-endpoint $head_node_ip:{free_port()} {EXAMPLE}",
    )
    code, out = job.end()
    assert code == 0, out
    assert out.count("of 4: the sum of all ranks is [6.0, 6.0, 6.0]") == 4


# Its end.


@needs_slurm
def test_a_rank_that_fails(slurm: Slurm, launchpad: Launchpad) -> None:
    done = slurm.salloc(launchpad, ["-N2"], "run", "-q", "exits.py", "wait", "7")
    assert done.returncode == 7
    assert "launchpad: rank 1 on c2 failed first: exit code 7" in done.stderr


@needs_slurm
@pytest.mark.parametrize("how", ["", "--preload json"], ids=["executed", "forked"])
def test_scancel(slurm: Slurm, launchpad: Launchpad, how: str) -> None:
    """A signal to all processes of the job's steps, and then the job is cancelled."""
    # If all exits came before launchpad has got the signal, the job would have gone well.
    (launchpad.folder / "waits.py").write_text(HEEDS)
    job = slurm.sbatch(launchpad, ["-N2"], f"launchpad run -n 2 {how} waits.py")
    job.await_output("ready", 4)
    job.signal("--signal=USR1")
    job.await_output("got 10", 4)
    job.signal()
    job.await_output("launchpad: sent SIGTERM to ranks 0-3")
    told = re.compile(r"^\[.*\] got 15$", re.MULTILINE)  # Slurm signals the ranks too
    wait_until(lambda: len({*told.findall(job.output)}) == 4, "all ranks to be told", lambda: job.output)
    (launchpad.folder / "go").touch()
    code, out = job.end()
    assert code == 143, out
    assert "launchpad: the job was stopped by SIGTERM\n" in out


@needs_slurm
def test_a_signal_to_the_batch_script_reaches_all_ranks(slurm: Slurm, launchpad: Launchpad) -> None:
    """What --signal=B:USR1@60 sends."""
    script = "trap 'kill -USR1 $!' USR1\nlaunchpad run -q waits.py &\nwait; wait $!"
    job = slurm.sbatch(launchpad, ["-N2"], script.replace("launchpad run", f"{' '.join(launchpad.argv('run'))}"))
    job.await_output("ready", 2)
    job.signal("--batch", "--signal=USR1")
    job.await_output("got 10", 2)
    assert job.output.count("got 10") == 2
    job.signal()
    assert job.end()[0] == 143


@needs_slurm
def test_a_requeued_job_starts_again(slurm: Slurm, launchpad: Launchpad) -> None:
    script = 'if [ -n "$SLURM_RESTART_COUNT" ]; then launchpad run -q echo again; else launchpad run -q waits.py; fi'
    job = slurm.sbatch(launchpad, ["-N2", "--requeue"], script)
    job.await_output("ready", 2)
    slurm.ask("scontrol", "requeue", job.number)
    job.await_output("again", 2)
    job.await_output("code 0")


def sruns(launchpad: Launchpad) -> list[int]:
    """The sruns of this test. Each has a helper that it has forked, which comes after it."""
    found = []
    for word in launchpad.survivors():
        pid, _, words = word.partition(" ")
        if words.startswith("srun --nodes="):
            found.append(int(pid))
    return sorted(found, key=lambda pid: psutil.Process(pid).ppid() in found)


def relays(launchpad: Launchpad) -> dict[str, int]:
    """By node, the `launchpad join` of this test there."""
    found = {}
    for word in launchpad.survivors():
        pid, _, words = word.partition(" ")
        if " -m launchpad join " in words and not words.startswith("srun"):
            with contextlib.suppress(OSError, StopIteration):  # it is about to end
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                name = next(one for one in environ if one.startswith(b"SLURMD_NODENAME="))
                found[name.partition(b"=")[2].decode()] = int(pid)
    return found


@needs_slurm
def test_the_head_is_killed(slurm: Slurm, launchpad: Launchpad) -> None:
    """The nodes see that it is gone, and leave nothing."""
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run -q waits.py")
    job.await_output("ready", 2)
    (head,) = (line.split()[0] for line in launchpad.survivors() if " -m launchpad run " in line)
    os.kill(int(head), signal.SIGKILL)
    assert job.end()[0] == 137
    wait_until(slurm.is_idle, "the step to end", launchpad.survivors)


def first_launchpad(launchpad: Launchpad, output: str) -> int:
    """The one that was started on the node that is the first of the job by now: it leads."""
    node = re.findall(r"(\S+) 0 of \d", output)[-1]
    of_node = f"SLURMD_NODENAME={node}".encode()
    words = [word for word in launchpad.survivors() if " -m launchpad run --nnodes" in word]
    pids = [pid for pid, _, rest in (word.partition(" ") for word in words) if not rest.startswith("srun")]
    return min(int(pid) for pid in pids if of_node in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


@needs_slurm
def test_a_node_leads_after_another_under_srun(launchpad: Launchpad, tmp_path: Path) -> None:
    """A launchpad on each of three nodes: the one that leads is killed, and the next one is told to leave."""
    (launchpad.folder / "stays.py").write_text(STAYS)
    command, port = " ".join(launchpad.argv("run")), free_port()
    with Slurm(tmp_path / "slurm", 3) as slurm:
        job = slurm.sbatch(
            launchpad,
            ["-N3"],
            f"srun --ntasks-per-node=1 {command} --nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} "
            "--rdzv-id j --rdzv-conf last_call_timeout=60 stays.py",
        )
        job.await_output("of 3", 3)
        os.kill(first_launchpad(launchpad, job.output), signal.SIGKILL)
        job.await_output("of 2", 2)
        os.kill(first_launchpad(launchpad, job.output), signal.SIGTERM)
        job.await_output("of 1")
        (launchpad.folder / "go").touch()
        code, out = job.end()
        assert "has left the job, which it led; it goes on without it" in out
        assert code in (137, 143), "of one of its tasks"
        wait_until(slurm.is_idle, "the step to end", launchpad.survivors)


@needs_slurm
def test_srun_is_killed(slurm: Slurm, launchpad: Launchpad) -> None:
    """Slurm cancels the step: first with TERM, or at once with KILL, of a rank before its node's launchpad or after."""
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run -q waits.py")
    job.await_output("ready", 2)
    os.kill(sruns(launchpad)[0], signal.SIGKILL)
    code, out = job.end()
    assert code in (143, 137, 4), out
    wait_until(lambda: not launchpad.survivors(), "all processes to be gone", launchpad.survivors)
    empty(launchpad.scratch)


def empty(folder: Path) -> None:
    """Remove what a guard that was killed could not."""
    for left in folder.glob("launchpad-*"):
        shutil.rmtree(left)


@needs_slurm
def test_a_slurmd_is_killed(slurm: Slurm, launchpad: Launchpad) -> None:
    """The job does not notice."""
    (launchpad.folder / "until.py").write_text(
        "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    )
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run -q until.py")
    job.await_output("ready", 2)
    slurm.kill_slurmd("c2")
    slurm.start_slurmd("c2")
    (launchpad.folder / "go").touch()
    assert job.end()[0] == 0


@needs_slurm
def test_a_node_that_falls_silent_is_lost_and_nothing_is_left(slurm: Slurm, launchpad: Launchpad) -> None:
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run -q --heartbeat-timeout 4 waits.py")
    job.await_output("ready", 2)
    os.kill(relays(launchpad)["c2"], signal.SIGSTOP)
    code, out = job.end()
    assert code == 4, out
    assert "launchpad: c2 was lost: no heartbeat for 4 s" in out
    # If Slurm kills agent and guard at once, before the agent misses its head, the next guard removes their folder.
    wait_until(lambda: not launchpad.survivors(), "all to be gone", show=launchpad.survivors)
    assert launchpad.run("run", "true").returncode == 0


@needs_slurm
def test_a_lost_node_is_started_again(slurm: Slurm, launchpad: Launchpad) -> None:
    (launchpad.folder / "once.py").write_text(
        "import os, signal\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt, flush=True)\n"
        "if attempt == '0': signal.pause()\n"
    )
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run --max-restarts 1 once.py")
    job.await_output("attempt 0", 2)
    os.kill(relays(launchpad)["c2"], signal.SIGKILL)
    code, out = job.end()
    assert code == 0, out
    assert out.count("attempt 1") == 2


@needs_slurm
def test_a_job_goes_on_with_the_nodes_that_are_left_and_with_a_spare(slurm: Slurm, launchpad: Launchpad) -> None:
    """Slurm still has the lost node, so it is started again: as one of two, or as the new spare."""
    (launchpad.folder / "size.py").write_text(
        "import os, time\nprint('size', os.environ['GROUP_WORLD_SIZE'], flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    go = launchpad.folder / "go"
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run -n 1 --nnodes 1:2 size.py")
    job.await_output("size 2", 2)
    os.kill(relays(launchpad)["c1"], signal.SIGKILL)
    job.await_output("launchpad: starting all ranks again on c2, c1")
    job.await_output("size 2", 4)
    go.touch()
    code, out = job.end()
    assert code == 0, out
    assert "launchpad: failed: c1 was lost" in out
    go.unlink()
    job = slurm.sbatch(launchpad, ["-N2"], "launchpad run -n 2 --spares 1 size.py")
    job.await_output("[c1 1] size 1")
    os.kill(relays(launchpad)["c1"], signal.SIGKILL)
    job.await_output("[c2 1] size 1")
    job.await_output("launchpad: c1 is back")
    go.touch()
    code, out = job.end()
    assert code == 0, out


@needs_slurm
def test_a_sick_node_of_the_allocation_is_left_out(launchpad: Launchpad, slurm: Slurm) -> None:
    (launchpad.folder / "check.sh").write_text('test "$SLURMD_NODENAME" != c2 || { echo no GPU; exit 3; }')
    line = "launchpad run -n 1 {} --health 'sh check.sh' echo here"
    code, out = slurm.sbatch(launchpad, ["-N2"], line.format("--spares 1")).end()
    assert code == 0, out
    assert "launchpad: c2 is left out: its health check ended with exit code 3:\nlaunchpad:   no GPU\n" in out
    assert "[c1 0] here\n" in out
    code, out = slurm.sbatch(launchpad, ["-N2"], line.format("")).end()
    assert code == 3, out
    assert "launchpad: error: 1 of 2 hosts can't take part, so nothing was started:\n  c2  its health check" in out


# Machines of their own.


@needs_slurm
@needs_namespaces
def test_a_node_whose_power_is_cut(launchpad: Launchpad, tmp_path: Path) -> None:
    """The heartbeat says so long before Slurm does. salloc's machine is none of the nodes."""
    (launchpad.folder / "waits.py").write_text(WAITS)
    with Network(tmp_path / "net", 2) as network, Slurm(tmp_path / "slurm", 2, network) as slurm:
        job = slurm.sbatch(launchpad, ["-N2"], "launchpad run --heartbeat-timeout 4 waits.py")
        job.await_output("ready", 2)
        network.power_off("h2")
        code, out = job.end()
        assert code == 4, out
        assert "h2 was lost: no heartbeat for 4 s" in out
    empty(launchpad.scratch)
