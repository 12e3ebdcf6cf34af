"""Where the ranks are: `launchpad stacks`, Ctrl-\\, --timeout; how stacks are read, merged, and told of."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.host import procfs
from launchpad.agent.poll import Poll
from launchpad.agent.ranks.rank import Rank
from launchpad.agent.stacks.debug_channel import DebugChannel
from launchpad.agent.stacks.dump import StackDumper, parse
from launchpad.control import client, sockets
from launchpad.diagnosis.held_sink import HeldSink
from launchpad.diagnosis.mismatch import mismatches
from launchpad.diagnosis.stack_summary import held, merged
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.protocol.commands import DumpStacks
from launchpad.protocol.events import NO_HANDLER, RanksHeld, Restarted, StackDump, StacksTaken
from launchpad.protocol.stacks import where
from launchpad.rank import exceptions, stack_server
from tests.conftest import Launchpad, wait_until
from tests.sshd import needs_sshd
from tests.test_hostile import with_mounts
from tests.test_run_hosts import Hosts

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
TEXT = """Thread 0x00007f2d17e146c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/w/tr\\xe4n.py", line 3 in worker

Current thread 0x00007f2d3784ab80 [MainThread] (most recent call first):
  File "/w/train.py", line 41 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_faulthandlers_text_is_read() -> None:
    threads = parse(TEXT, lambda path, line: f"{path} {line}")
    assert [thread["name"] for thread in threads] == ["MainThread", "0x00007f2d17e146c0"]
    assert threads[0]["frames"] == [
        ["/w/train.py", 41, "<module>", "/w/train.py 41"],
        ["<frozen runpy>", 88, "_run_code", ""],
    ]
    assert threads[1]["frames"][1] == ["/w/trän.py", 3, "worker", "/w/trän.py 3"]
    assert parse("", lambda *_: "") == []


def test_our_own_thread_is_no_thread_of_the_program() -> None:
    place = f'{stack_server.__file__}", line 170 in _answer'
    ours = f'Thread 0x00007f2d17e146c1 (most recent call first):\n  File "{place}\n\n'
    assert parse(ours + TEXT, lambda *_: "") == parse(TEXT, lambda *_: "")


def dumps(rank: int, frames: list[list[Any]], why: str = "", **collectives: Any) -> StackDump:
    threads = [{"name": "MainThread", "frames": frames}] if frames else []
    return StackDump(0, rank, 1, 100 + rank, why, threads, "S", "ep_poll", 1.0, False, 0, -1, collectives, "")


WAITS = [[C10D, 3252, "all_reduce", ""], [C10D, 83, "wrapper", ""], ["/w/train.py", 41, "main", "dist.all_reduce(t)"]]
READS = [["/w/data.py", 12, "read_batch", "queue.get()"], ["/w/train.py", 40, "main", "read_batch()"]]


def test_ranks_at_one_place_are_told_of_together_and_the_odd_one_first() -> None:
    found = [dumps(rank, READS if rank == 3 else WAITS) for rank in range(8) if rank != 6]
    found.append(dumps(6, [], "no stacks: not a Python rank, or one without hooks"))
    text = merged(StacksTaken(0, "stall", 0, False, list(range(10)), found, [9]), "/w", {})
    assert text.splitlines() == [
        "the job is hanging; where the ranks are:",
        "  rank 3 is in read_batch at data.py:12: queue.get()",
        "  rank 6 is sleeping in ep_poll (no stacks: not a Python rank, or one without hooks)",
        "  ranks 0-2, 4-5, 7 wait in all_reduce at train.py:41",
        "  rank 9 has not been started yet",
        "  nothing is known about rank 8: launchpad's agent there does not answer",
        "  rank 3:",
        "    data.py:12 in read_batch: queue.get()",
        "    train.py:40 in main: read_batch()",
        "  rank 0 (and 5 more):",
        "    torch/distributed/distributed_c10d.py:3252 in all_reduce",
        "    torch/distributed/distributed_c10d.py:83 in wrapper",
        "    train.py:41 in main: dist.all_reduce(t)",
    ]


