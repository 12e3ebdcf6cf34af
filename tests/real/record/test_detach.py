"""Jobs that run on without a terminal: --detach, attach, wait, stop, and --notify at the end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchpad.record import job_store
from launchpad.record.console_record import segment
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.records import store_of
from tests.support.terminal import Start
from tests.support.terminal import terminal as terminal

# Goes on until it is told to: by then, others have attached.
WAITS = (
    "import os, time\n"
    "print('up', flush=True)\n"
    "while not os.path.exists('go'): time.sleep(0.01)\n"
    "print('went on', flush=True)\n"
)

Detach = Callable[..., str]


@pytest.fixture
def waits(launchpad: Launchpad) -> Iterator[None]:
    """There is waits.py. Jobs that still run at the end of the test are killed."""
    (launchpad.folder / "waits.py").write_text(WAITS)
    yield
    for row in rows(launchpad):
        if row["kind"] == "running":
            os.kill(row["pid"], signal.SIGKILL)


@pytest.fixture
def detach(launchpad: Launchpad, waits: None) -> Detach:  # noqa: ARG001
    """`launchpad run --detach ARGS`, and the job's id."""

    def start(*args: object, **options: object) -> str:
        done = launchpad.run("run", "--detach", *args, **options)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"[0-9a-f]{8}\n", done.stdout)
        return done.stdout.strip()

    return start


def rows(launchpad: Launchpad) -> list[dict]:
    return json.loads(launchpad.run("jobs", "--json").stdout)


def shown(launchpad: Launchpad, job: str, line: str) -> None:
    """Wait until the job's console has this."""
    record = Path(segment(str(store_of(launchpad) / job), 1))
    wait_until(lambda: line in record.read_text(), repr(line), show=record.read_text)


# Leaving.


def test_a_detached_job_has_left_the_terminal_and_everybodys_pipes(launchpad: Launchpad, detach: Detach) -> None:
    """`run` in here waits for the end of standard output and error."""
    (launchpad.folder / "reads.py").write_text(
        f"import sys\nprint('read', repr(sys.stdin.read()), flush=True)\n{WAITS}"
    )
    job = detach("-n", 2, "reads.py")
    (row,) = rows(launchpad)
    assert (row["job"], row["kind"]) == (job, "running")
    assert os.getsid(row["pid"]) == row["pid"] != os.getsid(0)
    (launchpad.folder / "go").touch()
    done = launchpad.run("attach", job)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("read ''\n") == 2
    assert done.stdout.count("went on\n") == 2


