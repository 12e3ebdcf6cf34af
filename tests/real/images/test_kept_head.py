"""The kept head: `launchpad run` in a fork of a process that has loaded it; the user's process passes on signals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad import caller
from launchpad.image import channel
from launchpad.record import job_store
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.hosts import Hosts
from tests.support.kept import kept
from tests.support.mounts import run_with_mounts
from tests.support.sshd import needs_sshd
from tests.support.terminal import Start
from tests.support.terminal import terminal as terminal

WAITS = "print('up', flush=True)\nprint(input(), flush=True)\n"


@pytest.fixture
def warm(launchpad: Launchpad, keeper: Launchpad) -> Launchpad:
    """The command, with a kept head that others use too."""
    launchpad.use_images(keeper)
    (launchpad.folder / "w.py").write_text(WAITS)
    return launchpad


@pytest.fixture
def own(launchpad: Launchpad, tmp_path: Path) -> Iterator[Launchpad]:
    """The command, with a kept head of its own; what was kept is ended."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    (tmp_path / "path").mkdir()
    launchpad.environ |= {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(tmp_path / "path")}
    # A finder that knows nothing of torch, which would take a second.
    (tmp_path / "path" / "sitecustomize.py").write_text(
        "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(name)\nsys.meta_path.insert(0, No())\n"
    )
    (launchpad.folder / "w.py").write_text(WAITS)
    assert launchpad.run("warm").returncode == 0
    is_ready(launchpad)
    yield launchpad
    launchpad.run("warm", "--stop")
    wait_until(lambda: not launchpad.survivors(), "all images to be gone", show=launchpad.survivors)
    assert not list(runtime.iterdir())


def head_of(launchpad: Launchpad) -> dict[str, Any] | None:
    """What is known of the kept head."""
    found = kept(launchpad)
    assert found
    head: dict[str, Any] | None = found["head"]
    return head


def is_ready(launchpad: Launchpad) -> None:
    wait_until(lambda: (head_of(launchpad) or {}).get("state") == "ready", "the kept head")


def uses(launchpad: Launchpad) -> int:
    is_ready(launchpad)
    head = head_of(launchpad)
    assert head is not None
    return int(head["uses"])


def started(launchpad: Launchpad, *words: object, **options: object) -> subprocess.Popen[bytes]:
    """A job with a rank that runs w.py, and has begun."""
    process = launchpad.start("run", "--grace", 5, *words, "w.py", stdin=subprocess.PIPE, **options)
    assert process.stdout is not None
    assert b"up" in process.stdout.readline()
    return process


def pid_of_head(launchpad: Launchpad) -> int:
    """The head's pid, from the record of the latest job."""
    (job,) = job_store.jobs(launchpad.environ)[:1]
    events = Path(job_store.jobs_folder(launchpad.environ), job, "events.jsonl")
    wait_until(lambda: "\n" in events.read_text(), "the first event")
    return int(json.loads(events.read_text().partition("\n")[0])["pid"])


def test_it_runs_the_command(warm: Launchpad) -> None:
    before = uses(warm)
    process = started(warm)
    head = pid_of_head(warm)
    assert head != process.pid
    facts = [
        Path("/proc", str(pid), name).read_bytes() for name in ("cmdline", "environ") for pid in (head, process.pid)
    ]
    assert facts[0] == facts[1]
    assert facts[2] == facts[3]
    assert os.readlink(f"/proc/{head}/cwd") == str(warm.folder)
    output, errors = process.communicate(b"on\n", timeout=DEADLINE)
    assert (output, errors, process.returncode) == (b"[0] on\n", b"", 0)
    assert uses(warm) == before + 1


@pytest.mark.parametrize("code", [0, 7, 255])
def test_its_exit_code_is_ours(warm: Launchpad, code: int) -> None:
    before = uses(warm)
    assert warm.run("run", "sh", "-c", f"exit {code}").returncode == code
    assert warm.run("run", "--nproc", "none").returncode == 2
    assert warm.run("run", "--help").stdout.startswith("Usage: launchpad run")
    assert uses(warm) == before + 3


def test_the_status_shows_it(own: Launchpad) -> None:
    assert "\nlaunchpad itself: ready, pid" in own.run("warm", "--status").stdout


def in_other_words(launchpad: Launchpad, *options: str) -> list[str]:
    return [sys.executable, *options, *launchpad.argv("run", "true")[1:]]


def not_used(own: Launchpad, command: list[str], **environ: str) -> None:
    done = subprocess.run(
        command,
        env=own.environ | environ,
        cwd=own.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 2), command
    own.run("wait")
    after = head_of(own)
    assert after is None or after["uses"] == 0, command  # None: one with these variables is being made


