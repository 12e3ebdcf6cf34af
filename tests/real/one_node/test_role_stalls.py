"""--stall-timeout with roles: a service that waits is no stall, a world that hangs beside others is one."""

from __future__ import annotations

import re

import pytest

from tests.support.command import DEADLINE, Launchpad

pytestmark = pytest.mark.usefixtures("from_image")

# Waits for requests that never come, or talks all the time.
SERVE = """\
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_HTTP"])))
while "talks" in sys.argv:
    print("still here", flush=True)
    time.sleep(0.2)
while True:
    listener.accept()
"""

# Computes without a word for longer than the time limit, or waits for ever.
TRAIN = """\
import queue, sys, time
if "hangs" in sys.argv:
    queue.SimpleQueue().get()
until = time.monotonic() + 4
while time.monotonic() < until:
    pass
"""

FILE = """
[jobs.j.roles.serve]
target = ["serve.py", "{serve}"]
service = true
ports = ["http"]
ready = "tcp:http"

[jobs.j.roles.train]
target = ["train.py", "{train}"]
after = "serve"
"""


def run(launchpad: Launchpad, serve: str, train: str) -> tuple[int, str]:
    (launchpad.folder / "serve.py").write_text(SERVE)
    (launchpad.folder / "train.py").write_text(TRAIN)
    (launchpad.folder / "job.toml").write_text(FILE.format(serve=serve, train=train))
    done = launchpad.run("run", "--stall-timeout", 2, "--config", "job.toml", "--job", "j", timeout=DEADLINE)
    return done.returncode, done.stderr


def test_a_service_that_waits_beside_a_trainer_that_computes_is_no_stall(launchpad: Launchpad) -> None:
    assert run(launchpad, "waits", "computes") == (0, "")


def test_a_world_that_hangs_beside_a_service_that_talks_is_told_by_name(launchpad: Launchpad) -> None:
    code, said = run(launchpad, "talks", "hangs")
    assert code == 124
    assert "the job was stopped: train hung, with no output or progress for " in said
    assert re.search(r"train:\n.*rank 0 is in .* at train\.py:3", said)
