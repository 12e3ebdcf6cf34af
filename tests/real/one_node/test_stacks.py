"""Where the ranks are: `launchpad stacks`, Ctrl-\\, --timeout."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.host import procfs
from launchpad.agent.poll import Poll
from launchpad.agent.ranks.rank import Rank
from launchpad.agent.stacks.debug_channel import DebugChannel
from launchpad.agent.stacks.dump import StackDumper
from launchpad.agent.stacks.source_lines import SourceLines
from launchpad.control import server, sockets
from launchpad.protocol.commands import DumpStacks
from launchpad.rank import stack_server
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.mounts import with_mounts
from tests.support.needs import needs_torch
from tests.support.sshd import needs_sshd


def test_a_process_that_ends_or_is_gone_is_told_from_one_that_runs() -> None:
    process = subprocess.Popen(["sleep", "600"])
    wait_until(lambda: procfs.state(process.pid) == "S", "sleep to sleep")
    process.kill()
    wait_until(lambda: procfs.state(process.pid) in "XZ", "it to end")
    process.wait()
    assert procfs.state(process.pid) == "X"


def test_a_form_feed_ends_no_source_line(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("import os\n\f\nwait = 'a\u2028b'\nwait()\n")
    sources = SourceLines(str(tmp_path))
    assert [sources.line("old.py", number) for number in (1, 3, 4)] == ["import os", "wait = 'a\u2028b'", "wait()"]


# With real ranks.


def can_be_asked(launchpad: Launchpad) -> None:
    """Wait until the job takes questions."""
    wait_until(lambda: launchpad.sockets, "the job to take questions")


def begun(launchpad: Launchpad, *words: object) -> subprocess.Popen[bytes]:
    """A job whose ranks wait for the file `go`, and that can be asked."""
    process = launchpad.start("run", *words)
    assert process.stdout is not None
    for _ in range(2):
        assert b"ready" in process.stdout.readline()
    can_be_asked(launchpad)
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
    (socket,) = launchpad.sockets
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


# Waits until somebody opens the file `go` and, while its modules are cleared, the file `again`.
CLEARED = """\
import os, sys

def wait(name, write=os.write, open_file=os.open, mode=os.O_RDONLY):
    write(1, b"ready\\n")
    open_file(name, mode)

class Connection:
    def __del__(self, wait=wait):
        wait("again")

connection = Connection()
sys.keep = sys.modules[__name__]  # cleared last
wait("go")
"""


def test_a_rank_is_asked_while_its_modules_are_cleared(launchpad: Launchpad) -> None:
    """Its thread has ended by then, as it needs modules."""
    (launchpad.folder / "program.py").write_text(CLEARED)
    for name in ("go", "again"):
        os.mkfifo(launchpad.folder / name)
    process = launchpad.start("run", "--preload", "bisect", "--stall-timeout", 600, "program.py")
    assert process.stdout is not None
    for caller, name in (("<module>", "go"), ("__del__", "again")):
        assert b"ready" in process.stdout.readline()
        can_be_asked(launchpad)
        full = launchpad.run("stacks", "--full").stdout
        assert re.search(rf"in wait: .*\n.*in {caller}: ", full), full
        (launchpad.folder / name).write_text("")
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err.decode()) == (0, "")


def test_a_stopped_rank_is_not_asked(launchpad: Launchpad) -> None:
    """It could answer only once it is continued; then it is not to meet old questions."""
    (launchpad.folder / "wait.py").write_text(
        "import os, time\nprint('ready', os.getpid(), flush=True)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\nprint('done')\n"
    )
    process = launchpad.start("run", "-n", 2, "wait.py")
    assert process.stdout is not None
    ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    can_be_asked(launchpad)
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
    (left,) = launchpad.sockets
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
    assert [[row[0] for row in one.ranks] for one in said] == [[0]]
    channel.close()
    poll.close()
    process.wait()


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


def test_launchpads_of_two_containers_with_one_pid_keep_their_sockets(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one listens just before the first one's socket gets its name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(scratch / "state"))
    names = {job: f"{job}@boot.{namespace}.7.1" for namespace, job in enumerate(("first", "second"))}
    monkeypatch.setattr(server, "own_name", names.get)
    first, second = (server.ControlServer(job, lambda _: None) for job in names)
    rename = os.rename

    def late(*paths: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        second.begin()
        rename(*paths)

    monkeypatch.setattr(os, "rename", late)
    first.begin()
    try:
        for name in names.values():
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(os.path.join(sockets.folder(), name))
    finally:
        first.close()
        second.close()
        shutil.rmtree(scratch / "state")


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
def test_torchs_lazy_modules_are_not_imported_by_a_look(launchpad: Launchpad) -> None:
    """Torch's recorder asks for torch._inductor, which would import itself: seconds, and a folder. Images have it."""
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
