"""Hostile surroundings: crowds, full disks, missing folders, bare environments, and bytes that are no frames.

A clear end each time, never a hang, and nothing left (conftest looks for processes and files after each test).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import launchpad as package
from launchpad import __version__
from launchpad.agent.poll import Poll
from launchpad.console.notes import Notes
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.verdict_json import as_json
from launchpad.errors import LaunchpadError
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.head.supervisor import Supervisor
from launchpad.job.spec import JobSpec, Target
from launchpad.protocol import commands, events, wire
from launchpad.runner.observers import planned
from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.mounts import run_with_mounts, with_mounts
from tests.support.needs import needs_torch

# Crowds.


def test_500_ranks_that_leave_at_once(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 500, "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_one_of_500_that_fails_gives_the_code(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "-n", 500, "sh", "-c", "[ $RANK != 250 ] || exit 9")
    assert done.returncode == 9
    assert "launchpad: rank 250 failed first: exit code 9" in done.stderr


def test_64_ranks_at_full_speed_into_a_pipe_that_closes(launchpad: Launchpad) -> None:
    process = launchpad.start("run", "-n", 64, "yes")
    assert process.stdout.readline().endswith(b"] y\n")
    process.stdout.close()
    assert process.wait(timeout=DEADLINE) == 141
    assert not launchpad.survivors()


@pytest.mark.parametrize("reader", ["comes back", "never comes back"])
def test_64_ranks_into_a_paused_reader_then_term(launchpad: Launchpad, reader: str) -> None:
    process = launchpad.start("run", "-n", 64, "yes")
    assert process.stdout.readline().endswith(b"] y\n")
    process.terminate()
    wait_until(lambda: not any(one.split()[1:] == ["yes"] for one in launchpad.survivors()), "the ranks to be gone")
    assert process.poll() is None, "the rest of the output waits for its reader"
    if reader == "comes back":
        while process.stdout.read(1 << 16):
            pass
    else:  # another TERM says that nobody will; one that comes before the last rank's end is known is passed on
        wait_until(lambda: process.terminate() or process.poll() is not None, "the head to leave")
    assert process.wait(timeout=DEADLINE) == 143


# Disks, folders and limits.


@pytest.mark.parametrize("code", [0, 7])
def test_full_disk_under_log_dir_is_noted_once_for_each_file(launchpad: Launchpad, code: int) -> None:
    (launchpad.folder / "logs").mkdir()
    script = "yes words | head -n 300000; yes complaints | head -n 200000 >&2; touch $RANK; [ $RANK = 0 ] && exit; "
    script += f"until [ -e 0 ]; do sleep 0.01; done; exit {code}"  # who fails ends the other
    mounts = "mount -t tmpfs -o size=1m none logs"
    done = run_with_mounts(launchpad, mounts, "run", "-n", 2, "--log-dir", "logs", "sh", "-c", script)
    assert done.returncode == code
    assert done.stdout.count("] words\n") == 600_000
    notes = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    said = {"/".join(note.partition(":")[2].split(":")[0].split("/")[-2:]) for note in notes}
    assert len(notes) == len(said)
    assert said == {
        *(f"{rank}/{name}" for rank in range(2) for name in ("stderr.log", "stdout.log")),
        next(note.partition(":")[2].split(":")[0].partition("logs/")[2] for note in notes if "events.jsonl" in note),
    }


def test_standard_output_that_is_full_ends_the_job(launchpad: Launchpad) -> None:
    with open("/dev/full", "wb") as full:
        process = launchpad.start("run", "-n", 2, "yes", stdout=full)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 141
    assert b"launchpad: the job was stopped: standard output can't be written to (No space left on device)" in err


def test_standard_error_that_is_full_ends_nothing(launchpad: Launchpad) -> None:
    with open("/dev/full", "wb") as full:
        process = launchpad.start("run", "-n", 2, "sh", "-c", "echo words; echo complaints >&2", stderr=full)
        out, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out.count(b"words")) == (0, 2)


@pytest.mark.parametrize(("ranks", "code"), [(10, 0), (11, 2)])
def test_64_descriptors_do_for_ten_ranks(launchpad: Launchpad, ranks: int, code: int) -> None:
    process = launchpad.start(
        "run", "-n", ranks, "--log-dir", "logs", "echo", "words",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )  # fmt: skip
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out.count(b"words")) == (code, 0 if code else ranks)
    assert (b"and start at most 10" in err or b"or start at most 10" in err) == bool(code)
    assert err.count(b"\n") == bool(code)


def test_worlds_may_need_more_descriptors_than_each_of_their_ranks_may_open(launchpad: Launchpad) -> None:
    """The soft limit is the ranks'; beyond the hard one it is said what is wrong."""
    (launchpad.folder / "limit.py").write_text(
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    roles = "".join(f'[jobs.j.roles.a{number}]\ntarget = "limit.py"\n' for number in range(20))
    (launchpad.folder / "job.toml").write_text(roles)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for hard, code in ((most, 0), (48, 3)):
        process = launchpad.start(
            "run", "--config", "job.toml", "--job", "j",
            preexec_fn=lambda hard=hard: resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard)),
        )  # fmt: skip
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out.count(b" 0] 48\n")) == (code, 0 if code else 20)
    assert err.startswith(b"launchpad: error: this node's agent can't be started: Too many open files: ")
    assert err.count(b"\n") == 1


