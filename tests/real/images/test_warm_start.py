"""The forkserver: when it is used, what it says when it can't be, restarts from it, and the store it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from launchpad.agent.host import procfs
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.needs import needs_torch
from tests.support.ports import free_port

SUM = (
    "import os, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "x = torch.ones(1); dist.all_reduce(x); print('sum', x.item(), flush=True)\n"
)

# A module that takes a while to be imported: until the test lets it go on.
SLOW = (
    "import os, time\nopen('importing', 'w').close()\n"
    "while not os.path.exists('go'): time.sleep(0.005)\n"  # polls, as a pipe would have to be inherited
)

# Where the interpreter has no PEP 669, one is made up.
MONITORED = (
    "import sys, types\nif not hasattr(sys, 'monitoring'):\n"
    "    sys.monitoring = types.SimpleNamespace(get_tool={4: 'a watcher'}.get)\n"
    "else:\n    sys.monitoring.use_tool_id(4, 'a watcher')\n"
)

# A library that, as profilers do, writes down at the end of its process what it has seen.
WATCHES = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((destructor)) static void end(void) {
    char name[100];
    if (!getenv("LOCAL_RANK")) return;
    snprintf(name, sizeof name, "seen_%s", getenv("LOCAL_RANK"));
    fclose(fopen(name, "w"));
}
"""


def parents(launchpad: Launchpad, *options: object) -> tuple[str, str]:
    """What a run shows whose ranks tell whether a module was there before they began."""
    script = launchpad.folder / "asks.py"
    script.write_text("import sys\nprint('wanted' in sys.modules)\nimport wanted\n")
    (launchpad.folder / "wanted.py").write_text("print('imported')\n")
    done = launchpad.run("run", "-n", 2, *options, script)
    assert done.returncode == 0
    return "".join(sorted(done.stdout.splitlines())), done.stderr


def test_modules_are_imported_once_and_what_they_print_is_printed_by_each(launchpad: Launchpad) -> None:
    assert parents(launchpad, "--preload", "wanted") == ("[0] True[0] imported[1] True[1] imported", "")
    for options in (["--preload", ""], ["--start-method", "exec"], ["--start-method", "spawn"], []):
        assert parents(launchpad, *options) == ("[0] False[0] imported[1] False[1] imported", "")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "started a thread"),
        ("import sys\nsys.setprofile(lambda *_: None)", "a tracer or profiler"),
        (MONITORED, "a watcher watches the interpreter (sys.monitoring)"),
        ("1 / 0", "importing odd here failed (ZeroDivisionError)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "the forkserver died"),
        ("print('x' * 100000)", "the imports print too much"),
        ("import sys\nsys.exit(3)", "importing odd here failed (SystemExit)"),
    ],
)
def test_where_forking_is_unsound_ranks_are_executed_and_it_is_said_once(
    launchpad: Launchpad, module: str, why: str
) -> None:
    (launchpad.folder / "odd.py").write_text(module)
    (launchpad.folder / "plain.py").write_text("print('here')")
    done = launchpad.run("run", "-n", 3, "--preload", "odd", "plain.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [f"[{n}] here" for n in range(3)])
    assert done.stderr.count("ranks can't be forked, so each imports everything itself") == 1
    assert why in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_a_preloaded_library_does_at_the_end_is_done(launchpad: Launchpad) -> None:
    (launchpad.folder / "watches.c").write_text(WATCHES)
    library = launchpad.folder / "libwatches.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, launchpad.folder / "watches.c"], check=True, timeout=DEADLINE
    )
    launchpad.environ["LD_PRELOAD"] = str(library)
    shown, notes = parents(launchpad, "--preload", "wanted")
    assert shown == "[0] False[0] imported[1] False[1] imported"
    assert notes.count("libwatches.so is in LD_PRELOAD") == notes.count("\n") == 1
    assert {path.name for path in launchpad.folder.glob("seen_*")} == {"seen_0", "seen_1"}
    harmless = library.rename(launchpad.folder / "libjemalloc.so.2")
    launchpad.environ["LD_PRELOAD"] = f":{harmless}: "
    assert parents(launchpad, "--preload", "wanted") == ("[0] True[0] imported[1] True[1] imported", "")


