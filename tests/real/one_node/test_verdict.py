"""The verdict on real jobs: who failed first, and why."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import PROGRAMS, Launchpad
from tests.support.ends import memory_limit as memory_limit
from tests.support.mounts import run_with_mounts
from tests.support.needs import needs_ptrace

pytestmark = pytest.mark.usefixtures("from_image")

# Real jobs.


def verdict_of(launchpad: Launchpad) -> dict[str, Any]:
    """The verdict on the only job."""
    (path,) = (Path(launchpad.environ["XDG_STATE_HOME"]) / "launchpad" / "jobs").glob("*/verdict.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# Of the faults in collective programs test_gallery.py makes sure.


def test_an_excepthook_of_the_programs_own_is_heard_and_the_exception_blamed(launchpad: Launchpad) -> None:
    (launchpad.folder / "h.py").write_text(
        "import os, signal, sys\nif os.environ['RANK'] == '0': signal.pause()\n"
        "sys.excepthook = lambda *_: print('mine', file=sys.stderr)\nraise KeyError('lr')\n"
    )
    done = launchpad.run("run", "-n", 2, "h.py")
    found = verdict_of(launchpad)
    assert (done.returncode, found["how"], found["rank"], found["type"]) == (1, "exception", 1, "KeyError"), done.stderr
    assert found["line"] == 4
    assert "[1] mine\n" in done.stderr
    assert "[1] Traceback" not in done.stderr


@pytest.mark.parametrize("way", [("--start-method", "exec"), ("--preload", "json")], ids=["executed", "forked"])
def test_exceptions_are_recorded_in_every_python_rank(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    """In threads too. The program's own hooks and standard error see what they would see without launchpad."""
    (launchpad.folder / "t.py").write_text(
        "import sys, threading\n"
        "def work():\n    raise KeyError('x')\n"
        "def main():\n"
        "    t = threading.Thread(target=work, name='loader'); t.start(); t.join()\n"
        "    try:\n        {}['a']\n"
        "    except KeyError as error:\n"
        "        error.add_note('look at the config')\n"
        "        raise ValueError('no such field') from error\n"
        "main()\n"
    )
    done = launchpad.run("run", "-n", 1, *way, "t.py")
    found = verdict_of(launchpad)
    assert (found["type"], found["message"], found["line"], done.returncode) == ("ValueError", "no such field", 7, 1)
    text = "\n".join(found["text"])
    assert "KeyError: 'a'\n    look at the config\n" in text
    assert "rank 0 had already lost thread 'loader': KeyError: 'x' at " in text
    assert done.stderr.count("[0] Traceback (most recent call last):") == 3
    assert "executed.py" not in done.stderr
    assert "forkserver" not in done.stderr


@pytest.mark.parametrize("waits", ["", "child.join(); "], ids=["zombie", "waited_for"])
def test_a_child_process_that_was_killed_is_named(launchpad: Launchpad, waits: str) -> None:
    """Such as a DataLoader worker. All that the program sees is the end of the connection."""
    (launchpad.folder / "c.py").write_text(
        "import multiprocessing, os, time\n"
        "def lives(ready): ready.set(); time.sleep(600)\n"
        "def dies(pipe): os.kill(os.getpid(), 9)\n"
        "mp = multiprocessing.get_context('fork')\n"
        "ready = mp.Event()\n"
        "other = mp.Process(target=lives, args=(ready,), daemon=True); other.start(); ready.wait()\n"
        "ours, theirs = mp.Pipe()\n"
        "child = mp.Process(target=dies, args=(theirs,)); child.start(); theirs.close(); print('child', child.pid)\n"
        f"{waits}\ntry:\n    ours.recv()\nexcept EOFError as error:\n    raise RuntimeError('no data') from error\n"
    )
    done = launchpad.run("run", "-n", 1, "c.py")
    pid = done.stdout.rpartition("child ")[2].strip()
    told = f"rank 0 failed first: its child process {pid} was killed by SIGKILL: RuntimeError: no data ("
    assert verdict_of(launchpad)["text"][0].startswith(told), done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_of_a_broken_pool_is_named(launchpad: Launchpad, method: str) -> None:
    """The pool waits for its workers, and keeps their exit codes to itself."""
    (launchpad.folder / "w.py").write_text(
        "import multiprocessing, os\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "def work(x):\n    print('child', os.getpid(), flush=True)\n    os.kill(os.getpid(), 11)\n"
        "if __name__ == '__main__':\n"
        f"    with ProcessPoolExecutor(1, multiprocessing.get_context({method!r})) as pool:\n"
        "        pool.submit(work, 1).result()\n"
    )
    done = launchpad.run("run", "-n", 1, "w.py")
    pid = done.stdout.rpartition("child ")[2].strip()
    told = f"rank 0 failed first: its child process {pid} was killed by SIGSEGV: concurrent.futures.process.BrokenProc"
    assert verdict_of(launchpad)["text"][0].startswith(told), done.stderr