HIDE = "for folder in {}; do mount --bind $folder $folder; mount -o remount,bind,ro $folder; done"


def test_without_shared_memory_and_tmp(launchpad: Launchpad) -> None:
    """/var/tmp does; the working folder, in /tmp as it may be, is read-only too."""
    del launchpad.environ["TMPDIR"]
    done = run_with_mounts(launchpad, HIDE.format("/tmp /dev/shm"), "run", "-n", 2, "exits.py", 0, 0)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("launchpad: no record of this job is kept: ")
    assert done.stderr.count("\n") == 1


def test_nowhere_to_put_temporary_files_is_said(launchpad: Launchpad) -> None:
    del launchpad.environ["TMPDIR"]
    del launchpad.environ["XDG_RUNTIME_DIR"]
    done = run_with_mounts(launchpad, HIDE.format("/tmp /dev/shm /var/tmp"), "run", "-n", 2, "exits.py", 0, 0)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "can't create a temporary folder (/tmp: Read-only file system; /var/tmp" in done.stderr
    assert "set TMPDIR to a writable folder" in done.stderr


def test_read_only_working_folder(launchpad: Launchpad) -> None:
    done = run_with_mounts(launchpad, HIDE.format('"$PWD"') + "; cd .", "run", "-n", 2, "sh", "-c", "! echo > file")
    assert done.returncode == 0
    assert not list(launchpad.folder.iterdir())


def test_log_dir_on_a_read_only_disk_is_refused(launchpad: Launchpad) -> None:
    mounts = HIDE.format('"$PWD"') + '; cd "$PWD"'
    logs = launchpad.folder / "logs"
    done = run_with_mounts(launchpad, mounts, "run", "--log-dir", "logs", "true")
    assert done.returncode == 2
    assert done.stderr == (
        f"launchpad: error: --log-dir {logs}: {logs}: Read-only file system; choose a writable folder\n"
    )


def test_error_file_with_half_a_character(launchpad: Launchpad) -> None:
    """Whatever Python strings a rank's exception holds, torch's @record writes them down like this."""
    script = """echo '{"message": {"message": "no such file: \\ud83d"}}' > $TORCHELASTIC_ERROR_FILE; exit 3"""
    done = launchpad.run("run", "sh", "-c", script)
    assert done.returncode == 3
    assert "launchpad:     no such file: \\ud83d\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("way", [("--preload", "json"), ("--start-method", "exec")], ids=["forked", "executed"])
def test_exception_with_half_a_character(launchpad: Launchpad, way: tuple[str, ...]) -> None:
    (launchpad.folder / "half.py").write_text("raise ValueError('bad token \\ud83d')\n")
    done = launchpad.run("run", *way, "half.py")  # of two ranks, one may be stopped while it exits
    assert done.returncode == 1
    assert re.search(r"rank 0 failed first: ValueError: bad token \S+ \(exit code 1", done.stderr)
    assert "bug" not in done.stderr


# A name server that never answers.