def test_it_is_not_used_for_what_it_can_not_do(own: Launchpad) -> None:
    not_used(own, in_other_words(own, "-X", "importtime"))
    for words in ("run --detach true", "jobs"):
        not_used(own, own.argv(*words.split()))


MAY_ASK = [
    "-H no",
    "-qH no",
    "-hosts no",
    "-machinefile hosts",
    "--enter=false",
    "--config job.toml",
    "--conf=job.toml",
]


def test_what_may_ask_on_a_terminal_stays_there(own: Launchpad, terminal: Start) -> None:
    (own.folder / "job.toml").write_text('target = "true"\n')
    (own.folder / "hosts").write_text("no\n")
    (own.folder / "ssh_config").write_text("Host no\n  HostName 127.0.0.1\n  Port 1\n")
    commands = [f"run --ssh-config ssh_config {words} true".split() for words in MAY_ASK]
    before = uses(own)
    for words in commands:
        terminal(*words).rest()
    assert uses(own) == before
    for words in commands:  # nobody can be asked
        own.run(*words, start_new_session=True)
    assert uses(own) == before + len(commands)


@needs_sshd
def test_it_reaches_hosts(warm: Launchpad, tmp_path: Path) -> None:
    before = uses(warm)
    with Hosts(warm, tmp_path / "ssh") as hosts:
        done = hosts.run(warm, "-H", "n1,n2", "echo", "x", start_new_session=True)
    assert (sorted(done.stdout.splitlines()), done.stderr, done.returncode) == (["[n1 0] x", "[n2 1] x"], "", 0)
    assert uses(warm) == before + 1


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ("run true", {"PYTHONMALLOCSTATS": "1"}),
        ("run --dry-run x", {"SLURM_JOB_ID": "1"}),
        ("run true", {"PYTHONHASHSEED": "7"}),  # another start
    ],
    ids=["a variable", "Slurm", "another start"],
)
def test_it_is_not_used_with_other_variables(own: Launchpad, words: str, environ: dict[str, str]) -> None:
    not_used(own, own.argv(*words.split()), **environ)


def test_a_module_in_the_folder_is_found(own: Launchpad) -> None:
    """`python -m launchpad` puts the folder first on the path."""
    shadow = own.folder / "shlex.py"
    before = uses(own)
    shadow.write_text("raise SystemExit('mine')\n")
    own.run("run", "true")
    shadow.unlink()
    head = head_of(own)
    assert head is not None
    assert (head["uses"], head["last_cold"]) == (before, f"{shadow} comes first on the path")


def test_inherited_descriptors_are_handed_over(warm: Launchpad) -> None:
    before = uses(warm)
    line = 'exec 9> events.jsonl; "$@"'
    command = ["bash", "-c", line, "-", *warm.argv("run", "--events", "/dev/fd/9", "true")]
    subprocess.run(command, env=warm.environ, cwd=warm.folder, stdin=subprocess.DEVNULL, check=True, timeout=DEADLINE)
    assert '"JobOver"' in (warm.folder / "events.jsonl").read_text()
    assert uses(warm) == before + 1


def test_a_variable_without_a_name_is_left_out(warm: Launchpad) -> None:
    before = uses(warm)
    command = ["env", "=foo", *warm.argv("run", "echo", "x")]
    done = subprocess.run(command, env=warm.environ, cwd=warm.folder, capture_output=True, check=True, timeout=DEADLINE)
    assert done.stdout == b"[0] x\n"
    assert uses(warm) == before + 1


def test_with_few_descriptors(warm: Launchpad) -> None:
    """It starts here, and says what is wrong."""
    before = uses(warm)
    command = ["sh", "-c", 'ulimit -n 6; "$@"', "-", *warm.argv("run", "true")]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": DEADLINE, "check": False}
    done = subprocess.run(command, env=warm.environ, cwd=warm.folder, **pipes)  # type: ignore[call-overload]
    assert (done.returncode, b"Too many open files" in done.stderr) == (3, True)
    assert uses(warm) == before


def test_closed_standard_streams(warm: Launchpad) -> None:
    before = uses(warm)
    command = ["sh", "-c", '"$@" <&- 2>&-', "-", *warm.argv("run", "echo", "x")]
    done = subprocess.run(command, env=warm.environ, cwd=warm.folder, capture_output=True, check=True, timeout=DEADLINE)
    assert done.stdout == b"[0] x\n"
    assert uses(warm) == before + 1


