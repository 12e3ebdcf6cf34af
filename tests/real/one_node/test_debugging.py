"""A person looks into a rank: at a prompt, in a debugger, with a profiler."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchpad.agent.ranks.prompt import waits_for_input
from tests.support.command import DEADLINE, MARK, Launchpad, wait_until
from tests.support.dap import DebugClient
from tests.support.sshd import Cluster, needs_sshd
from tests.support.terminal import Start, Terminal
from tests.support.terminal import terminal as terminal


def events(launchpad: Launchpad, kind: str) -> list[dict[str, Any]]:
    """The events of this kind in the record of the only job."""
    files = list((launchpad.state / "launchpad" / "jobs").glob("*/events.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return [event for line in lines if line.endswith("}") and (event := json.loads(line))["event"] == kind]


# Time limits that are paused.


@pytest.mark.parametrize(
    ("does", "waits"),
    [
        ("os.read(0, 1)", True),
        ("select.select([0], [], [])", True),
        ("select.select([0, 2], [], [], 1000)", True),
        ("select.select([2], [], [])", False),
        ("p = select.poll(); p.register(2, 0); p.register(0); p.poll()", True),
        ("p = select.poll(); p.register(2, 0); p.poll()", False),
        ("p = select.epoll(); p.register(0); p.poll()", True),
        ("p = select.epoll(); p.register(2, 0); p.poll()", False),
        ("time.sleep(1000)", False),
        ("os.read(os.pipe()[0], 1)", False),
        ("threading.Thread(target=os.read, args=(0, 1), daemon=True).start(); time.sleep(1000)", False),
    ],
)
def test_a_system_call_tells_who_waits_for_input(does: str, waits: bool) -> None:
    code = f"import os, select, threading, time\nos.write(1, b'.')\n{does}"
    argv = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."

        def sleeps() -> bool:
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

        wait_until(lambda: waits_for_input(process.pid) if waits else sleeps(), "it to wait")
        assert waits_for_input(process.pid) == waits
        process.kill()
    assert not waits_for_input(process.pid)


# --input-rank.


def test_another_rank_reads_standard_input(launchpad: Launchpad) -> None:
    code = "import os, sys; print(repr(sys.stdin.read()))"
    done = launchpad.run("run", "-n", 3, "--input-rank", 1, "--no-python", sys.executable, "-c", code, input="a\nb\n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] ''", r"[1] 'a\nb\n'", "[2] ''"]


def test_a_rank_that_the_job_does_not_have_is_refused(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "--input-rank", 2, "prompt.py")
    assert done.returncode == 2
    assert done.stderr == "launchpad: error: --input-rank 2: the job has no such rank; its ranks are 0 to 1\n"
    done = launchpad.run("run", "--input-rank", 1, "prompt.py")
    assert done.stderr == "launchpad: error: --input-rank 1: the job has no such rank; its only rank is 0\n"


def test_the_debugger_in_another_rank_has_the_terminal(terminal: Start) -> None:
    """Ctrl-A goes to the start of the line: that is readline."""
    one = terminal("run", "-n", 3, "--input-rank", 2, "debugged.py", "2", NO_COLOR="1")
    one.expect("launchpad: rank 2 has the terminal; while it is at a prompt, --timeout and --stall-timeout are paused")
    one.expect(re.escape("(Pdb) "))
    one.type("secret + 1\x01p \n")
    one.expect("42")
    one.expect(re.escape("(Pdb) "))
    one.type("continue\n")
    assert "done 41" in one.rest()
    assert one.end() == 0


def test_the_jobs_time_limits_stand_still_at_a_prompt(terminal: Start, launchpad: Launchpad) -> None:
    (launchpad.folder / "t.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    input('go on? ')\n"
        "    open('go on', 'w').close()\n"
        "while not os.path.exists('go on'): time.sleep(0.01)\n"
        "if os.path.exists('hang'): time.sleep(1000)\n"
    )
    limits = ("--timeout", 4, "--stall-timeout", 3)
    one = terminal("run", "-n", 2, "--input-rank", 1, *limits, "t.py", NO_COLOR="1")
    one.expect(re.escape("go on? "))
    wait_until(lambda: events(launchpad, "AtPrompt"), "the prompt to be noticed")
    start = time.monotonic()
    wait_until(lambda: time.monotonic() - start > 5, "more than both limits to pass")
    assert one.process.poll() is None
    (launchpad.folder / "hang").touch()  # from here on they count
    one.type("\n")
    one.expect("launchpad: the job was stopped: it (hung|ran longer)")
    assert one.end() == 124
    assert [(event["rank"], event["waits"]) for event in events(launchpad, "AtPrompt")] == [(1, True), (1, False)]


@pytest.mark.parametrize(
    ("way", "target"),
    [
        ("{} | cat", "ask.py"),
        ("TERM=dumb {}", "ask.py"),
        ("stty rows 0 cols 0; {}", "ask.py"),
        ("{}", "ask.sh"),
    ],
    ids=["piped", "dumb", "no size", "a child's"],
)
def test_the_time_limits_stand_still_for_whoever_can_type(
    terminal: Start, launchpad: Launchpad, way: str, target: str
) -> None:
    """The rank may have no terminal of its own; what it waits for is typed all the same."""
    (launchpad.folder / "ask.py").write_text("print('got', input('go on? '))")
    (launchpad.folder / "ask.sh").write_text(f"{sys.executable} ask.py\necho over\n")
    limits = ("--timeout", 3, "--stall-timeout", 2)
    argv = ("--no-python", "bash", target) if target == "ask.sh" else (target,)
    one = terminal("run", "-n", 1, *limits, *argv, NO_COLOR="1", shell=way)
    one.expect(re.escape("go on? "))
    wait_until(lambda: events(launchpad, "AtPrompt"), "the prompt to be noticed")
    start = time.monotonic()
    wait_until(lambda: time.monotonic() - start > 4, "more than both limits to pass")
    one.type("yes\n")
    one.expect("got yes")
    assert one.end() == 0


def interrupt(one: Terminal, launchpad: Launchpad, prompt: str) -> None:
    """Press Ctrl-C once the rank is known to be at this prompt."""
    one.expect(re.escape(prompt))
    wait_until(lambda: events(launchpad, "AtPrompt"), "the prompt to be noticed")
    one.type("\x03")
    one.expect("sent SIGINT to rank 0")


def test_ctrl_c_at_a_prompt_ends_the_job_after_its_grace(terminal: Start, launchpad: Launchpad) -> None:
    """The ladder of signals has its own times: they go on, whoever waits for input."""
    (launchpad.folder / "t.py").write_text(
        "import signal\nsignal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\ninput('name? ')\n"
    )
    one = terminal("run", "--grace", 0.3, "--timeout", 1000, "t.py", NO_COLOR="1")
    interrupt(one, launchpad, "name? ")
    one.expect("still running: sent SIGKILL")
    assert one.end() == 130


def test_ctrl_c_at_the_debuggers_prompt_ends_the_job_soon(terminal: Start, launchpad: Launchpad) -> None:
    """It takes Ctrl-C for itself, and would wait until the time for saving is over."""
    one = terminal("run", "-n", 1, "--grace", 1000, "debugged.py", NO_COLOR="1")
    interrupt(one, launchpad, "(Pdb) ")
    one.expect("rank 0 still running: sent SIGTERM")
    assert one.end() == 130


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--local-ranks-filter", "1,2"), "--local-ranks-filter hides; add 0 to it"),
        (("--redirects", "0:3"), "--redirects hides; --tee 1 shows it"),
    ],
)
def test_a_prompt_that_is_not_shown_is_told(terminal: Start, options: tuple[str, ...], remedy: str) -> None:
    one = terminal("run", "-n", 3, *options, "debugged.py", NO_COLOR="1")
    one.expect(f"launchpad: rank 0 waits at a prompt that\\s+{remedy}")
    one.type("continue\n")
    assert one.end() == 0


def test_a_breakpoint_without_standard_input_names_the_option(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 2, "debugged.py", "1")
    assert done.returncode == 1
    assert (
        "launchpad: rank 1 failed first: it has no standard input; --input-rank 1 gives it launchpad's" in done.stderr
    )


# --input-rank on another host.


class Remote(Cluster):
    """n1 and n2, whose sessions belong to the test."""

    def __init__(self, launchpad: Launchpad, folder: Path) -> None:
        environ = {MARK: launchpad.mark, "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(launchpad.scratch)}
        super().__init__(folder, 2, environ=environ)
        self.options = ("--ssh-config", self.ssh_config, "-H", "localhost:1,n1:2")


@pytest.fixture
def remote(launchpad: Launchpad, tmp_path: Path) -> Iterator[Remote]:
    """Rank 0 is here, ranks 1 and 2 are behind an sshd."""
    with Remote(launchpad, tmp_path / "ssh") as cluster:
        yield cluster


@needs_sshd
@pytest.mark.parametrize("way", ["paramiko", "openssh"])
def test_the_debugger_on_another_host_has_line_editing(
    terminal: Start, launchpad: Launchpad, remote: Remote, way: str
) -> None:
    """Its terminal is one of that host. Ours passes the keys on, and is set as before in the end."""
    shell = "stty -g; {}; stty -g; echo ok"
    words = ("run", *remote.options, "--ssh", way, "--input-rank", 2, "debugged.py", "2")
    one = terminal(*words, NO_COLOR="1", shell=shell)
    before = one.expect(r"[0-9a-f:]{40,}").group()
    one.expect("launchpad: rank 2 has the terminal")
    one.expect(re.escape("(Pdb) "))
    one.type("secret + 1\x01p \r")
    one.expect("42")
    one.expect(re.escape("(Pdb) "))
    one.type("\x10\r")  # the line before: 42 again
    one.expect("42")
    one.expect(re.escape("(Pdb) "))
    one.type("continue\r")
    one.expect("done 41")
    assert one.expect(r"[0-9a-f:]{40,}").group() == before
    one.expect("ok")
    assert one.end() == 0
    assert [event["waits"] for event in events(launchpad, "AtPrompt")[:1]] in ([True], [])


@needs_sshd
def test_a_prompt_on_another_host_echoes_what_is_typed_once(
    terminal: Start, launchpad: Launchpad, remote: Remote
) -> None:
    (launchpad.folder / "t.py").write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    print(os.isatty(0), os.isatty(1), os.isatty(2))\n"
        "    print('hello', input('name? '))\n"
        "    print('rest', sys.stdin.readlines())\n"
    )
    one = terminal("run", *remote.options, "--input-rank", 1, "t.py", NO_COLOR="1")
    one.expect("True True False")
    one.expect(re.escape("name? "))
    one.type("Adx\x7fa\r")
    match = one.expect(r"([^\n]*)\n[^\n]*hello ([^\r\n]*)")
    assert match[2] == "Ada"
    assert match[1].count("Ad") == 1
    one.type("more\r\x04")
    one.expect(re.escape(r"rest ['more\n']"))
    assert one.end() == 0


@needs_sshd
def test_the_terminal_is_ours_again_while_the_job_is_suspended(
    terminal: Start, launchpad: Launchpad, remote: Remote
) -> None:
    (launchpad.folder / "t.py").write_text("import os\nif os.environ['RANK'] == '1': print('hello', input('name? '))\n")
    shell = "set -m; {}; stty -a | grep -o '.icanon'; echo stopped; read x; echo shell got $x; fg; echo code $?"
    one = terminal("run", *remote.options, "--input-rank", 1, "t.py", NO_COLOR="1", shell=shell)
    one.expect(re.escape("name? "))
    one.type("\x1a")
    one.expect(" icanon")
    one.expect("stopped")
    one.type("words\n")
    one.expect("shell got words")
    wait_until(lambda: "-icanon" in _stty(one), "the terminal to be set for keys again")
    one.type("Ada\r")
    one.expect("hello Ada")
    one.expect("code 0")
    assert one.end() == 0


def _stty(one: Terminal) -> str:
    settings = termios.tcgetattr(one.fd)
    return "icanon" if settings[3] & termios.ICANON else "-icanon"


@needs_sshd
def test_piped_input_reaches_a_rank_on_another_host(launchpad: Launchpad, remote: Remote) -> None:
    code = "import os, sys; print(os.isatty(0), repr(sys.stdin.read()))"
    argv = ("run", *remote.options, "--input-rank", 2, "--no-python", sys.executable, "-c", code)
    done = launchpad.run(*argv, input="a\nb\n")
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("]")[2] for line in done.stdout.splitlines()) == [
        " False ''",
        " False ''",
        r" False 'a\nb\n'",
    ]


# Debuggers.

STEPS = """\
import os
import time