@needs_torch
def test_no_rank_waits_for_a_dns_that_is_dead(launchpad: Launchpad) -> None:
    """torch looks up a name for the store's address at each connection; the ranks' own questions still go out."""
    if (os.confstr("CS_GNU_LIBC_VERSION") or "") < "glibc 2.34":
        pytest.skip("needs glibc 2.34")
    (launchpad.folder / "meets.py").write_text(
        "import contextlib, os, socket, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 0:\n"
        "    print(os.stat('/etc/resolv.conf').st_size, flush=True)\n"
        "    with contextlib.suppress(socket.gaierror):\n"
        "        socket.getnameinfo(('::ffff:127.0.0.1', 1), 0)\n"
    )
    address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # another suite may run on this machine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((address, 53))
        except PermissionError:
            pytest.skip("needs port 53 (root)")
        server.setblocking(False)
        settings = f"nameserver {address}\noptions timeout:1 attempts:1\n"
        (launchpad.folder / "resolv.conf").write_text(settings)
        done = run_with_mounts(launchpad, "mount --bind resolv.conf /etc/resolv.conf", "run", "-n", 3, "meets.py")
        questions = []
        with contextlib.suppress(BlockingIOError):
            while True:
                questions.append(server.recv(512))
    assert (done.returncode, done.stdout) == (0, f"[0] {len(settings)}\n"), done.stderr
    assert len([one for one in questions if b"arpa" in one]) == 1, questions


# Bare environments.


@pytest.mark.parametrize("name", ["HOME", "PATH", "LANG", "everything"])
def test_unset_variable(launchpad: Launchpad, name: str) -> None:
    kept = {} if name == "everything" else {k: v for k, v in launchpad.environ.items() if k != name}
    environ = {**kept, "LAUNCHPAD_TEST": launchpad.mark, "TMPDIR": str(launchpad.scratch)}
    for target in (["true"], ["exits.py", 0, 0]):
        done = launchpad.run("run", "-n", 2, *target, env=environ)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_python_without_site_packages(launchpad: Launchpad) -> None:
    """Nothing of launchpad is imported in a rank."""
    wrapper = launchpad.folder / "bare"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    wrapper.chmod(0o755)
    script = launchpad.folder / "bare.py"
    script.write_text("import sys; print(any('site-packages' in p for p in sys.path), 'launchpad' in sys.modules)\n")
    done = launchpad.run("run", "-n", 2, "--python", "./bare", script)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] False False", "[1] False False"])


# Bytes that are no frames.