COVERAGE = [sys.executable, "-m", "coverage"]
BRANCHES = "import os, sys\nif os.environ['RANK'] == '0':\n    print('first')\nelse:\n    print('other')\n"


@pytest.mark.parametrize(
    ("end", "patches", "code"),
    [
        pytest.param("", "subprocess", 0, id="well"),
        pytest.param("sys.exit(3)\n", "subprocess", 3, id="exits"),
        pytest.param("1 / 0\n", "subprocess", 1, id="raises"),
        pytest.param("os._exit(0)\n", "subprocess, _exit", 0, id="leaves"),
        pytest.param("if os.fork() == 0: sys.exit()\nos.wait()\n", "subprocess, fork", 0, id="forks"),
    ],
)
@pytest.mark.parametrize("core", ["ctrace", "sysmon"])
def test_coverage_measures_the_ranks(launchpad: Launchpad, end: str, patches: str, code: int, core: str) -> None:
    if core == "sysmon" and sys.version_info < (3, 12):
        pytest.skip("sys.monitoring is new in Python 3.12")
    launchpad.environ["COVERAGE_CORE"] = core
    (launchpad.folder / "measured.py").write_text(BRANCHES + end)
    (launchpad.folder / "setup.ini").write_text(f"[run]\npatch = {patches}\ninclude = measured.py\n")
    ranks = 1 if code else 2  # who fails ends the others before they are measured
    command = launchpad.argv("run", "-n", ranks, "--preload", "json", "measured.py")[1:]
    options = {"env": launchpad.environ, "cwd": launchpad.folder, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([*COVERAGE, "run", "--rcfile=setup.ini", *command], **options)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("everything itself") == done.stderr.count("COVERAGE_PROCESS_CONFIG is set") == 1
    subprocess.run([*COVERAGE, "combine", "-q"], check=True, **options)
    told = json.loads(subprocess.run([*COVERAGE, "json", "-q", "-o", "-"], check=True, **options).stdout)
    (measured,) = told["files"].values()
    assert measured["missing_lines"] == ([] if ranks == 2 else [5])


def test_a_free_threaded_python_is_not_forked(launchpad: Launchpad) -> None:
    """The flag of such a build stands in for one."""
    (launchpad.folder / "sitecustomize.py").write_text("import sys\nsys.abiflags += 't'\n")
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    said = "launchpad: ranks can't be forked, so each imports everything itself: this Python is free-threaded, "
    shown, notes = parents(launchpad, "--preload", "wanted")
    assert shown == "[0] False[0] imported[1] False[1] imported"
    assert (notes.count("\n"), notes.startswith(said)) == (1, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preload", "json", "--start-method", "exec", "x.py"], "leave one of them out"),
        (["--preload", "a-b", "x.py"], "--preload a-b: not a module's name"),
        (["--preload", "json", "--no-python", "true"], "not a Python target"),
    ],
)
def test_preload_is_checked(launchpad: Launchpad, options: list[str], message: str) -> None:
    (launchpad.folder / "x.py").touch()
    done = launchpad.run("run", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_job_is_ended_while_it_imports(launchpad: Launchpad, signum: int, code: int) -> None:
    (launchpad.folder / "slow.py").write_text(SLOW)
    (launchpad.folder / "plain.py").touch()
    process = launchpad.start("run", "-n", 3, "--preload", "slow", "plain.py")
    wait_until((launchpad.folder / "importing").exists, "the import to begin")
    process.send_signal(signum)
    assert process.wait(timeout=DEADLINE) == code


def test_ctrl_z_stops_the_import_too(launchpad: Launchpad) -> None:
    (launchpad.folder / "slow.py").write_text(SLOW)
    (launchpad.folder / "plain.py").write_text("print('done')")
    process = launchpad.start("run", "-n", 2, "--preload", "slow", "plain.py")
    wait_until((launchpad.folder / "importing").exists, "the import to begin")
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "launchpad to stop")
    (launchpad.folder / "go").touch()
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out.count(b"done")) == (0, 2)