EATS = str(PROGRAMS / "eats_memory.py")


@pytest.mark.parametrize(
    "way",
    [
        "child = mp.Process(target=eat); child.start(); child.join(); sys.exit(f'helper: {child.exitcode}')",
        "child = mp.Process(target=eat); child.start(); child.join(); raise OSError('no tokens')",
        f"child = subprocess.Popen([sys.executable, {EATS!r}]); child.wait(); raise OSError('no tokens')",
        "ours, theirs = mp.Pipe(); mp.Process(target=eat).start(); theirs.close(); ours.recv()",
        f"subprocess.run([sys.executable, {EATS!r}], check=True)",
    ],
    ids=["exits", "joined", "command", "connection", "checked"],
)
def test_a_child_that_the_kernel_killed_for_memory_is_named(
    launchpad: Launchpad, memory_limit: object, way: str
) -> None:
    (launchpad.folder / "h.py").write_text(
        "import multiprocessing, runpy, subprocess, sys\nmp = multiprocessing.get_context('fork')\n"
        f"def eat(): runpy.run_path({EATS!r})\n{way}\n"
    )
    process = launchpad.start("run", "-n", 1, "h.py", preexec_fn=memory_limit)
    assert process.wait(timeout=60) == 1
    first = verdict_of(launchpad)["text"][0]
    assert re.match(r"rank 0 failed first: its child process \d+ was killed by the kernel's OOM killer: ", first), first


def test_a_process_that_the_kernel_killed_is_told_though_nobody_knows_which(
    launchpad: Launchpad, memory_limit: object
) -> None:
    words = ("run", "-n", 1, "--", "sh", "-c", f"{sys.executable} {EATS}; exit 5")
    assert launchpad.start(*words, preexec_fn=memory_limit).wait(timeout=60) == 5
    told = "; the kernel's OOM killer had killed another process on its host before that ("
    assert told in verdict_of(launchpad)["text"][0]


@pytest.mark.parametrize("way", [("--start-method", "exec"), ("--preload", "json")], ids=["executed", "forked"])
def test_a_missing_module_is_told_with_who_looked_for_it(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    """`python job.py` works at the prompt, where `python` is another one."""
    (launchpad.folder / "m.py").write_text(
        "try: import no_such_module\nexcept ImportError as error: raise OSError from error"
    )
    other = launchpad.folder / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to("/bin/true")
    launchpad.environ |= {"VIRTUAL_ENV": "/gone", "PATH": f"{other.parent}:{launchpad.environ['PATH']}"}
    done = launchpad.run("run", "-n", 1, *way, "m.py")
    told = "\n".join(verdict_of(launchpad)["text"])
    assert re.search(r"(?m)^    ModuleNotFoundError: .*'no_such_module'\n    It was looked for by /", told), done.stderr
    why = f"VIRTUAL_ENV /gone has no bin/python; `python` is {other}, which --python python takes"
    assert f"by {sys.executable}; {why}\n" in told


SHARES = (
    "import os, mmap\nfd = os.open('/dev/shm/it', os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 64 << 20)\n"
    "mmap.mmap(fd, 64 << 20)[:] = bytes(64 << 20)\n"
)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (SHARES, "killed by SIGBUS (Bus error); /dev/shm is full (8 MiB, 0 MiB free; docker run --shm-size gives"),
        ("open('/dev/shm/it', 'wb').write(bytes(64 << 20))", "/dev/shm is full (8 MiB, 0 MiB free; docker run"),
        (
            "raise RuntimeError('unable to allocate shared memory(shm) for file </torch_1>: No space left on device')",
            "/dev/shm has only 8 MiB (8 MiB free now; docker run --shm-size gives a container more): RuntimeError: ",
        ),
        (
            "raise RuntimeError('DataLoader worker is killed by signal: Bus error. Workers are out of shared memory')",
            "/dev/shm has only 8 MiB (8 MiB free now; docker run --shm-size gives a container more): RuntimeError: ",
        ),
        (
            "import os\nopen('disk/it', 'wb', 0).write(bytes(2 << 20))\n"
            "raise OSError(28, 'No space left on device', os.path.abspath('disk/more'))",
            "disk is full (1 MiB, 0 MiB free)",
        ),
    ],
    ids=["bus error", "no space", "too large", "of torch's", "disk"],
)
def test_a_full_file_system_is_named(launchpad: Launchpad, program: str, told: str) -> None:
    (launchpad.folder / "full.py").write_text(program)
    (launchpad.folder / "disk").mkdir()
    mounts = "mount -t tmpfs -o size=8M tmpfs /dev/shm; mount -t tmpfs -o size=1M tmpfs disk"
    done = run_with_mounts(launchpad, mounts, "run", "-n", 1, "full.py")
    assert f"rank 0 failed first: {told}" in done.stderr.replace(f"{launchpad.folder}/", ""), done.stderr