def test_who_has_failed_and_is_not_quite_gone_holds_up_nobody() -> None:
    found = [
        dumps(0, [], "no stacks: not a Python rank, or one without hooks")._replace(state="X"),
        dumps(1, [], NO_HANDLER)._replace(state="R"),
        dumps(2, READS),
    ]
    told = held(StacksTaken(0, "failure", 0, False, [0, 1, 2], found), "/w", {})
    assert (told.ranks, told.lines) == ([2], ["rank 2 is in read_batch at data.py:12: queue.get()"])


@pytest.mark.parametrize(("why", "tells"), [("failure", True), ("stall", True), ("timeout", True), ("asked", False)])
def test_who_holds_up_the_others_is_told_unless_somebody_only_asked(why: Any, tells: bool) -> None:
    plan = Plan("id", tuple(NodePlan(node, f"h{node}", "/w", {}, (RankPlan(node, 0, (), {}),), {}) for node in (0, 1)))
    told: list[RanksHeld] = []
    sink = HeldSink(plan, told.append)
    taken = StacksTaken(7, why, 0, False, [0, 1], [dumps(0, WAITS), dumps(1, READS)])
    assert sink.on(taken) is False
    found = [(one.time, one.why, one.ranks, one.lines[0]) for one in told]
    assert found == [(7, why, [1], "rank 1 on h1 is in read_batch at data.py:12: queue.get()")] * tells
    sink.on(Restarted(8, 1, 1, 1, 1, -1, nodes=[["h0", [0]], ["h2", [1]]]))
    sink.on(taken)
    assert [one.lines[0].partition(" is ")[0] for one in told] == ["rank 1 on h1", "rank 1 on h2"] * tells


def test_nobody_is_held_up_where_nobody_waits() -> None:
    found = [
        dumps(0, [], "no stacks: not a Python rank, or one without hooks")._replace(state="R"),
        dumps(1, [], NO_HANDLER)._replace(state="R"),
    ]
    assert held(StacksTaken(0, "timeout", 0, False, [0, 1], found), "/w", {}).ranks == []
    found[1] = found[1]._replace(state="S")
    assert held(StacksTaken(0, "timeout", 0, False, [0, 1], found), "/w", {}).ranks == [0]


def test_who_is_handling_an_exception_of_its_own_holds_up_the_others() -> None:
    own, lost = ({"type": kind, "message": "no", "frames": []} for kind in ("ValueError", "DistNetworkError"))
    found = [
        dumps(0, WAITS, raising=own),  # it waits nevertheless
        dumps(1, [["/w/train.py", 9, "retry", ""]], raising=lost),
        dumps(2, [["/w/train.py", 17, "upload", "put(report)"]], raising=own),
        dumps(3, READS),
    ]
    told = held(StacksTaken(0, "failure", 0, False, [0, 1, 2, 3], found), "/w", {})
    assert (told.ranks, told.raising) == ([2], own)
    assert told.lines[0] == "rank 2 is in upload at train.py:17: put(report), handling ValueError: no"
    assert told.lines[-1].startswith("rank 0 waits in all_reduce")
    told = held(StacksTaken(0, "failure", 0, False, [0, 3], [found[0], found[3]]), "/w", {})
    assert (told.ranks, told.raising) == ([3], None)


def test_what_a_rank_is_handling_is_reported() -> None:
    """Its chain too, with what it suppressed; and {} once it is handled."""
    try:
        try:
            raise KeyError("x")
        except KeyError:
            raise ValueError("no") from None
    except ValueError:
        found = exceptions.under_way(threading.get_ident())
        assert (found["type"], found["message"]) == ("ValueError", "no")
        assert found["frames"][-1][3] == 'raise ValueError("no") from None'
        assert found["hidden"]["type"] == "KeyError"
    assert exceptions.under_way(threading.get_ident()) == {}


