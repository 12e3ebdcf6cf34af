"""A person looks into a rank: at a prompt, in a debugger, with a profiler."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad.agent.ranks.prompt import waits_for_input
from launchpad.console.summary import Summary
from launchpad.head.attended import Attended
from launchpad.protocol.events import AtPrompt, JobPlanned
from tests.conftest import MARK, Launchpad, wait_until
from tests.sshd import Cluster, needs_sshd
from tests.test_terminal import Start, Terminal
from tests.test_terminal import terminal as terminal


def events(launchpad: Launchpad, kind: str) -> list[dict[str, Any]]:
    """The events of this kind in the record of the only job."""
    files = list((launchpad.state / "launchpad" / "jobs").glob("*/events.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return [event for line in lines if line.endswith("}") and (event := json.loads(line))["event"] == kind]


# Time limits that stand still.


def test_the_clock_stands_still_while_anything_waits() -> None:
    attended = Attended()
    assert attended.clock(5.0) == 5.0
    attended.begin("prompt", 10.0)
    attended.begin("debugger", 12.0)
    assert attended.clock(14.0) == 10.0
    assert not attended.end("prompt", 15.0)
    assert attended.clock(16.0) == 10.0
    assert attended.end("debugger", 18.0)
    assert attended.clock(18.0) == 10.0
    assert attended.clock(20.0) == 12.0
    assert not attended.end("debugger", 21.0)
    attended.begin("prompt", 22.0)
    assert attended.clear(25.0)
    assert attended.clock(26.0) == 15.0
    assert not attended.clear(27.0)


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


def test_whoever_is_long_at_a_prompt_is_reminded_of_torchs_time_outs() -> None:
    notes: list[str] = []
    one = Summary(notes.append, quiet=False)
    one.on(JobPlanned(0, 1.7e9, "0a1b", 1, "id", ["true"], "/work", [["h", [0, 1, 2]]], {}, 0.0, ""))
    one.on(AtPrompt(1, 2, True))
    assert one.deadline is not None
    one.on(AtPrompt(2, 2, False))
    assert one.deadline is None
    one.on(AtPrompt(3, 2, True))
    assert one.deadline is not None
    one.tick(one.deadline)
    assert one.deadline is None
    assert [note.partition(":")[0] for note in notes] == ["rank 2 has been at a prompt for 5 minutes"]


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
    one.expect("launchpad: rank 2 has the terminal; while it is at a prompt, --timeout and --stall-timeout stand still")
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


def test_ctrl_c_at_a_prompt_ends_the_job_after_its_grace(terminal: Start, launchpad: Launchpad) -> None:
    """The ladder of signals has its own times: they go on, whoever waits for input."""
    (launchpad.folder / "t.py").write_text(
        "import signal\nsignal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\ninput('name? ')\n"
    )
    one = terminal("run", "--grace", 0.3, "--timeout", 1000, "t.py", NO_COLOR="1")
    one.expect(re.escape("name? "))
    wait_until(lambda: events(launchpad, "AtPrompt"), "the prompt to be noticed")
    one.type("\x03")
    one.expect("sent SIGINT to rank 0")
    one.expect("still running: sent SIGKILL")
    assert one.end() == 130


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
