"""The agents of many worlds on one machine are forked and guarded by one process: what its end means, and theirs."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from pathlib import Path

import pytest

from launchpad.image import channel
from launchpad.protocol.commands import Hello
from launchpad.protocol.events import AgentFailed, AgentReady
from launchpad.transport.local import LocalLink
from launchpad.transport.zygote import Zygote
from tests.support.command import DEADLINE, MARK, Launchpad, wait_until

# Tells whom it descends from, up to its agent's guard, and ends when there is a file "end".
RANK = """\
import os, time
def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
agent = os.getppid()
print("of", agent, parent(agent), flush=True)
deadline = time.monotonic() + 60
while not os.path.exists("end"):
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""


@pytest.fixture
def own_environ(launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are started from here are the test's."""
    for name in (MARK, "TMPDIR"):
        monkeypatch.setenv(name, launchpad.environ[name])


FILE = """
[jobs.j.roles.a]
target = "rank.py"
nproc = 2
replicas = 5
"""


class Job:
    """A job of five worlds in the background, with the processes that its ranks descend from."""

    def __init__(self, launchpad: Launchpad) -> None:
        self._folder = launchpad.folder
        (self._folder / "job.toml").write_text(FILE)
        (self._folder / "rank.py").write_text(RANK)
        with (self._folder / "out").open("wb") as out:
            self.process = launchpad.start("run", "--config", "job.toml", "--job", "j", stdout=out)
        wait_until(lambda: len(self._found()) == 10, "the ranks to start")
        self.zygote = next(guard for name, _, guard in self._found() if name == "a.4")

    def _found(self) -> list[tuple[str, int, int]]:
        lines = re.findall(r"^\[(a\.\d) \d\] of (\d+) (\d+)$", (self._folder / "out").read_text(), re.MULTILINE)
        return [(world, *map(int, pids)) for world, *pids in lines]  # type: ignore[misc]

    def agent(self, world: str) -> int:
        """The pid of its agent."""
        return next(agent for name, agent, _ in self._found() if name == world)

    def guarded(self) -> set[str]:
        """The worlds whose agents the zygote guards."""
        return {name for name, _, guard in self._found() if guard == self.zygote}

    def end(self) -> tuple[int, str]:
        """Have the ranks end; returns the exit code and what launchpad said."""
        (self._folder / "end").touch()
        _, said = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, said.decode()


def test_the_agents_of_many_worlds_have_one_guard_whose_end_is_no_matter(launchpad: Launchpad) -> None:
    job = Job(launchpad)
    assert job.guarded() == {"a.0", "a.1", "a.2", "a.3", "a.4"}
    assert len({job.agent(f"a.{replica}") for replica in range(5)}) == 5
    os.kill(job.zygote, signal.SIGKILL)
    assert job.end() == (0, "")


def test_a_signal_that_is_sent_to_every_process_of_a_job_is_not_for_it(launchpad: Launchpad) -> None:
    job = Job(launchpad)
    os.kill(job.zygote, signal.SIGINT)
    assert job.end() == (0, "")


def test_an_agent_that_is_killed_is_reported_alone(launchpad: Launchpad) -> None:
    job = Job(launchpad)
    os.kill(job.agent("a.2"), signal.SIGKILL)
    _, said = job.process.communicate(timeout=DEADLINE)
    assert job.process.returncode == 4
    assert b"launchpad: the node of a.2 was lost: the agent was killed by signal 9; its ranks were killed\n" in said


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_when_launchpad_is_killed(launchpad: Launchpad, stopped: bool) -> None:
    job = Job(launchpad)
    if stopped:
        os.kill(job.zygote, signal.SIGSTOP)
    job.process.kill()
    job.process.wait(DEADLINE)
    wait_until(lambda: not launchpad.survivors(), "all processes to be gone", show=launchpad.survivors)


@pytest.mark.usefixtures("own_environ")
def test_agents_start_by_themselves_if_it_dies_before() -> None:
    first, zygote = guarding()
    second = LocalLink(zygote.fork())
    second.wait()
    os.kill(first._pid, signal.SIGKILL)
    third = LocalLink(zygote.fork())
    third.wait()
    assert (second.why_cold, bool(third.why_cold)) == ("", True)
    for link in (first, second, third):
        link.send(Hello("0", False, 0, 0.0))
        assert isinstance(next(link.messages()), AgentReady)
        link.close()


def guarding() -> tuple[LocalLink, Zygote]:
    """A link to an agent, and its guard as what forks others."""
    first = LocalLink()
    assert first.asks
    return first, Zygote(first.asks)


def sockets_of(pid: int) -> list[str]:
    """The sockets that a process has open."""
    opened = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            opened.append(os.readlink(link))
    return [name for name in opened if name.startswith("socket:")]


@pytest.mark.usefixtures("own_environ")
def test_answers_belong_to_their_requests() -> None:
    """In whatever order they are wanted, as where an error closes those that nobody has waited for."""
    first, zygote = guarding()
    others = [LocalLink(zygote.fork()) for _ in range(3)]
    for link in reversed(others):
        link.wait()
    signal.pidfd_send_signal(others[2]._forked, signal.SIGKILL)
    assert isinstance(next(others[2].messages()), AgentFailed)
    for link in (first, *others[:2]):
        link.send(Hello("0", False, 0, 0.0))
        assert isinstance(next(link.messages()), AgentReady)
    for link in (*reversed(others), first):
        link.close()


@pytest.mark.usefixtures("own_environ")
def test_one_that_answers_too_late_leaves_no_second_agent(launchpad: Launchpad) -> None:
    """It is stopped with two requests, and continued when agents have started without it."""
    first, zygote = guarding()
    os.kill(first._pid, signal.SIGSTOP)
    others = [LocalLink(zygote.fork()), LocalLink(zygote.fork())]
    for link in others:
        link.wait()
        assert link.why_cold
    os.kill(first._pid, signal.SIGCONT)
    wait_until(lambda: not sockets_of(first._pid), "it to have heard that nobody asks any more")
    for link in (first, *others):
        link.send(Hello("0", False, 0, 0.0))
        assert isinstance(next(link.messages()), AgentReady)
    # A guard and an agent for each; agents that were forked too late have exited, or are about to.
    wait_until(lambda: len(launchpad.survivors()) == 6, "six processes", show=launchpad.survivors)
    for link in (first, *others):
        link.close()


@pytest.mark.usefixtures("own_environ")
def test_one_that_stays_stopped_does_not_hide_the_end_of_an_agent(
    launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.1)
    first, zygote = guarding()
    os.kill(first._pid, signal.SIGSTOP)
    others = launchpad.survivors()
    link = LocalLink(zygote.fork())
    link.wait()
    assert "doesn't answer" in link.why_cold
    link.send(Hello("0", False, 0, 0.0))
    assert isinstance(next(link.messages()), AgentReady)
    (agent,) = {int(one.split()[0]) for one in {*launchpad.survivors()} - {*others}} - {link._pid}
    os.kill(agent, signal.SIGKILL)  # its guard then ends too
    end = select.poll()
    end.register(link._in, 0)
    wait_until(lambda: end.poll(0), "the end of the link")
    link.close()
    first.close()