def double(number):
    result = 2 * number
    return result

rank = int(os.environ["RANK"])
print("begun", flush=True)
if os.path.exists("wait"):
    while not os.path.exists("go"):
        time.sleep(0.01)
print("rank", rank, "has", double(20 + rank), flush=True)
"""
FORKS = """
pid = os.fork()
if not pid:
    os._exit(double(20 + rank))
print(os.waitpid(pid, 0)[1] >> 8)
"""
RESULT = 6  # the line after that of the result


class Reader:
    """Reads what a launchpad prints."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._seen = {1: "", 2: ""}

    def expect(self, pattern: str, stream: int = 2) -> re.Match[str]:
        """Read until this appears on one of its streams."""
        file = self._process.stderr if stream == 2 else self._process.stdout
        assert file is not None
        deadline = time.monotonic() + DEADLINE
        while not (match := re.search(pattern, self._seen[stream])):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([file], [], [], left)[0], f"no {pattern!r} in {self._seen}"
            data = os.read(file.fileno(), 65536)
            assert data, f"it ended without {pattern!r}: {self._seen}"
            self._seen[stream] += data.decode()
        return match

    def end(self) -> str:
        """Wait for its end, which must be a good one; all that it has printed on stdout."""
        out, errors = self._process.communicate(timeout=DEADLINE)
        assert self._process.returncode == 0, self._seen[2] + errors.decode()
        return self._seen[1] + out.decode()