def test_without_proc(warm: Launchpad) -> None:
    """It starts here."""
    before = uses(warm)
    done = run_with_mounts(warm, "mount -t tmpfs none /proc", "run", "-n", 2, "exits.py", 0, 7)
    assert done.returncode == 7
    assert all(line.startswith(("launchpad: ", "  ")) for line in done.stderr.splitlines())
    assert uses(warm) == before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(warm: Launchpad, signum: int) -> None:
    process = started(warm)
    process.send_signal(signum)
    assert process.wait(DEADLINE) == 128 + signum


def end_by(process: subprocess.Popen[bytes], signum: int, errors: Path) -> None:
    """Send the signal, again where a starting interpreter has dropped it: KeyboardInterrupt in one of its callbacks."""
    process.send_signal(signum)
    ignored = 0

    def has_ended() -> bool:
        nonlocal ignored
        if (found := errors.read_text().count("Exception ignored in")) > ignored:
            ignored = found
            process.send_signal(signum)
        return process.poll() is not None

    wait_until(has_ended, "the end", show=errors.read_text)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_ends_it(warm: Launchpad, signum: int) -> None:
    """From the first instruction of the command until shortly after its rank runs."""
    before = uses(warm)
    begun = time.monotonic()
    first = started(warm)
    took = time.monotonic() - begun
    first.send_signal(signum)
    assert first.wait(DEADLINE) == 128 + signum
    assert uses(warm) == before + 1
    codes = {-signum, 128 + signum}
    if signum == signal.SIGINT:
        codes.add(1)  # while the interpreter itself starts
    for step in range(30):
        errors = warm.folder / f"errors{step}"
        with errors.open("w") as file:
            process = warm.start("run", "-n", 2, "sleep", 1000, stdout=subprocess.DEVNULL, stderr=file)
        time.sleep(took * step / 25)
        end_by(process, signum, errors)
        assert process.wait(DEADLINE) in codes


def test_an_ignored_signal_is_ignored(warm: Launchpad) -> None:
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "-", *warm.argv("run", "w.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=warm.environ, cwd=warm.folder, **pipes) as process:  # type: ignore[call-overload]
        assert b"up" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.communicate(b"on\n", timeout=DEADLINE)[0] == b"[0] on\n"
    assert process.returncode == 0


def test_the_caller_stops_and_goes_on_with_it(warm: Launchpad) -> None:
    process = started(warm)
    process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    process.send_signal(signal.SIGCONT)
    assert process.communicate(b"on\n", timeout=DEADLINE)[0] == b"[0] on\n"


def test_it_goes_on_if_its_image_ended_while_it_was_stopped(own: Launchpad) -> None:
    process = started(own)
    process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    own.run("warm", "--stop")
    process.send_signal(signal.SIGCONT)
    assert process.communicate(b"on\n", timeout=DEADLINE)[0] == b"[0] on\n"
    assert process.returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGCONT, signal.SIGKILL])
def test_a_signal_to_it_alone_wakes_the_caller_too(warm: Launchpad, signum: int) -> None:
    process = started(warm)
    head = pid_of_head(warm)
    process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    os.kill(head, signum)
    process.communicate(b"on\n", timeout=DEADLINE)
    assert process.returncode == (0 if signum == signal.SIGCONT else -signum)