def test_stdin_that_is_redirected_is_rank_0s(launchpad: Launchpad, detach: Detach) -> None:
    job = detach("-n", 2, "cat", input="first\nsecond\n")
    assert launchpad.run("wait", job).returncode == 0
    assert launchpad.run("attach").stdout == "[0] first\n[0] second\n"


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("hangs_up", ["the terminal", "the session's leader"])
def test_a_job_outlives_its_terminal(launchpad: Launchpad, terminal: Start, hangs_up: str) -> None:
    one = terminal("run", "--detach", "-n", 2, "waits.py", shell="{}; echo started; read x")
    job = one.expect(r"([0-9a-f]{8})\r\n").group(1)
    one.expect("started")
    if hangs_up == "the terminal":
        one.hang_up()
    else:
        one.process.kill()
    one.process.wait(timeout=DEADLINE)
    shown(launchpad, job, "[1]")
    (launchpad.folder / "go").touch()
    done = launchpad.run("attach", job)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["[0] up", "[0] went on", "[1] up", "[1] went on"],
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no-such-program",), "no such program: no-such-program"),
        (("--events", "-", "true"), "--events - has no standard output to write to with --detach; give it a file"),
        (("--nproc", "0", "true"), "0 ranks can't be started"),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost", "--nnodes", "2", "true"), "--detach is for jobs"),
        (("--config", "two.toml"), "--detach starts one job, and those of a file run one after the other; add --job"),
    ],
)
def test_what_is_wrong_is_said_before(launchpad: Launchpad, args: tuple[str, ...], message: str) -> None:
    (launchpad.folder / "two.toml").write_text('[jobs.a]\ntarget = "true"\n[jobs.b]\ntarget = "true"\n')
    done = launchpad.run("run", "--detach", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_smoke_runs_its_jobs_one_after_the_other(launchpad: Launchpad) -> None:
    (launchpad.folder / "two.toml").write_text('[jobs.a]\ntarget = "true"\n')
    done = launchpad.run("smoke", "two.toml", "--detach")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_host_that_can_not_be_used_is_said_before(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--detach", "-H", "no.such.host.invalid", "true")
    assert (done.returncode, done.stdout) == (3, "")
    assert "unresolvable" in done.stderr


def test_without_a_record_nobody_could_attach(launchpad: Launchpad) -> None:
    (launchpad.folder / "file").touch()
    launchpad.environ["XDG_STATE_HOME"] = str(launchpad.folder / "file")
    done = launchpad.run("run", "--detach", "touch", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--detach: nobody could attach to this job" in done.stderr
    assert not (launchpad.folder / "ran").exists()


def test_a_dry_run_stays(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--detach", "--dry-run", "echo", "x")
    assert done.returncode == 0
    assert done.stdout.startswith("node 0: ")


@pytest.mark.usefixtures("waits")
def test_the_word_may_be_the_targets_or_short(launchpad: Launchpad) -> None:
    assert launchpad.run("run", "echo", "--detach").stdout == "[0] --detach\n"
    done = launchpad.run("run", "--deta", "echo", "short")
    assert launchpad.run("attach", done.stdout.strip()).stdout == "[0] short\n"


# Attaching.


def test_no_line_is_lost_or_out_of_order_for_any_of_several(launchpad: Launchpad, detach: Detach) -> None:
    count = 10_000
    job = detach("-n", 2, "flood.py", count, "both")
    follows, is_slow = (launchpad.start("attach", job) for _ in range(2))
    out, err = follows.communicate(timeout=DEADLINE)
    assert follows.returncode == 0
    assert launchpad.run("wait", job).returncode == 0
    for got in (out, err):
        lines = got.decode().splitlines()
        assert len(lines) == 2 * count
        for rank in range(2):
            expected = [f"[{rank}] rank {rank} line {i:07d} {'x' * (i % 50)}" for i in range(count)]
            assert [line for line in lines if line.startswith(f"[{rank}]")] == expected
    assert is_slow.communicate(timeout=DEADLINE) == (out, err)
    again = launchpad.run("attach", job)
    assert (again.stdout, again.stderr) == (out.decode(), err.decode())


def test_bytes_are_what_the_ranks_wrote(launchpad: Launchpad, detach: Detach) -> None:
    wrote = bytes(range(1, 10)) + bytes(range(11, 256)) + "\n\u2028ü€\n".encode()
    (launchpad.folder / "writes.py").write_text(f"import os\nfor byte in {wrote!r}: os.write(1, bytes([byte]))\n")
    job = detach("writes.py")
    done = subprocess.run(
        launchpad.argv("attach", job), env=launchpad.environ, stdout=subprocess.PIPE, timeout=DEADLINE
    )
    first, *rest = wrote.removesuffix(b"\n").split(b"\n")
    assert done.stdout == b"".join(b"[0] " + line + b"\n" for line in (first, *rest))


def test_what_the_user_hides_is_not_shown_here_either(launchpad: Launchpad, detach: Detach) -> None:
    job = detach("-n", 2, "--log-dir", "logs", "-r", "1:3", "echo", "x")
    assert launchpad.run("attach", job).stdout == "[0] x\n"
    job = detach("-n", 3, "--local-ranks-filter", "2", "echo", "x")
    assert launchpad.run("attach", job).stdout == "[2] x\n"


def test_the_verdict_and_the_exit_code_are_the_jobs(launchpad: Launchpad, detach: Detach) -> None:
    job = detach("-n", 2, "exits.py", 7, "wait")
    done = launchpad.run("attach", job)
    assert done.returncode == 7
    assert re.search(r"^launchpad: rank 0 failed first: exit code 7 ", done.stderr, re.M)
    assert f"launchpad: more: launchpad why {job}\n" in done.stderr


def test_a_restart_ends_lines_as_it_does_in_a_terminal(launchpad: Launchpad, detach: Detach) -> None:
    text = "printf 'half of '; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3; echo it"
    args = ("--max-restarts", "1", "--restart", "always", "sh", "-c", text)
    plain = launchpad.run("run", *args)
    job = detach(*args)
    done = launchpad.run("attach", job)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (0, "[0] half of \n[0] half of it\n")
    assert "restarting all ranks" in done.stderr


def test_on_a_terminal_the_last_screen_is_shown_in_colour_and_keys_leave(
    launchpad: Launchpad, detach: Detach, terminal: Start
) -> None:
    (launchpad.folder / "counts.py").write_text(f"for i in range(100): print('line', i, flush=True)\n{WAITS}")
    job = detach("counts.py")
    shown(launchpad, job, "up\\n")
    one = terminal("attach")
    one.expect(r"^\x1b\[0;36m\[0\]\x1b\[0m line 79\r\n")  # 22 lines, up the last one
    one.expect("up\r\n")
    one.expect(f"attached to job {job}: Ctrl-C stops it, Ctrl-P Ctrl-Q leaves it running\r\n")
    one.type("x\x10y\x11\x10\x11")
    one.expect(f"job {job} goes on")
    assert one.end() == 0
    assert rows(launchpad)[0]["kind"] == "running"
    again = terminal("attach", "--since", "start", NO_COLOR="1")
    again.expect(r"\[0\] line 0\r\n")
    again.expect("attached")
    (launchpad.folder / "go").touch()
    again.expect("went on")
    assert again.end() == 0


def test_ctrl_c_is_for_the_job_once_and_twice(launchpad: Launchpad, detach: Detach, terminal: Start) -> None:
    job = detach("-n", 2, "obeys.py", "ignore")
    other = launchpad.start("attach", job)
    one = terminal("attach", job, NO_COLOR="1")
    one.expect("attached")
    shown(launchpad, job, "ready")
    one.type("\x1c")
    one.expect("launchpad: where the ranks are:")
    one.type("\x03")
    one.expect("sent SIGINT to ranks 0-1; they have 30 s to exit; Ctrl-C kills them at once")
    for _ in range(2):
        one.expect("got SIGINT")
    one.type("\x03")
    one.expect("the job was stopped by SIGINT")
    assert one.end() == 130
    assert other.wait(timeout=DEADLINE) == 130
    assert launchpad.run("wait", job).returncode == 130


def test_ctrl_z_suspends_only_what_is_attached(launchpad: Launchpad, detach: Detach, terminal: Start) -> None:
    job = detach("waits.py")
    one = terminal("attach", job, NO_COLOR="1", shell="set -m; {}; echo stopped $?; stty -a; read x; fg; echo code $?")
    one.expect("attached")
    one.type("\x1a")
    one.expect("stopped 147")
    assert " icanon" in one.expect(r".icanon").group()
    (launchpad.folder / "go").touch()
    assert launchpad.run("wait", job).returncode == 0
    one.type("\n")
    one.expect("went on")
    one.expect("code 0")
    assert one.end() == 0


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_whoever_is_attached_may_go(launchpad: Launchpad, detach: Detach, signum: int) -> None:
    job = detach("waits.py")
    process = launchpad.start("attach", job)
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] up\n"
    process.send_signal(signum)
    assert process.wait(timeout=DEADLINE) == (-signum if signum == signal.SIGKILL else 128 + signum)
    (launchpad.folder / "go").touch()
    assert launchpad.run("attach", job).stdout == "[0] up\n[0] went on\n"


def test_a_reader_that_is_gone_ends_attach_and_not_the_job(launchpad: Launchpad, detach: Detach) -> None:
    job = detach("sh", "-c", "while ! test -e go; do echo line; done")
    process = launchpad.start("attach", job)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=DEADLINE) == 141
    (launchpad.folder / "go").touch()
    assert launchpad.run("wait", job).returncode == 0


def test_only_detached_jobs_can_be_attached_to(launchpad: Launchpad, detach: Detach) -> None:
    done = launchpad.run("attach")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no job that was started with --detach is recorded in" in done.stderr
    launchpad.run("run", "true")
    (row,) = rows(launchpad)
    name = row["job"]
    done = launchpad.run("attach", name)
    assert done.returncode == 2
    assert done.stderr == (
        f"launchpad: error: job {name} was not started with --detach; `launchpad logs {name}` shows its output\n"
    )
    job = detach("echo", "x")
    assert launchpad.run("wait", job).returncode == 0
    launchpad.run("run", "true")
    assert launchpad.run("attach").stdout == "[0] x\n"


# Waiting and stopping.


def test_wait_has_the_code_of_the_first_that_failed(launchpad: Launchpad, detach: Detach) -> None:
    waits = detach("waits.py")
    fails = [detach("exits.py", code) for code in (5, 6)]
    waiting = launchpad.start("wait", waits, *fails)
    assert launchpad.run("wait", fails[1]).returncode == 6
    assert waiting.poll() is None
    (launchpad.folder / "go").touch()
    assert waiting.communicate(timeout=DEADLINE) == (b"", b"")
    assert waiting.returncode == 5
    assert launchpad.run("wait", waits[:6]).returncode == 0
    assert launchpad.run("wait", "zebra").returncode == 2


@pytest.mark.parametrize(("how", "code"), [((), 143), (("--signal", "int"), 130), (("--signal", "SIGHUP"), 129)])
def test_a_job_can_be_stopped_as_soon_as_it_has_an_id(
    launchpad: Launchpad, detach: Detach, how: tuple[str, ...], code: int
) -> None:
    job = detach("waits.py")
    done = launchpad.run("stop", job, *how)
    name = signal.Signals(code - 128).name
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"sent {name} to job {job}\n")
    assert launchpad.run("wait", job).returncode == code
    done = launchpad.run("stop", job)
    assert done.returncode == 2
    assert f"you have no running job {job}… on" in done.stderr


def test_other_signals_are_the_ranks(launchpad: Launchpad, detach: Detach) -> None:
    text = "trap 'touch got' USR1; touch up; while ! test -e go; do sleep 0.01; done"
    job = detach("sh", "-c", text)
    wait_until((launchpad.folder / "up").exists, "the rank to be up")
    assert launchpad.run("stop", "--signal", "USR1").returncode == 0
    wait_until((launchpad.folder / "got").exists, "the rank to get it")
    assert launchpad.run("stop", "--signal", "KILL").returncode == 2
    (launchpad.folder / "go").touch()
    assert launchpad.run("wait", job).returncode == 0


@pytest.mark.usefixtures("waits")
def test_a_job_in_a_terminal_can_be_stopped_too(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "waits.py")
    assert process.stdout is not None
    process.stdout.readline()
    wait_until(lambda: launchpad.run("stop").returncode == 0, "the job to take requests")
    assert process.wait(timeout=DEADLINE) == 143


def test_a_launchpad_that_was_killed_is_said(launchpad: Launchpad, detach: Detach) -> None:
    job = detach("waits.py")
    attached = launchpad.start("attach", job)
    assert attached.stdout is not None
    assert attached.stdout.readline() == b"[0] up\n"
    waiting = launchpad.start("wait", job)
    os.kill(rows(launchpad)[0]["pid"], signal.SIGKILL)
    said = (
        f"launchpad: job {job}: the record is incomplete: launchpad was killed, or could not write the rest\n".encode()
    )
    assert attached.communicate(timeout=DEADLINE) == (b"", said)
    assert waiting.communicate(timeout=DEADLINE) == (b"", said)
    assert attached.returncode == waiting.returncode == 4


# At the end.


def test_notify_has_the_verdict(launchpad: Launchpad, detach: Detach) -> None:
    names = "JOB EXIT_CODE KIND RANK VERDICT LOGS".split()
    command = f"{shlex.join([sys.executable, '-c', 'import json, os; print(json.dumps(dict(os.environ)))'])} > said"
    job = detach("--notify", command, "-n", 2, "exits.py", 7, "wait")
    assert launchpad.run("wait", job).returncode == 7
    environ = json.loads((launchpad.folder / "said").read_text())
    said = {name: environ[f"LAUNCHPAD_{name}"] for name in names}
    text = said.pop("VERDICT")
    assert re.match(r"rank [01] failed first: exit code 7 ", text)
    assert said.pop("RANK") == text[5]
    assert said == {"JOB": job, "EXIT_CODE": "7", "KIND": "failure", "LOGS": str(store_of(launchpad) / job)}


def test_notify_is_for_jobs_that_succeed_too_and_its_own_failure_is_shown(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--notify", "echo $LAUNCHPAD_KIND $LAUNCHPAD_EXIT_CODE; exit 3", "echo", "x")
    assert (done.returncode, done.stdout) == (0, "[0] x\n")
    assert done.stderr == "launchpad: none 0\nlaunchpad: --notify: the command ended with exit code 3\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_notify_runs_ends_with_us(launchpad: Launchpad, signum: signal.Signals) -> None:
    """The end of the test finds what is left."""
    process = launchpad.start("run", "--notify", "sleep 600 & touch began; sleep 600; true", "true")
    wait_until((launchpad.folder / "began").exists, "the command")
    process.send_signal(signum)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -signum


# The record of a console.


def test_wait_is_over_once_the_report_is_written(launchpad: Launchpad, detach: Detach) -> None:
    job = detach("--report", "job.html", "--notify", "while [ ! -e go ]; do sleep 0.01; done; touch notified", "true")
    page = launchpad.folder / "job.html"
    wait_until(lambda: page.exists() and "</html>" in page.read_text(), "the page")
    assert job_store.state_of(str(launchpad.state / "launchpad" / "jobs" / job)) == "running"
    (launchpad.folder / "go").touch()
    assert launchpad.run("wait", job).returncode == 0
    assert (launchpad.folder / "notified").exists()


SMALL_SEGMENTS = """
from launchpad.record import console_record
console_record.SEGMENT_BYTES = 20_000
"""


def test_a_long_console_keeps_its_end(launchpad: Launchpad, detach: Detach) -> None:
    (launchpad.folder / "sitecustomize.py").write_text(SMALL_SEGMENTS)
    launchpad.environ["PYTHONPATH"] = str(launchpad.folder)
    text = "i=0; while test $i -lt 3000; do i=$((i + 1)); echo line $i; done"
    job = detach("sh", "-c", text)
    follows = launchpad.run("attach", job)
    assert launchpad.run("wait", job).returncode == 0
    kept = sorted((store_of(launchpad) / job).glob("console.*.jsonl"))
    assert len(kept) <= 4
    lines = launchpad.run("attach", job).stdout.splitlines()
    assert lines[-1] == "[0] line 3000"
    numbers = [int(line.split()[-1]) for line in lines]
    assert numbers == list(range(numbers[0], 3001))
    assert follows.stdout.splitlines()[-1] == "[0] line 3000"