def configuration(text: str) -> dict[str, Any]:
    """The configuration for VS Code in launchpad's words."""
    lines = [line.removeprefix("launchpad: ") for line in text.splitlines()]
    found: dict[str, Any] = json.loads("\n".join(lines[lines.index("  {") : lines.index("  }") + 1]))
    return found


@pytest.fixture
def steps(launchpad: Launchpad) -> Path:
    path = launchpad.folder / "steps.py"
    path.write_text(STEPS)
    return path


def debug(port: int, script: Path, rank: int, remote: Path | None = None) -> None:
    """Stop in the function that the rank calls, look at a variable, change it, and let the rank go on."""
    mappings = [{"localRoot": str(script.parent), "remoteRoot": str(remote)}] if remote else []
    with DebugClient(port, pathMappings=mappings) as client:
        client.stop_at(script, RESULT)
        client.begin()
        (script.parent / "go").touch()
        thread, frame = client.top()
        assert (frame["name"], frame["line"], frame["source"]["path"]) == ("double", RESULT, str(script))
        assert client.variables(frame) == {"number": str(20 + rank), "result": str(40 + 2 * rank)}
        client.ask("evaluate", expression="result = 7", frameId=frame["id"], context="repl")
        client.stop_at(script)
        client.ask("continue", threadId=thread)