def test_a_signal_to_it_and_the_caller_is_one(warm: Launchpad) -> None:
    """As from `pkill -f`: a second Ctrl-C would kill the ranks."""
    (warm.folder / "w.py").write_text(
        "import signal, time\n"
        "def save(signum, frame):\n    time.sleep(0.5)\n    print('saved', flush=True)\n    raise SystemExit\n"
        "signal.signal(signal.SIGINT, save)\nprint('up', flush=True)\nsignal.pause()\n"
    )
    process = started(warm)
    os.kill(pid_of_head(warm), signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (130, b"[0] saved\n")


@pytest.mark.parametrize("which", ["head", "its parent"])
def test_its_death_is_ours(warm: Launchpad, which: str) -> None:
    """The fixture waits until nothing is left."""
    process = started(warm)
    head = pid_of_head(warm)
    parent = int(Path(f"/proc/{head}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(head if which == "head" else parent, signal.SIGKILL)
    assert process.wait(DEADLINE) == -signal.SIGKILL


def test_it_dies_with_the_caller(warm: Launchpad) -> None:
    """The fixture waits until nothing is left."""
    process = started(warm)
    process.kill()
    process.wait(DEADLINE)


def test_its_exit_code_is_known_when_nothing_is_kept_any_more(own: Launchpad) -> None:
    (own.folder / "w.py").write_text(WAITS + "raise SystemExit(9)\n")
    before = uses(own)
    process = started(own)
    assert uses(own) == before + 1
    assert own.run("warm", "--stop").stdout == "ended\n"
    process.communicate(b"on\n", timeout=DEADLINE)
    assert process.returncode == 9


def test_another_one_follows_one_that_was_killed(own: Launchpad) -> None:
    head = head_of(own)
    assert head is not None
    os.kill(head["pid"], signal.SIGKILL)
    wait_until(lambda: not any(line.startswith(f"{head['pid']} ") for line in own.survivors()), "it to be gone")
    assert own.run("run", "true").returncode == 0
    before = uses(own)
    assert own.run("run", "true").returncode == 0
    assert uses(own) == before + 1


def test_another_one_follows_when_a_file_has_changed(own: Launchpad, tmp_path: Path) -> None:
    before = head_of(own)
    assert before is not None
    (tmp_path / "path" / "new.py").touch()
    assert own.run("run", "true").returncode == 0
    wait_until(lambda: (head_of(own) or before)["pid"] != before["pid"], "another one")
    before_that = uses(own)
    assert own.run("run", "true").returncode == 0
    assert uses(own) == before_that + 1


def test_one_that_can_not_be_made_is_said_and_not_tried_again(own: Launchpad, tmp_path: Path) -> None:
    site = tmp_path / "path" / "sitecustomize.py"
    site.write_text(site.read_text().replace("name == 'torch'", "name in ('torch', 'launchpad.console.dry_run')"))
    own.run("warm", "--stop")
    assert own.run("warm").returncode == 0
    why = "it ended while it imported: ModuleNotFoundError: launchpad.console.dry_run"
    wait_until(lambda: f"\nlaunchpad itself is not kept: {why}\n" in own.run("warm", "--status").stdout, "the reason")
    assert own.run("run", "true").returncode == 0
    assert own.run("run", "true").returncode == 0
    found = json.loads(own.run("warm", "--status", "--json").stdout)
    assert (found["head"], found["head_failed"], found["last_cold"]) == (None, why, "")


@pytest.fixture
def slow_keeper(launchpad: Launchpad) -> Iterator[socket.socket]:
    """A keeper that answers when the test says so."""
    # The command may be of another installation than what the test imports.
    code = "import os; from launchpad.image import place; print(place.path(os.environ), end='')"
    command = [sys.executable, "-c", code]
    path = subprocess.run(
        command, env=launchpad.environ, cwd=launchpad.folder, capture_output=True, text=True, check=True
    ).stdout
    os.mkdir(os.path.dirname(path), 0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(DEADLINE)
        yield listener
    shutil.rmtree(os.path.dirname(path))


def test_a_signal_that_comes_early_is_passed_on_or_heeded(launchpad: Launchpad, slow_keeper: socket.socket) -> None:
    process = launchpad.start("run", "true")
    connection, _ = slow_keeper.accept()
    with connection:
        channel.send(connection, {"cores": 1})
        received = channel.receive(connection)
        assert received is not None
        request, fds = received
        channel.close(fds)
        assert request["head"]["argv"][1:] == ["run", "true"]
        process.send_signal(signal.SIGTERM)
        channel.send(connection, {"cold": "there is none"})
        assert process.wait(DEADLINE) == -signal.SIGTERM  # as at any time before there is a job
    with subprocess.Popen(["sleep", "100"]) as stands_for_head:
        process = launchpad.start("run", "true")
        connection, _ = slow_keeper.accept()
        with connection:
            received = channel.receive(connection)
            assert received is not None
            channel.close(received[1])
            process.send_signal(signal.SIGTERM)
            channel.send(connection, {"cores": 1})
            pidfd = os.pidfd_open(stands_for_head.pid)
            ours, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, others:
                channel.send(connection, {"head": stands_for_head.pid}, [pidfd, others.fileno()])
                os.close(pidfd)
                assert stands_for_head.wait(DEADLINE) == -signal.SIGTERM
                channel.send(ours, {"code": -signal.SIGTERM})
                assert process.wait(DEADLINE) == -signal.SIGTERM


def test_a_keeper_that_accepts_nobody_is_not_waited_for(launchpad: Launchpad, slow_keeper: socket.socket) -> None:
    waiting: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            waiting[-1].connect(slow_keeper.getsockname())
    assert launchpad.run("run", "true").returncode == 0
    for one in waiting:
        one.close()


def test_the_foreground_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "_pid", os.getpid())
    ours, others = os.openpty()
    try:
        with pytest.raises(OSError, match="Inappropriate"):  # it is nobody's controlling terminal
            caller.in_foreground(others)
        with pytest.raises(OSError, match="Inappropriate"):
            caller.in_foreground(os.open(os.devnull, os.O_RDONLY))
    finally:
        os.close(ours)
        os.close(others)
