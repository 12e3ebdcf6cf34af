"""--max-restarts: all ranks start again after a failure that a restart can help, with fresh state."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.ports import free_port

pytestmark = pytest.mark.usefixtures("from_image")

# Rank 1 fails in each attempt up to the one that is given.
FLAKY = """
import os, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], "port", os.environ["MASTER_PORT"], flush=True)
open(f"up.{attempt}.{rank}", "w").close()
while rank == "1" and not all(os.path.exists(f"up.{attempt}.{r}") for r in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.005)
if rank == "1" and attempt < int(sys.argv[1]):
    sys.exit(3 + attempt)
if rank != "1" and attempt < int(sys.argv[1]):
    time.sleep(600)
"""


@pytest.fixture
def flaky(launchpad: Launchpad) -> Path:
    path = launchpad.folder / "flaky.py"
    path.write_text(FLAKY)
    return path


def test_the_whole_group_is_restarted_until_it_is_well(launchpad: Launchpad, flaky: Path) -> None:
    done = launchpad.run("run", "-n", 3, "--max-restarts", 5, "--log-dir", "logs", flaky, 2)
    assert done.returncode == 0
    seen = [re.sub(r" port \d+", "", line) for line in done.stdout.splitlines()]
    assert sorted(seen) == sorted(f"[{rank}] attempt {attempt} of 5" for attempt in range(3) for rank in range(3))
    notes = [re.sub(r"\d+\.\d+ s", "T", line) for line in done.stderr.splitlines()]
    assert notes == [
        "launchpad: failed: rank 1, exit code 3 after T; restarting all ranks (restart 1 of 5)",
        "launchpad: failed: rank 1, exit code 4 after T; restarting all ranks (restart 2 of 5)",
    ]
    files = sorted(str(path.relative_to(launchpad.folder)) for path in launchpad.folder.rglob("stdout.log"))
    assert [re.sub("logs/[^/]*/", "", name) for name in files] == [
        f"attempt_{attempt}/{rank}/stdout.log" for attempt in range(3) for rank in range(3)
    ]
    for name in files:
        assert (launchpad.folder / name).read_text().startswith(f"attempt {name.partition('attempt_')[2][0]} of 5")


def test_the_port_that_was_asked_for_is_kept(launchpad: Launchpad, flaky: Path) -> None:
    port = free_port()
    done = launchpad.run("run", "-n", 2, "--max-restarts", 1, "--master-port", port, flaky, 1)
    assert done.returncode == 0
    assert {line.rpartition(" ")[2] for line in done.stdout.splitlines()} == {str(port)}


def test_when_restarts_are_used_up_the_last_failure_counts(launchpad: Launchpad, flaky: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--max-restarts", 2, flaky, 9)
    assert done.returncode == 5
    report = done.stderr[done.stderr.index("launchpad: rank 1 failed first: exit code 5") :]
    assert re.search(
        r"launchpad: earlier attempts: rank 1, exit code 3 after .* s; rank 1, exit code 4 after .* s\n", report
    )


def test_what_an_attempt_left_behind_is_gone_before_the_next(launchpad: Launchpad) -> None:
    """A daemon of the first attempt that holds its output, and a port."""
    script = launchpad.folder / "daemon.py"
    script.write_text(
        "import os, socket, subprocess, sys, time\n"
        "listener = socket.socket()\n"
        "listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "listener.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))\n"
        "listener.listen()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    subprocess.Popen(['sleep', '600'], pass_fds=[listener.fileno()], start_new_session=True)\n"
        "    sys.exit(1)\n"
        "print('well')\n"
    )
    done = launchpad.run("run", "--max-restarts", 1, script)
    assert (done.returncode, done.stdout) == (0, "[0] well\n")
    assert "launchpad: killed 1 process that ranks left behind" in done.stderr


def test_output_of_all_attempts_comes_whole(launchpad: Launchpad) -> None:
    script = launchpad.folder / "much.py"
    script.write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "for i in range(20000): print(attempt, i)\n"
        "sys.exit(attempt != '2')\n"
    )
    done = launchpad.run("run", "--max-restarts", 2, "--restart", "always", script)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"[0] {attempt} {i}" for attempt in range(3) for i in range(20000)]


def test_ctrl_c_ends_a_job_that_would_restart(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 2, "--max-restarts", 9, "obeys.py")
    for _ in range(2):
        assert b"ready" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130


def test_file_store_left_by_an_earlier_job_is_named(launchpad: Launchpad) -> None:
    """Seen in the script, in an argument, in a variable; a new or an empty file is no sign of an earlier job."""
    store = launchpad.folder / "store"
    script = launchpad.folder / "meets.py"
    script.write_text(f"METHOD = 'file://{store}'")
    assert launchpad.run("run", script).stderr == ""
    store.touch()
    assert launchpad.run("run", script).stderr == ""
    store.write_bytes(b"init/0")
    plain = launchpad.folder / "plain.py"
    plain.touch()
    method = f"file://{store}?x=1"
    for words in ([script], [plain, "--init", method], ["-x", f"INIT={method}", plain]):
        done = launchpad.run("run", *words)
        assert done.returncode == 0
        assert done.stderr.startswith(
            f"launchpad: {store} (a file:// store) is left over from an earlier job (last wri"
        )


def test_file_store_left_by_the_attempt_before_is_named(launchpad: Launchpad) -> None:
    script = launchpad.folder / "meets.py"
    store = launchpad.folder / "store"
    script.write_text(
        f"import os, sys; open('{store}', 'a').write('x'); 'file://{store}'\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )
    done = launchpad.run("run", "--max-restarts", 1, script)
    assert done.returncode == 0
    assert done.stderr.count("is left over from an earlier job") == 1


def test_the_port_is_reserved_on_all_addresses(launchpad: Launchpad) -> None:
    """Torch listens on all of them in rank 0, so no other process may be given the port at another one."""
    (launchpad.folder / "binds.py").write_text(
        "import errno, os, socket\n"
        "try:\n    socket.socket().bind(('127.0.0.9', int(os.environ['MASTER_PORT'])))\n"
        "except OSError as error:\n    print(errno.errorcode[error.errno])\n"
    )
    done = launchpad.run("run", "binds.py")
    assert (done.returncode, done.stdout) == (0, "[0] EADDRINUSE\n")
    with socket.socket() as other:
        port = free_port()  # where nobody listens at another address either
        other.bind(("127.0.0.9", port))
        done = launchpad.run("run", "--master-port", port, "true")  # which torch in rank 0 might miss
        assert (done.returncode, done.stderr) == (0, "")


def refusals(launchpad: Launchpad, stderr: str) -> list[str]:
    """Why the job was not started again; the record says the same."""
    found = [line.removeprefix("launchpad: ") for line in stderr.splitlines() if "not restarted" in line]
    assert [line for line in launchpad.run("why").stdout.splitlines() if "not restarted" in line] == found
    told = json.loads(launchpad.run("why", "--json").stdout)
    (folder,) = (launchpad.state / "launchpad" / "jobs").iterdir()
    assert told["not_restarted"] == json.loads((folder / "verdict.json").read_text())["not_restarted"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in events if event["event"] == "NotRestarted"] == found
    assert (told["not_restarted"] or "") == "".join(found)
    return found


AGAIN = "it fails the same way each time; not restarted (--restart always would)"


@pytest.mark.parametrize(
    "program",
    [
        "import os; raise ValueError(f'no file of process {os.getpid()}')",
        "import os; print('no such device: 7', file=__import__('sys').stderr, flush=True); os._exit(9)",
        "import ctypes; ctypes.string_at(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
    ],
    ids=["exception", "exit", "crash", "abort"],
)
def test_a_job_that_fails_the_same_way_twice_is_not_started_again(launchpad: Launchpad, program: str) -> None:
    (launchpad.folder / "p.py").write_text(program)
    done = launchpad.run("run", "-n", 2, "--max-restarts", 5, "p.py")
    assert done.returncode not in (0, 2)
    assert done.stderr.count("restarting all ranks") == 1
    assert refusals(launchpad, done.stderr) == [AGAIN]


def test_a_program_that_is_no_python_is_judged_by_its_last_line(launchpad: Launchpad) -> None:
    """Another line, another failure."""
    script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && echo no disk >&2 || echo no memory >&2; exit 3"
    done = launchpad.run("run", "--max-restarts", 5, "sh", "-c", script)
    assert (done.returncode, done.stderr.count("restarting all ranks")) == (3, 2)
    assert refusals(launchpad, done.stderr) == [AGAIN]


def test_restart_always_insists(launchpad: Launchpad) -> None:
    (launchpad.folder / "p.py").write_text("import no_such_module\n")
    done = launchpad.run("run", "--max-restarts", 2, "--restart", "always", "p.py")
    assert (done.returncode, done.stderr.count("restarting all ranks")) == (1, 2)
    assert refusals(launchpad, done.stderr) == []


@pytest.mark.parametrize("signame", ["KILL", "TERM", "HUP"])
def test_a_rank_that_is_killed_is_always_worth_a_restart(launchpad: Launchpad, signame: str) -> None:
    done = launchpad.run("run", "-n", 2, "--max-restarts", 3, "sh", "-c", f"kill -{signame} $$")
    assert done.returncode == 128 + signal.Signals[f"SIG{signame}"]
    assert done.stderr.count("restarting all ranks") == 3
    assert refusals(launchpad, done.stderr) == []


def test_a_lost_node_is_always_worth_a_restart(launchpad: Launchpad) -> None:
    """The agent is killed in each attempt; without it there is no way back to this machine."""
    (launchpad.folder / "p.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)\n"
    )
    done = launchpad.run("run", "--max-restarts", 3, "p.py")
    assert done.returncode == 4
    assert refusals(launchpad, done.stderr) == []


SAVES = """
import os, pathlib
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0" and attempt < 2:
    folder = pathlib.Path(f"out/step{attempt}")
    folder.mkdir(parents=True)
    (folder / "model.pt").touch()