@pytest.mark.parametrize("way", [("--preload", "json"), ("--start-method", "exec")], ids=["forked", "executed"])
def test_a_rank_waits_for_its_debugger(launchpad: Launchpad, steps: Path, way: tuple[str, ...]) -> None:
    """The time limits are paused until it goes on."""
    limits = ("--timeout", 10, "--stall-timeout", 2)
    process = launchpad.start("run", "-n", 3, "--debug", 1, *way, *limits, "steps.py")
    reader = Reader(process)
    text = reader.expect(r"(?s)launchpad: rank 1 waits for a debugger at 127\.0\.0\.1:(\d+);.*?\nlaunchpad:   \}\n")
    port = int(text[1])
    made = configuration(text.group())
    assert made == {
        "name": "rank 1",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
    }
    start = time.monotonic()
    wait_until(lambda: time.monotonic() - start > 5, "more than the stall to pass")
    debug(port, steps, 1)
    assert sorted(line for line in reader.end().splitlines() if "has" in line) == [
        "[0] rank 0 has 40",
        "[1] rank 1 has 7",
        "[2] rank 2 has 44",
    ]


@pytest.mark.parametrize("way", [("--preload", "json"), ("--start-method", "exec")], ids=["forked", "executed"])
def test_a_rank_that_waits_for_its_debugger_can_be_stopped(
    launchpad: Launchpad, steps: Path, way: tuple[str, ...]
) -> None:
    assert steps
    process = launchpad.start("run", "-n", 2, "--debug", 1, *way, "steps.py")
    reader = Reader(process)
    reader.expect(r"rank 1 waits for a debugger at")
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 143
    assert "SIGKILL" not in reader.expect(r"(?s)the job was stopped by SIGTERM.*").string