def test_a_message_with_odd_separators_stays_in_its_line(launchpad: Launchpad) -> None:
    (launchpad.folder / "odd.py").write_text("raise ValueError('bad row\\u2028in\\x85file')\n", encoding="ascii")
    done = launchpad.run("run", "-n", 1, "odd.py")
    told = [line for line in done.stderr.split("\n") if line.startswith("launchpad: rank 0 failed first: ")]
    assert (done.returncode, len(told)) == (1, 1), done.stderr
    assert "file (exit code 1, pid " in told[0]


def test_a_connection_that_another_process_closed_blames_no_child(launchpad: Launchpad) -> None:
    (launchpad.folder / "c.py").write_text(
        "import multiprocessing, os\n"
        "mp = multiprocessing.get_context('fork')\n"
        "child = mp.Process(target=os._exit, args=(3,)); child.start(); child.join()\n"
        "ours, theirs = mp.Pipe()\ntheirs.close()\nours.recv()\n"
    )
    done = launchpad.run("run", "-n", 1, "c.py")
    assert verdict_of(launchpad)["text"][0].startswith("rank 0 failed first: EOFError ("), done.stderr


@needs_ptrace
@pytest.mark.parametrize("way", ["fork", "exec"])
def test_a_rank_that_was_exiting_when_its_peer_failed_is_to_blame(launchpad: Launchpad, way: str) -> None:
    """However long its exit takes: until it is sent SIGKILL, here."""
    done = launchpad.run("run", "-n", 2, "--grace", 1.2, "--start-method", way, PROGRAMS / "exits_slowly.py")
    found = verdict_of(launchpad)
    assert (done.returncode, found["rank"], found["how"]) == (7, 0, "exit"), done.stderr
    assert [one["rank"] for one in found["victims"]] == [1]
    assert "(Connection" in done.stderr or "(BrokenPipe" in done.stderr


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_a_rank_without_its_main_thread_was_not_exiting(launchpad: Launchpad, way: str) -> None:
    done = launchpad.run("run", "-n", 2, "--start-method", way, PROGRAMS / "without_main_thread.py", "waits")
    found = verdict_of(launchpad)
    assert (done.returncode, found["rank"], found["stopped"], found["failed_too"]) == (5, 1, [0], []), done.stderr


def test_a_signal_handler_that_raises_costs_no_record(launchpad: Launchpad) -> None:
    """Torch's handler for SIGCHLD raises when a DataLoader worker has died, wherever the rank is then."""
    (launchpad.folder / "s.py").write_text(
        "import signal, sys\n"
        "def handler(*_): raise RuntimeError('a worker has died')\n"
        "signal.signal(signal.SIGUSR1, handler)\n"
        "class Note(str):\n"
        "    __str__ = lambda self: times.pop() and signal.raise_signal(signal.SIGUSR1) or 'epoch 3'\n"
        "times = [False, True]\n"
        "error = ValueError('bad batch')\nerror.__notes__ = [Note()]\n"
        "sys.excepthook = lambda *_: None\n"
        "raise error\n"
    )
    done = launchpad.run("run", "-n", 1, "s.py")
    text = "\n".join(verdict_of(launchpad)["text"])
    assert "ValueError: bad batch\n    epoch 3" in text, done.stderr