@needs_torch
def test_what_a_program_has_caught_and_kept_is_reported() -> None:
    import torch.distributed  # noqa: F401

    kept: list[RuntimeError] = []
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        kept.append(error)
    try:
        try:
            raise RuntimeError("in its chain")
        except RuntimeError:
            raise ValueError("step 20 failed")  # noqa: B904
    except ValueError:
        found = exceptions.under_way(threading.get_ident())
    messages = [one["message"] for one in found["kept"]]
    assert "Connection closed by peer" in messages
    assert "in its chain" not in messages


def test_a_process_that_ends_or_is_gone_is_told_from_one_that_runs() -> None:
    process = subprocess.Popen(["sleep", "600"])
    wait_until(lambda: procfs.state(process.pid) == "S", "sleep to sleep")
    process.kill()
    wait_until(lambda: procfs.state(process.pid) in "XZ", "it to end")
    process.wait()
    assert procfs.state(process.pid) == "X"


def test_the_account_fits_a_screen() -> None:
    deep = [[f"/w/f{line}.py", line, "f", ""] for line in range(50)]
    found = [dumps(rank, [[f"/w/own{rank}.py", rank, "g", ""], *deep]) for rank in range(100)]
    text = merged(StacksTaken(0, "asked", 0, False, list(range(100)), found), "/w", {})
    assert len(text.splitlines()) < 50
    assert "ranks 8-99: in 92 other places" in text


@pytest.mark.parametrize(
    ("frames", "mpi", "operation", "line"),
    [
        (WAITS, False, "all_reduce", 41),
        ([["/w/t.py", 3, "f", "data = comm.recv(source=1)"]], True, "recv", 3),
        ([["/w/t.py", 3, "f", "data = socket.recv(10)"]], False, "", 3),
        (
            [[C10D, 1, "rendezvous", ""], [C10D, 2, "init_process_group", ""], ["/w/t.py", 5, "f", ""]],
            False,
            "rendezvous",
            5,
        ),
        ([["/venv/lib/python3.11/site-packages/a.py", 7, "f", ""]], False, "", 7),
        ([], False, "", 0),
    ],
)
def test_what_a_stack_waits_for(frames: list[list[Any]], mpi: bool, operation: str, line: int) -> None:
    found = where(frames, mpi)
    assert (found.waits_in, found.line) == (operation, line)


def entry(
    number: int, what: str = "all_reduce", size: int = 4, kind: str = "Float", done: bool = True
) -> dict[str, Any]:
    place = {"frames": [[C10D, 1, what], ["/w/train.py", 40 + number, "main"]], "done": done}
    return {"group": "0", "number": number, "what": what, "sizes": [[size]], "types": [kind], **place}


def progress(*ranks: list[dict[str, Any]]) -> list[str]:
    groups = {"0": ["default_pg", list(range(len(ranks)))]}
    found = mismatches([dumps(rank, [], entries=told, groups=groups) for rank, told in enumerate(ranks)], "/w")
    return [one.sentence for one in found]


def test_ranks_that_agree_are_not_told_of() -> None:
    assert progress([entry(1), entry(2, done=False)], [entry(1), entry(2, done=False)]) == []
    assert progress([], []) == []
    assert mismatches([dumps(0, WAITS)], "/w") == []


def test_who_never_entered_is_named() -> None:
    there = [entry(1), entry(2, done=False)]
    assert progress(there, [entry(1)], there) == [
        "group default_pg: rank 1 has not entered collective 2, all_reduce of 4 float32 at train.py:42, "
        "which ranks 0, 2 have"
    ]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (entry(2, "broadcast", done=False), "broadcast of 4 float32"),
        (entry(2, size=8, done=False), "all_reduce of 8 float32"),
        (entry(2, kind="Double", done=False), "all_reduce of 4 float64"),
    ],
)
def test_who_entered_another_operation_is_named(odd: dict[str, Any], words: str) -> None:
    there = [entry(1), entry(2, done=False)]
    assert progress(there, [entry(1), odd], there) == [
        f"group default_pg: collective 2 is not the same on all ranks: rank 1 has entered {words} at train.py:42; "
        "ranks 0, 2 have entered all_reduce of 4 float32 at train.py:42"
    ]