def test_nothing_but_loopback_listens_and_no_secret_is_shown(launchpad: Launchpad, steps: Path) -> None:
    (launchpad.folder / "wait").touch()  # no rank ends while we look
    process = launchpad.start("run", "-n", 2, "--debug", 0, "steps.py")
    reader = Reader(process)
    port = int(reader.expect(r"debugger at 127\.0\.0\.1:(\d+)")[1])
    words = " ".join(launchpad.survivors())
    assert "debugpy" not in words
    assert "token" not in words
    listening = set()
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = one.net_connections("tcp")
            listening |= {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", port)}
    debug(port, steps, 0)
    reader.end()


def test_a_named_port_that_is_taken_is_refused(launchpad: Launchpad, steps: Path) -> None:  # noqa: ARG001
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launchpad.run("run", "-n", 2, "--debug", f"1:{port}", "steps.py")
    assert done.returncode == 2
    assert done.stderr == (
        f"launchpad: error: port {port} can't be used for the debugger of rank 1: Address already in use\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--debug", "x", "steps.py"), "--debug: 'x' is not a rank, or a rank and a port; write 2 or 2:5678"),
        (
            ("--debug", "1:70000", "steps.py"),
            "--debug: '1:70000' is not a rank, or a rank and a port; write 2 or 2:5678",
        ),
        (("--debug", "1", "steps.py"), "--debug 1: the job has no such rank; its only rank is 0"),
        (("--debug", "0", "--no-hooks", "steps.py"), "--debug starts the debugger by a hook in the rank; leave it or "),
        (("--debug", "0", "true"), "--debug is for Python programs, and true is not one; debug it with its own tools"),
    ],
)
def test_a_wrong_debug_option_is_one_sentence(
    launchpad: Launchpad,
    steps: Path,  # noqa: ARG001
    words: tuple[str, ...],
    sentence: str,
) -> None:
    done = launchpad.run("run", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"launchpad: error: {sentence}")
    assert done.stderr.count("\n") == 1


