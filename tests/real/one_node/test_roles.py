"""Roles in a job file: several worlds in one job, their order, their ends, and the verdict over all of them."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until
from tests.support.needs import needs_torch

pytestmark = pytest.mark.usefixtures("from_image")

# It answers once it is asked for, dies at /die, and leaves a file when it is told to end.
SERVE = """\
import os, signal, socketserver, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

def end(*_):
    open("ended", "w").close()
    sys.exit(9)

signal.signal(signal.SIGTERM, end)
server = HTTPServer(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_HTTP"])), Handler)
open("listens", "w").close()
print("up", flush=True)
server.serve_forever()
"""

TRAIN = """\
import os, signal, sys, urllib.request
address = os.environ["LAUNCHPAD_SERVE_HTTP"]
names = "RANK WORLD_SIZE LOCAL_RANK ROLE_NAME".split()
print(*(os.environ[name] for name in names), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the error counts, not the end of the job
for path in sys.argv[1:] or ["/"]:
    urllib.request.urlopen(f"http://{address}{path}", timeout=30).read()
"""

FILE = """
[jobs.rl.roles.serve]
target = "serve.py"
service = true
ports = ["http"]
ready = "{ready}"
{more}

[jobs.rl.roles.train]
target = {target}
nproc = 2
after = "serve"
"""


def write(launchpad: Launchpad, *, ready: str = "http:/", more: str = "", target: str = '"train.py"') -> None:
    (launchpad.folder / "job.toml").write_text(FILE.format(ready=ready, more=more, target=target))
    (launchpad.folder / "serve.py").write_text(SERVE)
    (launchpad.folder / "train.py").write_text(TRAIN)


def run(launchpad: Launchpad, *args: object) -> subprocess.CompletedProcess[str]:
    return launchpad.run("run", "--config", "job.toml", "--job", "rl", *args)


@pytest.mark.parametrize("ready", ["http:/", "tcp:http", "line:up", "command:test -e listens"])
def test_a_trainer_starts_when_its_service_is_ready_which_ends_after_it(launchpad: Launchpad, ready: str) -> None:
    write(launchpad, ready=ready)
    done = run(launchpad)
    assert (done.returncode, done.stderr) == (0, ""), "its exit code 9 doesn't count"
    assert sorted(done.stdout.splitlines()) == ["[serve 0] up", "[train 0] 0 2 0 train", "[train 1] 1 2 1 train"]
    assert (launchpad.folder / "ended").exists()
    assert sorted(launchpad.run("logs").stdout.splitlines()) == sorted(done.stdout.splitlines())


def test_who_loses_a_service_that_died_is_its_victim(launchpad: Launchpad) -> None:
    write(launchpad, target='["train.py", "/", "/die", "/"]')
    done = run(launchpad)
    assert done.returncode == 7
    assert "launchpad: serve rank 0 failed first: exit code 7" in done.stderr
    assert "failed because of it: train rank" in done.stderr, done.stderr
    assert json.loads(launchpad.run("why", "--json").stdout)["exit_code"] == 7


def test_a_failed_trainer_ends_the_service(launchpad: Launchpad) -> None:
    write(launchpad)
    (launchpad.folder / "train.py").write_text("import os\nraise SystemExit(3 if os.environ['RANK'] == '1' else 0)\n")
    done = run(launchpad)
    assert done.returncode == 3
    assert "launchpad: train rank 1 failed first: exit code 3" in done.stderr
    assert "stopped because of it: serve rank 0" in done.stderr


def test_a_role_that_never_gets_ready_is_told_and_ends_the_job(launchpad: Launchpad) -> None:
    write(launchpad, ready="line:never", more="ready-timeout = 0.5")
    done = run(launchpad)
    assert done.returncode == 124
    assert "serve rank 0 failed first: was not ready within 0.5 s (it has not printed 'never')" in done.stderr
    assert "never started: train ranks 0-1" in done.stderr
    assert "train" not in done.stdout


def test_a_service_that_exits_with_0_has_failed(launchpad: Launchpad) -> None:
    write(launchpad)
    (launchpad.folder / "serve.py").write_text("")
    done = run(launchpad)
    assert done.returncode == 1
    assert "serve rank 0 failed first: is a service, and exited with code 0 while other roles still ran" in done.stderr


@pytest.mark.parametrize("phase", ["before", "while"])
def test_ctrl_c_ends_all_of_it(launchpad: Launchpad, phase: str) -> None:
    """Before a role has started, and while all run."""
    write(launchpad, ready="line:never" if phase == "before" else "line:up")
    (launchpad.folder / "train.py").write_text("import signal\nprint('runs', flush=True)\nsignal.pause()\n")
    seen = launchpad.folder / "out"
    with seen.open("wb") as out:
        process = launchpad.start("run", "--config", "job.toml", "--job", "rl", stdout=out)
        word = b"up" if phase == "before" else b"[train 1] runs"
        wait_until(lambda: word in seen.read_bytes(), "the ranks to run")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert b"launchpad: the job was stopped by SIGINT" in said


def test_roles_after_one_another_without_a_service(launchpad: Launchpad) -> None:
    (launchpad.folder / "job.toml").write_text(
        '[jobs.rl.roles.train]\ntarget = ["sh", "-c", "cat data"]\nafter = ["prepare"]\n'
        '[jobs.rl.roles.prepare]\ntarget = ["sh", "-c", "echo made > data"]\n'
    )
    done = run(launchpad)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[train   0] made\n", "")


@needs_torch
def test_worlds_have_stores_of_their_own(launchpad: Launchpad) -> None:
    (launchpad.folder / "group.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nones = torch.ones(1)\n"
        "dist.all_reduce(ones)\nprint('sum', int(ones))\ndist.destroy_process_group()\n"
    )
    (launchpad.folder / "job.toml").write_text(
        '[jobs.rl.roles.a]\ntarget = "group.py"\nnproc = 2\n[jobs.rl.roles.b]\ntarget = "group.py"\nnproc = 1\n'
    )
    done = run(launchpad)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[a 0] sum 2", "[a 1] sum 2", "[b 0] sum 1"]


def test_stacks_are_shown_by_role(launchpad: Launchpad) -> None:
    write(launchpad)
    (launchpad.folder / "train.py").write_text("import time\nprint('runs', flush=True)\ntime.sleep(1000)\n")
    seen = launchpad.folder / "out"
    with seen.open("wb") as out:
        process = launchpad.start("run", "--config", "job.toml", "--job", "rl", stdout=out)
        wait_until(lambda: seen.read_bytes().count(b"runs") == 2, "the ranks to run")
        shown = ""

        def both_sleep() -> bool:
            nonlocal shown
            done = launchpad.run("stacks")
            shown = done.stdout + done.stderr
            return "  train:\n    ranks 0-1 are in <module> at train.py:3: time.sleep(1000)" in shown

        wait_until(both_sleep, "both ranks to sleep", lambda: shown)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert "  serve:\n    rank 0 is in " in shown


def test_a_dry_run_shows_who_is_who(launchpad: Launchpad) -> None:
    write(launchpad)
    done = run(launchpad, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("role serve: rank 0 of the job\nrole train: ranks 1-2 of the job\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[jobs.rl]\nroles = 3\n", "jobs.rl.roles: write a table for each role, like [jobs.rl.roles.train]"),
        ("[jobs.rl.roles.a]\nnproc = 2\n", "jobs.rl.roles.a has no target"),
        ('[jobs.rl.roles.a]\ntarget = "x.py"\ntimeout = 3\n', "jobs.rl.roles.a, timeout: it is no setting of a role"),
        ('[jobs.rl.roles.a]\ntarget = "x.py"\nnproc = "many"\n', "jobs.rl.roles.a, nproc: 'many' is not a number"),
        ('[jobs.rl.roles.a]\ntarget = "gone.py"\n', "jobs.rl.roles.a: no such script: gone.py"),
        ('[jobs.rl.roles.a]\ntarget = "true"\nafter = "b"\n', "jobs.rl.roles.a, after: there is no role 'b', only a"),
        ('[jobs.rl.roles.a]\ntarget = "true"\nservice = true\n', "jobs.rl.roles: all roles are services"),
        ('[jobs.rl.roles.a]\ntarget = "true"\nready = "tcp:x"\n', "jobs.rl.roles.a, ready: 'tcp:x' needs a port"),
        ('[jobs.rl.roles.a]\ntarget = "true"\nports = ["80"]\n', "'80' is not a port's name; launchpad chooses"),
        ('[jobs.rl]\nbind = "core"\n[jobs.rl.roles.a]\ntarget = "true"\n', "--bind can't be combined with"),
        ('[jobs.rl.roles.a]\ntarget = "true"\nreplicas = 0\n', "replicas: write a number from 1 to"),
        ('[jobs.rl]\ntarget = "true"\n[jobs.rl.roles.a]\ntarget = "true"\n', "each role has its own target"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(launchpad: Launchpad, text: str, said: str) -> None:
    (launchpad.folder / "job.toml").write_text(text)
    done = run(launchpad)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_detached_job_of_roles(launchpad: Launchpad) -> None:
    write(launchpad)
    job = run(launchpad, "--detach").stdout.strip()
    assert launchpad.run("wait", job).returncode == 0
    assert "[train 1] 1 2 1 train" in launchpad.run("logs", job).stdout
    assert (launchpad.folder / "ended").exists()