def test_a_restart_forks_from_the_same_forkserver(launchpad: Launchpad) -> None:
    (launchpad.folder / "slow.py").write_text("import os\nopen(f'imported.{os.getpid()}', 'w').close()\n")
    (launchpad.folder / "flaky.py").write_text(
        "import os, sys, slow\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '3')\n"
    )
    done = launchpad.run("run", "-n", 3, "--max-restarts", 3, "--restart", "always", "--preload", "slow", "flaky.py")
    assert done.returncode == 0
    assert "left behind" not in done.stderr
    assert len(list(launchpad.folder.glob("imported.*"))) == 1


def test_a_dead_forkserver_costs_the_next_attempt_only_time(launchpad: Launchpad) -> None:
    (launchpad.folder / "pid.py").write_text("import os\nopen('forkserver', 'w').write(str(os.getpid()))\n")
    (launchpad.folder / "flaky.py").write_text(
        "import os, signal\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(int(open('forkserver').read()), signal.SIGKILL)\n    raise SystemExit(1)\nprint('well')\n"
    )
    done = launchpad.run("run", "--max-restarts", 1, "--preload", "pid", "flaky.py")
    assert (done.returncode, done.stdout) == (0, "[0] well\n")


@needs_torch
def test_gloo_comes_up_again_after_every_restart(launchpad: Launchpad) -> None:
    (launchpad.folder / "again.py").write_text(
        SUM + "if os.environ['TORCHELASTIC_RESTART_COUNT'] != '8' and dist.get_rank() == 1: os._exit(9)\n"
        "dist.all_reduce(x)\nprint('end', x.item())\ndist.destroy_process_group()\n"
    )
    done = launchpad.run("run", "-n", 4, "--max-restarts", 8, "--restart", "always", "again.py")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "end" in line) == [f"[{n}] end 16.0" for n in range(4)]
    assert "(restart 8 of 8)" in done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_every_init_method_and_address(launchpad: Launchpad, free_ports: list[int]) -> None:
    (launchpad.folder / "meets.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "rank, size, port = int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), os.environ['MASTER_PORT']\n"
        f"own = 'tcp://127.0.0.1:{free_ports[0]}'\n"
        "file = f'file://{os.getcwd()}/{os.environ[\"TORCHELASTIC_RUN_ID\"]}'\n"
        "methods = ['env://', own, file, f'tcp://127.0.0.1:{port}', file + '2', f'tcp://localhost:{port}', None]\n"
        "for method in methods[:int(sys.argv[1])]:\n"
        "    dist.init_process_group('gloo', init_method=method, rank=rank, world_size=size)\n"
        "    x = torch.ones(1); dist.all_reduce(x); assert x.item() == size\n"
        "    dist.barrier(); dist.destroy_process_group()\n"
        "print('all')\n"
    )
    # Once per port where rank 0 hosts: torch serves a second group there from the first one's store while that is not yet
    # collected, and a fast rank finds its old keys.
    for size, options, methods in (
        (3, [], 7),
        (2, ["--start-method", "exec"], 3),
        (3, ["--master-port", free_ports[1]], 7),
        (3, ["--master-addr", "localhost"], 7),
    ):
        done = launchpad.run("run", "-n", size, *options, "meets.py", methods)
        assert (done.returncode, done.stdout.count("all\n")) == (0, size), done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_group_is_made_again_and_again(launchpad: Launchpad) -> None:
    """Each time in a fresh part of the store: a fast rank does not meet what a slow one wrote the time before."""
    (launchpad.folder / "rounds.py").write_text(
        "import torch, torch.distributed as dist\n"
        "for round in range(10):\n    dist.init_process_group('gloo'); x = torch.ones(1); dist.all_reduce(x)\n"
        "    assert x.item() == 3; dist.destroy_process_group()\nprint('ten')\n"
    )
    done = launchpad.run("run", "-n", 3, "rounds.py")
    assert (done.returncode, done.stdout.count("ten")) == (0, 3), done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_children_of_a_rank_meet(launchpad: Launchpad, free_ports: list[int]) -> None:
    """The tutorials' `mp.Process(target=init_process, …)`, with a port of their own and with the one they inherit.

    Those who inherit it come twice, and the second time find none of the first one's keys.
    """
    (launchpad.folder / "tutorial.py").write_text(
        "import os, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def init_process(rank, size, own_port):\n"
        "    if own_port: os.environ['MASTER_PORT'] = own_port\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=size)\n"
        "    x = torch.ones(1); dist.all_reduce(x); assert x.item() == size\n"
        "    dist.destroy_process_group()\n"
        "if __name__ == '__main__':\n"
        f"    for method, port in (('fork', ''), ('fork', '{free_ports[0]}'), ('fork', ''), ('spawn', '')):\n"
        "        ps = [mp.get_context(method).Process(target=init_process, args=(r, 2, port)) for r in range(2)]\n"
        "        [p.start() for p in ps]; [p.join() for p in ps]; print([p.exitcode for p in ps])\n"
    )
    done = launchpad.run("run", "tutorial.py")
    assert (done.returncode, done.stdout) == (0, "[0] [0, 0]\n" * 4), done.stderr


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_the_port_is_free_for_a_program_that_listens_there(launchpad: Launchpad) -> None:
    (launchpad.folder / "listens.py").write_text(
        "import os, torch.distributed as dist\n"
        "first = os.environ['RANK'] == '0'\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), 2, first)\n"
        "store.set(os.environ['RANK'], 'x'); store.wait(['0', '1']); print('met')\n"
        "store.add('n', 1)\n"
        "while first and store.add('n', 0) < 2: pass\n"
    )
    done = launchpad.run("run", "-n", 2, "listens.py")
    assert (done.returncode, done.stdout.count("met")) == (0, 2), done.stderr