# With real ranks.


def begun(launchpad: Launchpad, *words: object) -> subprocess.Popen[bytes]:
    """A job whose ranks wait for the file `go`, and that can be asked."""
    process = launchpad.start("run", *words)
    assert process.stdout is not None
    for _ in range(2):
        assert b"ready" in process.stdout.readline()
    wait_until(lambda: list(launchpad.state.glob("launchpad/running/*@*")), "the job to take questions")
    return process


def ended(launchpad: Launchpad, process: subprocess.Popen[bytes]) -> str:
    (launchpad.folder / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.count(b"done")) == (0, 2), err
    assert not list(launchpad.state.glob("launchpad/running/*@*"))
    return err.decode()


PLACES = r"where the ranks are:\n.*rank 0 is in step at .*held_up.py:\d+: .*\n.*rank 1 is in read_batch at .*held_up.py"


@pytest.mark.parametrize("way", [("--start-method", "exec"), ("--preload", "json")], ids=["executed", "forked"])
def test_another_terminal_asks_and_the_job_goes_on(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    process = begun(launchpad, "-n", 2, "--log-dir", "logs", *way, "held_up.py", "go", "gil")
    (socket,) = launchpad.state.glob("launchpad/running/*@*")
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    for words in ((), (socket.name[:5],), (socket.name.partition("@")[0], "--full")):
        done = launchpad.run("stacks", *words)
        assert done.returncode == 0, done.stderr
        assert re.search(PLACES, done.stdout), done.stdout
    assert "thread" in done.stdout
    process.send_signal(signal.SIGQUIT)
    wait_until(lambda: list(launchpad.folder.glob("logs/*/stacks_1.txt")), "the file of all stacks")
    err = ended(launchpad, process)
    assert re.search(PLACES.replace("\\n", "\\nlaunchpad:"), err), err
    (path,) = launchpad.folder.glob("logs/*/stacks_1.txt")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "all stacks: " in err
    done = launchpad.run("stacks")
    assert (done.returncode, done.stdout) == (2, "")
    assert "you have no running job on" in done.stderr


def test_with_a_watch_kept_the_stacks_come_without_a_signal(launchpad: Launchpad) -> None:
    process = begun(launchpad, "-n", 2, "--stall-timeout", 600, "held_up.py", "go")
    assert re.search(PLACES, launchpad.run("stacks").stdout)
    ended(launchpad, process)


def test_a_stopped_rank_is_not_asked(launchpad: Launchpad) -> None:
    """It could answer only once it is continued; then it is not to meet old questions."""
    (launchpad.folder / "wait.py").write_text(
        "import os, time\nprint('ready', os.getpid(), flush=True)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\nprint('done')\n"
    )
    process = launchpad.start("run", "-n", 2, "wait.py")
    assert process.stdout is not None
    ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    wait_until(lambda: list(launchpad.state.glob("launchpad/running/*@*")), "the job to take questions")
    os.kill(ranks[1], signal.SIGSTOP)
    wait_until(lambda: procfs.state(ranks[1]) == "T", "the rank to be stopped")
    done = launchpad.run("stacks")
    assert "is stopped by a signal in do_signal_stop (it did not answer)" in done.stdout, done.stdout
    status = procfs.status(ranks[1])
    os.kill(ranks[1], signal.SIGCONT)
    assert not procfs.has_signal(status, "ShdPnd", stack_server.signal_number())
    ended(launchpad, process)


def test_a_program_without_a_handler_is_never_signalled(launchpad: Launchpad) -> None:
    script = "echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done"
    process = begun(launchpad, "-n", 2, "sh", "-c", script)
    says = r"ranks 0-1 are sleeping.*\(no stacks: not a Python rank, or one without hooks\)"
    # Now and then one of them looks for the file just then.
    wait_until(lambda: re.search(says, launchpad.run("stacks").stdout), "both to be found asleep")
    ended(launchpad, process)


def test_a_socket_that_a_killed_launchpad_left_is_passed_over(launchpad: Launchpad) -> None:
    process = begun(launchpad, "-n", 2, "held_up.py", "go")
    process.kill()
    process.wait()
    assert launchpad.run("stacks").returncode == 2
    assert not list(launchpad.state.glob("launchpad/running/*@*"))


def test_a_socket_of_another_container_is_left_alone(launchpad: Launchpad) -> None:
    """It has our hostname and home; nobody here can see whether its launchpad lives."""
    process = begun(launchpad, "-n", 2, "held_up.py", "go")
    (left,) = launchpad.state.glob("launchpad/running/*@*")
    process.kill()
    process.wait()
    elsewhere = [*with_mounts(launchpad, "true"), "unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*elsewhere, *launchpad.argv("stacks")],
        env=launchpad.environ,
        cwd=launchpad.folder,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert left.exists()
    again = begun(launchpad, "-n", 2, "held_up.py", "go")
    assert left.exists()
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job to take questions")
    assert not left.exists()
    ended(launchpad, again)


class Dumps(list[Any]):
    """What the agent would send to the head."""

    say = list.append


def test_the_stacks_of_a_rank_that_is_exiting_do_not_overtake_its_exit(tmp_path: Path) -> None:
    """Else the head has all answers, and stops the job before it hears that this rank failed by itself."""
    process = subprocess.Popen(["false"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie until it is waited for
    poll, said = Poll(), Dumps()
    channel = DebugChannel(poll, str(tmp_path))
    dumper = StackDumper(poll, said, channel)
    dumper.begin(DumpStacks(1, True, True, False), [Rank(0, process.pid, None)])
    assert dumper.deadline is not None
    dumper.tick(dumper.deadline)
    assert said == []
    dumper.tick(float("inf"))
    assert [one.rank for one in said] == [0]
    channel.close()
    poll.close()
    process.wait()


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_job_that_does_not_answer_is_said_to(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launchpad is suspended, or ends before it takes the connection."""
    near, far = socket.socketpair()
    monkeypatch.setattr(client, "_call", lambda _: near)
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.1)
    with far:
        if hangs_up:
            far.close()
            assert client.ask("", "sample") == ""
        else:
            with pytest.raises(client.NoAnswer, match="may be suspended"):
                client.ask("", "sample")


def test_only_what_is_certainly_gone_is() -> None:
    process = subprocess.Popen(["sleep", "600"])
    here = sockets.here()
    start = sockets.start_of(process.pid)
    name = ".".join((*here, str(process.pid), "{}"))
    assert not sockets.is_gone(name.format(start))
    assert sockets.is_gone(name.format(int(start) - 1))  # its number was another's before
    process.kill()
    process.wait()
    assert sockets.is_gone(name.format(start))
    for unsure in (
        *("", "node1", "node1.example.org", f"..{process.pid}.{start}", f"{'0' * 32}.{here[1]}.{process.pid}.{start}"),
        *(
            f"{here[0]}.1.{process.pid}.{start}",
            f"{here[0]}.{here[1]}.x.{start}",
            f"{here[0]}.{here[1]}.{process.pid}.",
        ),
    ):
        assert not sockets.is_gone(unsure)


def spying(launchpad: Launchpad, does: str) -> subprocess.Popen[bytes]:
    """A job on a node whose py-spy does this."""
    (launchpad.folder / "bin").mkdir()
    fake = launchpad.folder / "bin" / "py-spy"
    fake.write_text(f"#!/bin/sh\n{does}\n")
    fake.chmod(0o755)
    launchpad.environ["PATH"] = f"{fake.parent}:{launchpad.environ['PATH']}"
    return begun(launchpad, "-n", 2, "held_up.py", "go")


def test_native_frames_are_those_of_each_rank(launchpad: Launchpad) -> None:
    process = spying(launchpad, 'echo "$@"; cat /proc/$4/environ | tr "\\0" "\\n" | grep ^RANK=; exit 1')
    told = launchpad.run("stacks", "--native", "--full").stdout
    for rank in range(2):
        assert re.search(
            rf"rank {rank}, pid (\d+):(.*\n)*?  by py-spy:\n    dump --native --pid \1\n    RANK={rank}", told
        )
    ended(launchpad, process)


def test_native_frames_that_do_not_come_are_not_waited_for(launchpad: Launchpad) -> None:
    process = spying(launchpad, "exec sleep 600")
    told = launchpad.run("stacks", "--native", "--full").stdout
    assert told.count("py-spy did not finish within 6 s") == 2, told
    wait_until(lambda: not [one for one in launchpad.survivors() if one.endswith(" sleep 600 ")], "py-spy to be gone")
    ended(launchpad, process)


def test_a_py_spy_that_outlives_the_ranks_is_nobodys_orphan(launchpad: Launchpad) -> None:
    process = spying(launchpad, "touch spying; exec sleep 600")
    asking = launchpad.start("stacks", "--native")
    wait_until(lambda: (launchpad.folder / "spying").exists(), "py-spy to be at work")
    err = ended(launchpad, process)
    assert "left behind" not in err
    asking.communicate(timeout=60)


@needs_torch
@pytest.mark.usefixtures("from_image")
def test_torchs_lazy_modules_are_not_imported_by_a_look(launchpad: Launchpad) -> None:
    """Torch's recorder asks for torch._inductor, which would import itself: seconds, and a folder."""
    (launchpad.folder / "t.py").write_text(
        "import sys, time, os\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "before = set(sys.modules)\n"
        "dist.barrier()\nprint('ready', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "new = {name for name in sys.modules if name.startswith('torch._')} - before\n"
        "print('done', new, '_inductor' in vars(sys.modules['torch']))\n"
    )
    process = begun(launchpad, "-n", 2, "t.py")
    assert "t.py:7" in launchpad.run("stacks").stdout
    (launchpad.folder / "go").touch()
    out, _ = process.communicate(timeout=60)
    assert out.count(b"done set() False") == 2, out


@needs_sshd
def test_ranks_on_other_hosts_are_asked_too(launchpad: Launchpad, tmp_path: Path) -> None:
    with Hosts(launchpad, tmp_path / "hosts") as hosts:
        go = launchpad.folder / "go"
        words = ("--ssh-config", hosts.ssh_config, "--hosts", "n1,n2", "held_up.py", go)
        process = begun(launchpad, *words)
        done = launchpad.run("stacks")
        assert re.search(r"rank 0 on n1 is in step at .*\n.*rank 1 on n2 is in read_batch at", done.stdout), done
        ended(launchpad, process)


FORKS = """
import os, sys, threading, warnings

def fork(what):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    print(what, file=sys.stderr)

warnings.simplefilter("always")
fork("alone")
done = threading.Event()
own = threading.Thread(target=done.wait)
own.start()
fork("with a thread")
done.set()
own.join()
while len(os.listdir("/proc/self/task")) > 2:
    pass
fork("alone again")
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="warnings of forks with threads are new in Python 3.12")
@pytest.mark.parametrize("way", ["exec", "fork"])
def test_python_warns_of_a_fork_only_because_of_the_programs_own_threads(launchpad: Launchpad, way: str) -> None:
    (launchpad.folder / "forks.py").write_text(FORKS)
    done = launchpad.run("run", "--start-method", way, "--stall-timeout", 600, "forks.py")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "pid = os.fork()" not in line]
    assert len(said) == 4
    assert said[0] == "[0] alone"
    assert "is multi-threaded" in said[1]
    assert said[2:] == ["[0] with a thread", "[0] alone again"]