pathlib.Path(f"ready.{attempt}.{os.environ['RANK']}").touch()
while not all(os.path.exists(f"ready.{attempt}.{rank}") for rank in range(2)):
    pass
raise ValueError("the loss is nan")
"""


@pytest.mark.parametrize("patterns", [["out/*"], ["none/*", "out/**/*.pt"]], ids=["folders", "files"])
def test_the_same_failure_is_worth_a_restart_after_progress(launchpad: Launchpad, patterns: list[str]) -> None:
    """Files that were there before are no progress, be they ever so new."""
    (launchpad.folder / "p.py").write_text(SAVES)
    for old in ("out/old.pt", "out/older.pt"):
        (launchpad.folder / "out").mkdir(exist_ok=True)
        (launchpad.folder / old).touch()
    options = [word for pattern in patterns for word in ("--progress", pattern)]
    done = launchpad.run("run", "-n", 2, "--max-restarts", 9, *options, "p.py")
    assert (done.returncode, done.stderr.count("restarting all ranks")) == (1, 2)
    why = f"it fails the same way each time, and no file that matches {' or '.join(patterns)} is new"
    assert refusals(launchpad, done.stderr) == [f"{why}; not restarted (--restart always would)"]


def test_without_a_new_file_there_is_no_progress(launchpad: Launchpad) -> None:
    (launchpad.folder / "p.py").write_text("raise ValueError('nan')")
    (launchpad.folder / "old.pt").touch()
    done = launchpad.run("run", "--max-restarts", 9, "--progress", "*.pt", "p.py")
    assert (done.returncode, done.stderr.count("restarting all ranks")) == (1, 1)


@pytest.mark.parametrize("how", [(), ("--no-hooks",)], ids=["hooks", "no hooks"])
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import no_such_module", "an import failed at the start, and would fail every time"),
        ("from os import no_such_name", "an import failed at the start, and would fail every time"),
        ("if True\n    pass", "the program has a syntax error"),
        ("import argparse\nargparse.ArgumentParser().parse_args()", "the program rejected its arguments"),
        (
            "import sys\ntry: import no_such_module\nexcept ImportError as e: raise SystemError from e",
            "an import failed",
        ),
    ],
    ids=["module", "name", "syntax", "arguments", "cause"],
)
def test_what_no_restart_can_mend_is_not_restarted_at_all(
    launchpad: Launchpad, program: str, why: str, how: tuple[str, ...]
) -> None:
    (launchpad.folder / "p.py").write_text(program)
    done = launchpad.run("run", "-n", 4, "--max-restarts", 5, *how, "p.py", "--unknown")
    assert done.returncode == (2 if "argparse" in program else 1)
    assert "restarting" not in done.stderr
    (said,) = refusals(launchpad, done.stderr)
    assert said.startswith(why)
    assert said.endswith("; not restarted (--restart always would)")


def test_wrong_arguments_of_a_shell_script(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--max-restarts", 5, "sh", "-c", "echo 'Usage: prog FILE' >&2; exit 2")
    assert (done.returncode, len(refusals(launchpad, done.stderr))) == (2, 1)


def test_an_import_error_after_the_first_attempt_may_be_chance(launchpad: Launchpad) -> None:
    (launchpad.folder / "p.py").write_text(
        "import os, signal\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt == '0': os.kill(os.getpid(), signal.SIGKILL)\nif attempt == '1': import no_such_module\n"
    )
    done = launchpad.run("run", "--max-restarts", 5, "p.py")
    assert (done.returncode, done.stderr.count("restarting all ranks")) == (0, 2)


def test_so_many_restarts_in_a_period(launchpad: Launchpad, flaky: Path) -> None:
    done = launchpad.run("run", "-n", 2, "--max-restarts", "2/1h", flaky, 9)
    assert done.returncode == 5
    assert "attempt 2 of 2 " in done.stdout
    assert done.stderr.count("; restarting all ranks (restart ") == 2
    assert "(restart 2; at most 2 in 1h)" in done.stderr
    assert refusals(launchpad, done.stderr) == ["2 restarts in 1h are used up; not restarted"]


def test_restarts_of_long_ago_do_not_count(launchpad: Launchpad) -> None:
    """Each attempt outlasts the period."""
    (launchpad.folder / "p.py").write_text(
        "import os, sys, time\nend = time.monotonic() + 0.2\nwhile time.monotonic() < end: time.sleep(0.01)\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(0 if attempt == 4 else 3 + attempt)\n"
    )
    done = launchpad.run("run", "--max-restarts", "1/0.1s", "p.py")
    assert (done.returncode, done.stderr.count("(restart ")) == (0, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--max-restarts", "-1"],
            "--max-restarts: '-1' is not a number of restarts; give one, or one per time, like 10/1h",
        ),
        (["--max-restarts", "3/"], "--max-restarts: '' is not a time; give seconds (30), or 5m, 2h, 1d"),
        (["--max-restarts", "3/0s"], "--max-restarts: '0s' is too short; give a time above 0, like 30, 5m or 2h"),
        (["--restart", "always"], "--restart always only works with restarts; add --max-restarts N, or leave it out"),
        (["--progress", "*"], "--progress only works with restarts; add --max-restarts N, or leave it out"),
        (
            ["--max-restarts", 1, "--restart", "always", "--progress", "*"],
            "--restart always restarts with or without progress; leave it or --progress out",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(launchpad: Launchpad, words: list[object], message: str) -> None:
    done = launchpad.run("run", *words, "true")
    assert (done.returncode, done.stderr) == (2, f"launchpad: error: {message}\n")


def test_a_line_that_a_killed_rank_has_begun_is_ended_before_the_next_attempt(launchpad: Launchpad) -> None:
    script = "printf attempt; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $$; echo"
    done = launchpad.run("run", "--max-restarts", 1, "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "[0] attempt\n[0] attempt\n")
    assert launchpad.run("logs").stdout == "[0] attempt\nlaunchpad: restart 1\n[0] attempt\n"