def test_without_debugpy_it_says_what_to_install(launchpad: Launchpad, steps: Path) -> None:  # noqa: ARG001
    """A Python that has none: a module of that name that can't be found."""
    (launchpad.folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'debugpy': raise ModuleNotFoundError('none', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
    )
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    done = launchpad.run("run", "-n", 2, "--debug", 1, "steps.py")
    assert done.returncode == 2
    sentence = f"--debug: debugpy is not installed; run {sys.executable} -m pip install debugpy"
    assert f"[1] launchpad: {sentence}\n" in done.stderr


def test_a_debugger_attaches_to_a_running_rank(launchpad: Launchpad, steps: Path) -> None:
    """Twice: the second client finds the same debugger."""
    (launchpad.folder / "wait").touch()
    process = launchpad.start("run", "-n", 3, "steps.py")
    reader = Reader(process)
    for rank in range(3):
        reader.expect(rf"\[{rank}\] begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    asked = launchpad.run("debug", 2)
    assert asked.returncode == 0, asked.stderr
    port = int(re.findall(r"^rank 2 can be debugged at 127\.0\.0\.1:(\d+); for VS Code", asked.stdout)[0])
    again = launchpad.run("debug", 2)
    assert again.stdout == asked.stdout
    with DebugClient(port) as client:
        client.begin()
        assert any(thread["name"] == "MainThread" for thread in client.ask("threads")["threads"])
    debug(port, steps, 2)
    assert sorted(line for line in reader.end().splitlines() if "has" in line) == [
        "[0] rank 0 has 40",
        "[1] rank 1 has 42",
        "[2] rank 2 has 7",
    ]


def test_a_rank_that_answers_already_imports_threading_in_its_main_thread(launchpad: Launchpad, steps: Path) -> None:
    """With --stall-timeout launchpad's thread runs from the start, in a program that may have no threads."""
    (launchpad.folder / "wait").touch()
    steps.write_text(STEPS.replace('print("begun"', "import sys; assert 'threading' not in sys.modules\nprint('begun'"))
    process = launchpad.start("run", "--stall-timeout", 100, "--start-method", "exec", "steps.py")
    reader = Reader(process)
    reader.expect("begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    asked = launchpad.run("debug", 0)
    port = int(re.findall(r"^rank 0 can be debugged at 127\.0\.0\.1:(\d+);", asked.stdout)[0])
    with DebugClient(port) as client:
        client.begin()
        client.stop_at(steps, RESULT + 1)
        (launchpad.folder / "go").touch()
        thread, _ = client.top()
        names = {one["id"]: one["name"] for one in client.ask("threads")["threads"]}
        assert names[thread] == "MainThread"
        client.ask("continue", threadId=thread)
    reader.end()


def test_a_wrong_request_for_a_debugger_is_one_sentence(launchpad: Launchpad, steps: Path) -> None:
    (launchpad.folder / "wait").touch()
    process = launchpad.start("run", "-n", 2, "--no-python", sys.executable, steps)
    reader = Reader(process)
    reader.expect("begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    for words, sentence in (
        ((), "say which rank: launchpad debug [JOB] RANK"),
        (("x",), "'x' is not a rank, or a rank and a port; write 2 or 2:5678"),
        ((7,), "rank 7 is not running; running now: ranks 0-1"),
        ((1,), "rank 1: it is not a Python rank with launchpad's hooks"),
        (("zz", 1), "you have no running job zz… on "),
    ):
        done = launchpad.run("debug", *words)
        assert done.returncode == 2
        assert done.stderr.startswith(f"launchpad: error: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1
    (launchpad.folder / "go").touch()
    reader.end()


def test_a_program_with_a_debugger_of_its_own_keeps_it(launchpad: Launchpad) -> None:
    (launchpad.folder / "t.py").write_text(
        "import debugpy, os, time\n"
        "debugpy.listen(('127.0.0.1', 0), in_process_debug_adapter=True)\n"
        "print('begun', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    process = launchpad.start("run", "t.py")
    reader = Reader(process)
    reader.expect("begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    done = launchpad.run("debug", 0)
    sentence = "rank 0: the program itself has called debugpy.listen; connect there"
    assert done.stderr == f"launchpad: error: {sentence}\n"
    (launchpad.folder / "go").touch()
    reader.end()


def test_another_user_is_not_let_in(launchpad: Launchpad, steps: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    process = launchpad.start("run", "-n", 2, "--debug", 0, "steps.py")
    reader = Reader(process)
    port = int(reader.expect(r"debugger at 127\.0\.0\.1:(\d+)")[1])
    code = (
        f"import os, socket; os.setuid(12345); s = socket.socket(); s.connect(('127.0.0.1', {port})); print(s.recv(9))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == "b''\n", done.stderr
    debug(port, steps, 0)
    reader.end()


@needs_sshd
@pytest.mark.parametrize("way", ["paramiko", "openssh"])
def test_a_rank_on_another_host_is_debugged_through_the_same_connection(
    launchpad: Launchpad, steps: Path, remote: Remote, way: str
) -> None:
    process = launchpad.start("run", *remote.options, "--ssh", way, "--debug", 2, "steps.py")
    reader = Reader(process)
    text = reader.expect(r"(?s)launchpad: rank 2 waits for a debugger at 127\.0\.0\.1:(\d+);.*?\nlaunchpad:   \}\n")
    made = configuration(text.group())
    assert made["pathMappings"] == [{"localRoot": "${workspaceFolder}", "remoteRoot": str(launchpad.folder)}]
    debug(int(text[1]), steps, 2, remote=launchpad.folder)
    assert "2] rank 2 has 7" in reader.end()


def test_a_rank_that_is_restarted_waits_again(launchpad: Launchpad, steps: Path) -> None:
    steps.write_text(STEPS + "\nif rank and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise SystemExit(3)\n")
    process = launchpad.start("run", "-n", 2, "--debug", 1, "--max-restarts", 1, "steps.py")
    reader = Reader(process)
    port = int(reader.expect(r"rank 1 waits for a debugger at 127\.0\.0\.1:(\d+)")[1])
    debug(port, steps, 1)
    reader.expect(rf"(?s)restarting all ranks.*rank 1 waits for a debugger at 127\.0\.0\.1:{port}")
    debug(port, steps, 1)
    assert reader.end().count("[1] rank 1 has 7") == 2


def test_children_of_a_debugged_rank_run_on_their_own(launchpad: Launchpad, steps: Path) -> None:
    """They have no debugger: a breakpoint doesn't stop them."""
    steps.write_text(STEPS + FORKS)
    process = launchpad.start("run", "--debug", 0, "steps.py")
    reader = Reader(process)
    port = int(reader.expect(r"debugger at 127\.0\.0\.1:(\d+)")[1])
    with DebugClient(port) as client:
        client.stop_at(steps, RESULT)
        client.begin()
        thread, _ = client.top()
        client.ask("continue", threadId=thread)
        assert "[0] 40\n" in reader.end()


def test_a_large_answer_comes_through_whole(launchpad: Launchpad, steps: Path) -> None:
    """More than what may be on the way at once, in both directions."""
    process = launchpad.start("run", "-n", 2, "--debug", 0, "steps.py")
    reader = Reader(process)
    port = int(reader.expect(r"debugger at 127\.0\.0\.1:(\d+)")[1])
    with DebugClient(port) as client:
        client.stop_at(steps, RESULT)
        client.begin()
        thread, frame = client.top()
        text = "x" * 1_000_000
        found = client.ask("evaluate", expression=f"len('{text}')", frameId=frame["id"], context="repl")
        assert found["result"] == "1000000"
        found = client.ask("evaluate", expression="'x' * 1000000", frameId=frame["id"], context="clipboard")
        assert found["result"].strip("'") == text
        client.stop_at(steps)
        client.ask("continue", threadId=thread)
    reader.end()


# Profiles.


@pytest.fixture
def watched(launchpad: Launchpad, steps: Path) -> Iterator[Reader]:
    """A job of two ranks that waits, and can be asked."""
    (launchpad.folder / "wait").touch()
    reader = Reader(launchpad.start("run", "-n", 2, "steps.py"))
    for rank in range(2):
        reader.expect(rf"\[{rank}\] begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    yield reader
    (steps.parent / "go").touch()
    reader.end()


@pytest.mark.usefixtures("watched")
def test_a_profile_has_every_rank(launchpad: Launchpad) -> None:
    done = launchpad.run("profile", "--seconds", 1, "-o", "p.json")
    if "ptrace is not permitted" in done.stderr:
        pytest.skip("ptrace is not permitted here")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{launchpad.folder}/p.json: ranks 0-1; open it in https://www.speedscope.app\n"
    made = json.loads((launchpad.folder / "p.json").read_text())
    frames = made["shared"]["frames"]
    assert not [frame for frame in frames if "/launchpad/" in frame["file"]]
    for rank, profile in enumerate(made["profiles"]):
        assert profile["name"] == f"rank {rank}"
        assert {frames[sample[0]]["name"] for sample in profile["samples"]} == {"<module>"}
    assert launchpad.run("profile", "--rank", 1, "--seconds", 1).returncode == 0
    made = json.loads((launchpad.folder / "profile.json").read_text())
    assert [profile["name"] for profile in made["profiles"]] == ["rank 1"]


def test_the_processes_below_a_rank_are_in_its_profile(launchpad: Launchpad) -> None:
    (launchpad.folder / "child.py").write_text(
        "import multiprocessing, time\n"
        "def encode():\n    print('begun', flush=True)\n    time.sleep(1000)\n"
        "child = multiprocessing.get_context('fork').Process(target=encode)\n"
        "child.start()\nchild.join()\n"
    )
    process = launchpad.start("run", "child.py")
    reader = Reader(process)
    reader.expect("begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    done = launchpad.run("profile", "--seconds", 1)
    process.terminate()
    process.wait()
    if "ptrace is not permitted" in done.stderr:
        pytest.skip("ptrace is not permitted here")
    assert done.returncode == 0, done.stderr
    made = json.loads((launchpad.folder / "profile.json").read_text())
    rank, child = made["profiles"]
    assert rank["name"] == "rank 0"
    assert re.fullmatch(r"rank 0, process \d+", child["name"])
    assert {made["shared"]["frames"][sample[-1]]["name"] for sample in child["samples"]} == {"encode"}


@pytest.mark.usefixtures("watched")
def test_a_wrong_request_for_a_profile_is_one_sentence(launchpad: Launchpad) -> None:
    for words, sentence in (
        (("--rank", 5), "rank 5 is not running; running now: ranks 0-1"),
        (("--seconds", 1000), "--seconds 1000: a rank can be watched for 300 s at most"),
        (("-o", "/nowhere/p"), "--output /nowhere/p: can't be written; name a file in a folder where you may write"),
        (("zz",), "you have no running job zz… on "),
    ):
        done = launchpad.run("profile", *words)
        assert done.returncode == 2
        assert done.stderr.startswith(f"launchpad: error: {sentence}"), done.stderr
        assert done.stderr.count("\n") == 1
    assert not (launchpad.folder / "profile.json").exists()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "Error: Permission Denied: Try running again with elevated permissions",
            "py-spy may not look into it (ptrace",
        ),
        ("Error: Failed to find python version", "py-spy saw nothing of it; it said: Error: Failed to find python"),
    ],
)
def test_a_py_spy_that_sees_nothing_is_one_sentence(
    launchpad: Launchpad, steps: Path, said: str, sentence: str
) -> None:
    tool = launchpad.folder / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    tool.chmod(0o755)
    launchpad.environ["PATH"] = f"{tool.parent}:{launchpad.environ['PATH']}"
    (launchpad.folder / "wait").touch()
    reader = Reader(launchpad.start("run", "-n", 2, "steps.py"))
    reader.expect("begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    done = launchpad.run("profile", "--seconds", 1)
    assert done.returncode == 2
    assert done.stderr.startswith(f"launchpad: error: ranks 0-1: {sentence}"), done.stderr
    (steps.parent / "go").touch()
    reader.end()


@needs_sshd
def test_ranks_of_other_hosts_are_in_the_profile(launchpad: Launchpad, steps: Path, remote: Remote) -> None:
    (launchpad.folder / "wait").touch()
    reader = Reader(launchpad.start("run", *remote.options, "steps.py"))
    for rank in range(3):
        reader.expect(rf"{rank}\] begun", stream=1)
    wait_until(lambda: launchpad.run("stacks").returncode == 0, "the job's socket")
    done = launchpad.run("profile", "--seconds", 1)
    if "ptrace is not permitted" in done.stderr:
        pytest.skip("ptrace is not permitted here")
    assert done.returncode == 0, done.stderr
    assert ": ranks 0-2; open it" in done.stdout
    (steps.parent / "go").touch()
    reader.end()