Meeting = tuple[subprocess.Popen[bytes], psutil.Process, psutil.Process]


@pytest.fixture
def meeting(launchpad: Launchpad) -> Iterator[Meeting]:
    """A job of two ranks that have made a group and stay, its forkserver, and the process of its store."""
    (launchpad.folder / "meet.py").write_text(
        "import os, time, torch.distributed as dist\ndist.init_process_group('gloo')\nopen(str(os.getpid()), 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    process = launchpad.start("run", "-n", 2, "meet.py")
    wait_until(lambda: len([*launchpad.folder.glob("[0-9]*")]) == 2, "the ranks to meet", show=launchpad.survivors)
    ranks = {int(path.name) for path in launchpad.folder.glob("[0-9]*")}
    agent = psutil.Process(min(ranks)).parent()
    assert agent is not None
    others = [child for child in agent.children() if child.pid not in ranks]
    (store,) = [child for child in others if child.net_connections()]
    (server,) = [child for child in others if child.pid != store.pid]
    yield process, server, store
    (launchpad.folder / "go").touch()
    process.communicate(timeout=DEADLINE)


@needs_torch
@pytest.mark.parametrize("image", ["cold", "kept"])
def test_signals_to_every_process_spare_forkserver_and_store(request: pytest.FixtureRequest, image: str) -> None:
    """The ranks get them, and may save their work with the help of both."""
    if image == "kept":
        request.getfixturevalue("from_image")
    meeting: Meeting = request.getfixturevalue("meeting")
    for one in meeting[1:]:
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            assert procfs.has_signal(procfs.status(one.pid), "SigBlk", signum)


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_a_job_that_has_lost_its_store_ends(meeting: Meeting) -> None:
    """Its ranks could wait for each other as long as torch lets them."""
    process, _, store = meeting
    store.kill()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert b"launchpad: rank 0 failed first: lost torch's store: its process died" in err


def test_a_taken_port_is_an_error_before_anything_starts(launchpad: Launchpad) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (launchpad.folder / "x.py").write_text("print('started')")
        done = launchpad.run("run", "--preload", "json", "--master-port", port, "x.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--master-port {port}: pid {os.getpid()}, " in done.stderr


@needs_torch
def test_ranks_share_the_imported_image(launchpad: Launchpad) -> None:
    """Proportional set sizes: pages that are shared count for each by its share."""
    (launchpad.folder / "image.py").write_text(
        SUM + "print('up', os.getpid(), flush=True)\nimport signal; signal.pause()\n"
    )
    sizes = []
    for options in ([], ["--start-method", "exec"]):
        process = launchpad.start("run", "-n", 2, *options, "image.py")
        pids = []
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, process.communicate()
            found = re.search(rb"up (\d+)", line)
            pids += [int(found[1])] if found else []
        sizes.append(sum(psutil.Process(pid).memory_full_info().pss for pid in pids))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE)
    assert sizes[0] < sizes[1]


def test_more_ranks_than_fit_in_one_request(launchpad: Launchpad) -> None:
    (launchpad.folder / "many.py").write_text("import os\nprint('rank', os.environ['RANK'], os.getppid())\n")
    done = launchpad.run("run", "-n", 200, "--preload", "json", "many.py")
    assert done.returncode == 0
    shown = [line.split()[-2:] for line in done.stdout.splitlines()]
    assert sorted(int(rank) for rank, _ in shown) == list(range(200))
    assert len({parent for _, parent in shown}) == 1  # the agent


def test_standard_input_reaches_a_forked_rank(launchpad: Launchpad) -> None:
    (launchpad.folder / "reads.py").write_text("import sys\nprint(sys.stdin.seekable(), sys.stdin.read())\n")
    (launchpad.folder / "given").write_text("a line")
    with open(launchpad.folder / "given") as given:
        done = launchpad.run("run", "-n", 2, "--preload", "json", "reads.py", stdin=given)
    assert sorted(done.stdout.splitlines()) == ["[0] True a line", "[1] True "]


def test_no_descriptor_of_ours_is_left_in_a_long_life_of_restarts(launchpad: Launchpad) -> None:
    # The agent, which reads from the rank's two pipes, closes its copies of the other ends when the rank may run already.
    (launchpad.folder / "counts.py").write_text(
        "import os, sys, time\n"
        "def links(pid, names): return [os.readlink(f'/proc/{pid}/fd/{name}') for name in names]\n"
        "def theirs():\n    pid = os.getppid()\n"
        "    try: return links(pid, os.listdir(f'/proc/{pid}/fd'))\n"
        "    except FileNotFoundError: return theirs()\n"
        "ours, deadline = set(links('self', '12')), time.monotonic() + 30\n"
        "while sum(link in ours for link in theirs()) > 2 and time.monotonic() < deadline: time.sleep(0.01)\n"
        "print(len(theirs()))\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '12')\n"
    )
    done = launchpad.run("run", "--max-restarts", 12, "--restart", "always", "--preload", "json", "counts.py")
    counts = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(counts) == 13
    assert max(counts[2:]) <= counts[1], counts


@pytest.fixture
def free_ports() -> list[int]:
    """Two ports."""
    return [free_port(), free_port()]


def test_what_a_killed_forkserver_had_begun_to_fork_goes_on(launchpad: Launchpad) -> None:
    """It is killed by the intermediate process, before that forks the ranks."""
    (launchpad.folder / "kills.py").write_text(
        "import os, signal\nown = os.getpid()\ndef forked():\n    if os.getppid() == own:\n"
        "        os.kill(own, signal.SIGKILL)\nos.register_at_fork(after_in_child=forked)\n"
    )
    (launchpad.folder / "plain.py").write_text("import os, time\nos.write(1, b'here\\n')\ntime.sleep(0.5)\n")
    done = launchpad.run("run", "-n", 3, "--preload", "kills", "plain.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] here" for rank in range(3)]
    assert done.stderr == ""