READY = events.AgentReady(0, 0.0, 1, "node0", 2, 0, None, 1 << 20, 1 << 20, 29501)
SAID = [
    READY,
    events.RankStarted(1, 0, 100),
    events.Output(2, 0, 2, b"some words\n"),
    events.RankRaised(3, 0, '{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback"}}}'),
    events.RankExited(4, 0, 1, 1 << 20, False),
    events.RankExited(5, 1, 0, 1 << 20, False),
    events.OrphansKilled(6, ["7 sleep"]),
]
ALONE = {"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
SLEEPERS = [{"rank": rank, "argv": ["sleep", "600"], "environ": {"RANK": str(rank)}} for rank in range(2)]
ASKED = [
    commands.Hello(__version__, False, 0, 60.0),
    commands.Probe("/", False, "", {}, []),
    commands.Listen(["127.0.0.1", "::1"], "ask", "answer"),
    commands.Reach([["127.0.0.1", 1], ["::1", 1]], "ask", "answer"),
    commands.HoldPort("127.0.0.1", 0),
    commands.HoldPorts(2),
    commands.Ping(1),
    commands.Start(
        0, ".", {"A": "b"}, {"C": "d"}, {}, SLEEPERS, [], "", [], 1 << 16, "", 0, True, False, [], False, True
    ),
    commands.StdinData(b"read this"),
    commands.Credit(0, 1, 100),
    commands.Signal(signal.SIGCONT),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def frame(code: int, fields: list[Any]) -> bytes:
    """A frame whose JSON is in order and whose fields are whatever they are."""
    payload = json.dumps(fields).encode()
    return struct.pack("!IB", len(payload) + 1, code) + payload


@st.composite
def fuzzed(draw: st.DrawFn, valid: list[Any]) -> bytes:
    """Bytes at random; valid frames with bytes changed, lost or put in; a valid start, then a wrong field or rank."""
    frames = [wire.encode(message) for message in valid]
    kept = frames[: draw(st.integers(0, len(frames)))]
    match draw(st.sampled_from(["noise", "mutated", "fields", "field"])):
        case "noise":
            return b"".join(kept) + draw(st.binary(max_size=100))
        case "mutated":
            data = bytearray(b"".join(frames))
            for _ in range(draw(st.integers(1, 4))):
                at = draw(st.integers(0, len(data) - 1))
                data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
            return bytes(data)
        case "fields":
            kind = draw(st.sampled_from([kind for kind in wire.MESSAGES if kind is not events.Output]))
            count = len(kind._fields)
            return b"".join(kept) + frame(wire.CODES[kind], draw(st.lists(ANYTHING, min_size=count, max_size=count)))
        case _:
            fields = list(draw(st.sampled_from([message for message in valid if type(message) is not events.Output])))
            code = wire.CODES[type(next(m for m in valid if list(m) == fields))]
            fields[draw(st.integers(0, len(fields) - 1))] = draw(ANYTHING)
            return b"".join(kept) + frame(code, fields)


class FuzzedLink:
    """A link whose agent says these bytes and hangs up."""

    name = ""
    remote = False

    def __init__(self, data: bytes) -> None:
        self._data = data

    def send(self, command: Any) -> None:
        """Nobody listens."""

    def messages(self) -> Iterator[Any]:
        """What the bytes hold."""
        yield from wire.Decoder().feed(self._data)

    def abandon(self) -> None:
        """Nothing is held."""


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=fuzzed(SAID))
def test_whatever_an_agent_says_the_head_ends_in_good_order(data: bytes) -> None:
    head = BringUp()
    spec = JobSpec(target=Target("program", "true"), nproc=2)
    try:
        facts = head.connect([FuzzedLink(data)], count_gpus=False)
        planner = Planner(spec, "x", facts)
    except LaunchpadError:  # a sentence and an exit code: as good an end as any
        return
    notes: list[str] = []
    diagnosis = Diagnosis()
    sinks = [Notes(diagnosis, notes.append, False), diagnosis]
    for sink in sinks:
        sink.on(planned("0a1b", spec, planner.plan, ""))
    code, cause = Supervisor(head, planner, sinks).run()
    assert 0 <= code <= 255
    assert (cause is None) == (code == 0)
    if cause is not None:
        verdict = diagnosis.verdict()
        notes += [*diagnosis.report(verdict), json.dumps(as_json(diagnosis.history, verdict, notes))]
    assert all(note.encode(errors="surrogateescape") for note in notes)


def heard_by_agent(launchpad: Launchpad, data: bytes, *inside: str) -> subprocess.CompletedProcess[bytes]:
    """A real agent that was sent these bytes; what it said, and its complaints."""
    entry = Path(package.__file__).parent / "agent" / "__main__.py"
    argv = [*inside, sys.executable, "-I", "-S", str(entry)]
    options = {"env": launchpad.environ, "cwd": launchpad.folder, "timeout": DEADLINE}
    return subprocess.run(argv, input=data, capture_output=True, check=False, **options)


def failure(done: subprocess.CompletedProcess[bytes]) -> events.AgentFailed:
    """Why the agent says that it ended."""
    assert done.stderr == b""
    return next(event for event in wire.Decoder().feed(done.stdout) if type(event) is events.AgentFailed)


def test_an_agent_that_runs_out_of_disk_says_where(launchpad: Launchpad) -> None:
    """What the ranks are to call comes before any of them is started."""
    inside = with_mounts(launchpad, f"mount -t tmpfs -o size=16k none {launchpad.scratch}")
    said = failure(heard_by_agent(launchpad, wire.encode(commands.Call(bytes(100_000))), *inside))
    assert said.reason.startswith(f"its agent failed: No space left on device: {launchpad.scratch}/launchpad-")
    assert said.reason.endswith("/call")
    assert said.trace == ""


def test_an_agent_that_waits_for_the_end_of_processes_gives_signs_of_life(launchpad: Launchpad) -> None:
    """The head would take it for lost. A cleaner of shared memory has two seconds to exit by itself."""
    leaves = "sh -c 'sleep 600; :' multiprocessing.resource_tracker >/dev/null 2>&1 &"
    entry = {"rank": 0, "argv": ["sh", "-c", leaves], "environ": ALONE, "python": False, "calls": "", "debug": False}
    start = commands.Start(
        0, ".", {}, {}, {}, [{**entry, "bind": []}], [], "", [], 1 << 16, "", -1, False, False, [], False, True
    )
    argv = [sys.executable, "-I", "-S", str(Path(package.__file__).parent / "agent" / "__main__.py")]
    agent = subprocess.Popen(
        argv, env=launchpad.environ, cwd=launchpad.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdin
    assert agent.stdout
    decoder, said = wire.Decoder(), list[Any]()
    for command in (commands.Hello(__version__, False, 0, 4.0), start):
        agent.stdin.write(wire.encode(command))
    agent.stdin.flush()
    while select.select([agent.stdout], [], [], DEADLINE)[0] and (data := os.read(agent.stdout.fileno(), 1 << 16)):
        new = list(decoder.feed(data))
        said += new
        if any(type(event) is events.RankExited for event in new):
            agent.stdin.write(wire.encode(commands.Finish(leave=True)))
            agent.stdin.flush()
    assert agent.wait(timeout=DEADLINE) == 0
    agent.stdin.close()
    agent.stdout.close()
    kinds = [type(event).__name__ for event in said]
    assert [event.ping for event in said if type(event) is events.Pong] == [0] * kinds.count("Pong")
    assert kinds.index("RankExited") < kinds.index("Pong") < kinds.index("OrphansKilled")


def test_a_guard_that_waits_for_the_end_of_processes_gives_signs_of_life() -> None:
    """But not where the agent may have left half a frame: then the seconds are 0."""
    for says in (True, False):
        code = (
            "from launchpad.agent import wards; from launchpad.agent.host.processes import telling; "
            f"reap = telling(lambda: None, {1e-9 if says else 0.0}, lambda: wards.give_sign_of_life(1)); "
            "reap(), reap()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE, check=True)
        assert [event.ping for event in wire.Decoder().feed(done.stdout)] == [0, 0] * says


def test_an_agent_that_breaks_down_tells_how(launchpad: Launchpad) -> None:
    """An order that no head of ours gives stands in for a bug of the agent's."""
    ranks = [{"rank": 0, "environ": ALONE}]
    start = commands.Start(0, ".", {}, {}, {}, ranks, [], "", [], 1 << 16, "", 0, True, False, [], False, True)
    said = failure(heard_by_agent(launchpad, wire.encode(start)))
    assert said.reason == "its agent crashed because of a bug in launchpad: KeyError: 'argv'"
    assert said.trace.startswith("Traceback (most recent call last):\n")
    assert ", in _execute\n" in said.trace
    nonsense = failure(heard_by_agent(launchpad, b"GET / HTTP/1.1\r\n"))
    assert nonsense.reason.startswith("its agent received invalid data: not a frame: b'GET / HTTP/1.1")
    assert nonsense.trace == ""


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=fuzzed(ASKED))
def test_whatever_a_head_says_the_agent_ends_in_good_order(launchpad: Launchpad, data: bytes) -> None:
    """It leaves nothing, and complains in one line at most."""
    done = heard_by_agent(launchpad, data)
    assert not launchpad.survivors()
    assert not list(launchpad.scratch.iterdir())
    assert done.stderr.count(b"\n") <= 1
    assert b"Traceback" not in done.stderr
    assert all(type(event) in wire.MESSAGES for event in wire.Decoder().feed(done.stdout))


def test_no_heartbeat_timeout_is_too_long_to_wait_for() -> None:
    """The longest that --heartbeat-timeout takes is 31 years; epoll takes 24 days."""
    poll = Poll()
    heard: list[int] = []
    reader, writer = os.pipe()
    try:
        poll.watch(reader, heard.append)
        os.write(writer, b"x")
        poll.wait(time.monotonic() + 1e9)
        assert heard == [reader]
        poll.unwatch(reader)
    finally:
        os.close(reader)
        os.close(writer)
