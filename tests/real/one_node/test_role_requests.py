"""`launchpad restart ROLE` and `stop --role`: done to a role of a running job, while all others run on."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.command import DEADLINE, Launchpad, wait_until

pytestmark = pytest.mark.usefixtures("from_image")

RANK = """\
import os, signal, sys, time
own = os.environ
print("pid", os.getpid(), "start", flush=True)
if "obeys" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
deadline = time.monotonic() + 60
while "obeys" in sys.argv or not os.path.exists("end"):
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""

FILE = """
[jobs.j.roles.serve]
target = ["rank.py", "obeys"]
service = true
replicas = 2

[jobs.j.roles.train]
target = ["rank.py"]
nproc = 2
"""


class Running:
    """A job of roles in the background."""

    def __init__(self, launchpad: Launchpad) -> None:
        self.launchpad = launchpad
        (launchpad.folder / "job.toml").write_text(FILE)
        (launchpad.folder / "rank.py").write_text(RANK)
        self._seen = launchpad.folder / "out"
        with self._seen.open("wb") as out:
            self.process = launchpad.start("run", "--config", "job.toml", "--job", "j", stdout=out)
        self.starts(4)

    def starts(self, count: int) -> dict[str, int]:
        """How often each rank has started, once so many have."""
        wait_until(lambda: self._seen.read_bytes().count(b"start") >= count, "the ranks to start")
        found = re.findall(r"^\[(\S+) +(\d)\] pid \d+ start$", self._seen.read_text(), re.MULTILINE)
        return {f"{role} {rank}": found.count((role, rank)) for role, rank in found}

    def end(self) -> tuple[int, str]:
        (self.launchpad.folder / "end").touch()
        _, said = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, said.decode()


def ask(launchpad: Launchpad, *words: str) -> tuple[int, str]:
    """What a running job answers; it takes questions a little after its start."""
    found = (2, "")

    def answered() -> bool:
        nonlocal found
        done = launchpad.run(*words)
        found = done.returncode, done.stderr
        return "you have no running job" not in found[1]

    wait_until(answered, "the job to take questions")
    return found


@pytest.mark.parametrize(
    ("role", "again"),
    [
        ("serve.1", ["serve.1 0"]),
        ("serve", ["serve.0 0", "serve.1 0"]),
        ("train", ["train 0", "train 1"]),
    ],
)
def test_a_role_starts_again(launchpad: Launchpad, role: str, again: list[str]) -> None:
    job = Running(launchpad)
    code, said = ask(launchpad, "restart", role)
    assert (code, said) == (0, f"{', '.join(dict.fromkeys(one.split()[0] for one in again))}: starting again\n")
    starts = job.starts(4 + len(again))
    assert {name for name, count in starts.items() if count == 2} == set(again)
    code, said = job.end()
    assert code == 0, said
    assert said.count("as somebody has asked for it") == len({one.split()[0] for one in again})


def test_a_role_is_stopped_and_has_ended_well(launchpad: Launchpad) -> None:
    job = Running(launchpad)
    assert ask(launchpad, "stop", "--role", "serve.0") == (0, "serve.0: stopping\n")
    assert ask(launchpad, "stop", "--role", "train") == (0, "train: stopping\n")
    _, said = job.process.communicate(timeout=DEADLINE)
    assert job.process.returncode == 0, said.decode()


def test_what_can_not_be_done_is_said(launchpad: Launchpad) -> None:
    job = Running(launchpad)
    code, said = ask(launchpad, "restart", "sevre")
    assert (code, said) == (2, "launchpad: error: there is no role 'sevre', only serve.0, serve.1, train\n")
    assert ask(launchpad, "stop", "--role", "serve.0")[0] == 0

    def is_not_running() -> bool:
        return ask(launchpad, "restart", "serve.0") == (2, "launchpad: error: serve.0 is not running\n")

    wait_until(is_not_running, "the service to end")
    assert job.end()[0] == 0


def test_stacks_logs_and_top_by_role(launchpad: Launchpad) -> None:
    job = Running(launchpad)
    code, said = ask(launchpad, "stacks", "--role", "sevre")
    assert (code, said) == (2, "launchpad: error: there is no role 'sevre', only serve.0, serve.1, train\n")
    shown = launchpad.run("stacks", "--role", "serve").stdout
    assert "  serve.1:\n" in shown
    assert "train" not in shown
    found = json.loads(launchpad.run("top", "--json").stdout)["ranks"]
    assert [(one["role"], one["role_rank"]) for one in found] == [
        ("serve.0", 0), ("serve.1", 0), ("train", 0), ("train", 1),
    ]  # fmt: skip
    assert re.search(r"^ *train 1 +running ", launchpad.run("top", "--once").stdout, re.MULTILINE)
    assert job.end()[0] == 0
    lines = launchpad.run("logs", "--role", "train", "--rank", 1).stdout.splitlines()
    assert [line.partition(" pid")[0] for line in lines] == ["[train   1]"]
    assert launchpad.run("logs", "--role", "serve").stdout.count("start") == 2
    assert "error: --role x: there are serve.0, serve.1, train\n" in launchpad.run("logs", "--role", "x").stderr