def test_threads_that_fail_for_ever_do_not_hide_the_end(launchpad: Launchpad) -> None:
    (launchpad.folder / "many.py").write_text(
        "import sys, threading\nthreading.__excepthook__ = threading.excepthook\nsys.stderr = open('/dev/null', 'w')\n"
        "def fail(): raise OSError('x' * 4000)\n"
        "for _ in range(1000):\n    t = threading.Thread(target=fail); t.start(); t.join()\n"
        "raise ValueError('the end')\n"
    )
    assert launchpad.run("run", "many.py").returncode == 1
    assert "ValueError: the end" in "\n".join(verdict_of(launchpad)["text"])


def test_a_child_that_crashed_is_not_the_rank(launchpad: Launchpad) -> None:
    """They write into one report."""
    (launchpad.folder / "survives.py").write_text(
        "import os, sys\npid = os.fork()\nif not pid: os.abort()\nos.waitpid(pid, 0)\nsys.exit(3)\n"
    )
    done = launchpad.run("run", "survives.py")
    assert (done.returncode, "crashed here" in done.stderr) == (3, False), done.stderr
    assert "sys.exit(3)" in done.stderr


def test_a_crash_in_a_file_with_another_name_than_ascii(launchpad: Launchpad) -> None:
    (launchpad.folder / "größer.py").write_text("import os\nos.abort()\n")
    done = launchpad.run("run", "größer.py")
    assert re.search(r'launchpad: +File ".*/größer\.py", line 2, in <module>\nlaunchpad: +os\.abort\(\)', done.stderr)


def test_the_users_own_faulthandler_still_works(launchpad: Launchpad) -> None:
    (launchpad.folder / "c.py").write_text("import faulthandler, os\nfaulthandler.enable()\nos.abort()\n")
    done = launchpad.run("run", "-n", 1, "c.py")
    assert "[0] Fatal Python error: Aborted" in done.stderr
    assert "launchpad:     It crashed here (most recent call last):" in done.stderr
    assert verdict_of(launchpad)["line"] == 3


def test_a_program_that_is_not_python_is_reported_by_its_last_output(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--", "sh", "-c", "test $RANK = 0 && exec sleep 600; echo no disk >&2; exit 6")
    assert re.search(r"launchpad: rank 1 failed first: exit code 6 \(pid .*\n.*launchpad:     no disk\n", done.stderr)
    assert verdict_of(launchpad)["code"] == 6


COMMANDS = """
import subprocess, sys
words = ["sh", "-c", "echo vocab.json: no such file >&2; exit 4"]
how = sys.argv[1]
options = {
    "captured": {"capture_output": True}, "merged": {"stdout": -1, "stderr": subprocess.STDOUT}, "shared": {},
    "onto_stdout": {"stderr": subprocess.STDOUT}, "nowhere": {"stderr": subprocess.DEVNULL},
}
if how == "file":
    with open("tok.log", "w") as file:
        subprocess.run(words, check=True, stderr=file)
if how == "check_call":
    subprocess.check_call(words)
if how == "check_output":
    subprocess.check_output(words, stderr=subprocess.STDOUT)
if how == "cause":
    try:
        subprocess.run(words, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError("no tokenizer") from error
subprocess.run(words, check=True, **options[how])
"""

STREAM = "Before that, the rank's {}, to which it wrote too, ended with:"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("captured", "It wrote to stderr:"),
        ("merged", "It wrote to stdout:"),
        ("check_output", "It wrote to stdout:"),
        ("file", "It wrote to tok.log:"),
        ("shared", STREAM.format("stderr")),
        ("check_call", STREAM.format("stderr")),
        ("cause", STREAM.format("stderr")),
        ("onto_stdout", STREAM.format("stdout")),
        ("nowhere", "What it wrote to stderr was thrown away."),
    ],
)
def test_what_a_command_that_failed_wrote_last_is_quoted(launchpad: Launchpad, how: str, told: str) -> None:
    (launchpad.folder / "c.py").write_text(COMMANDS)
    done = launchpad.run("run", "-n", 1, "c.py", how)
    text = "\n".join(verdict_of(launchpad)["text"])
    quoted = "\n    vocab.json: no such file" if how != "nowhere" else ""
    assert f"returned non-zero exit status 4.\n    {told}{quoted}" in text, done.stderr
