"""The contract of a Link: one suite for all of them, with real agents behind all but the one in memory."""

from __future__ import annotations

import _socket
import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launchpad._version import __version__
from launchpad.job.offer import NodeOffer
from launchpad.job.plan import Member
from launchpad.job.spec import JobSpec, Target
from launchpad.job.world import Meeting
from launchpad.protocol.commands import Call, Hello, Ping
from launchpad.protocol.events import AgentFailed, AgentReady, Pong
from launchpad.runner.joining import Joining
from launchpad.transport import Delivering, Link
from launchpad.transport.local import LocalLink
from launchpad.transport.memory import MemoryLink
from launchpad.transport.process import Openings, ProcessLink
from launchpad.transport.ssh.bundle import Startup
from launchpad.transport.ssh.config import SshConfig
from launchpad.transport.ssh.connection_pool import ConnectionPool
from launchpad.transport.ssh.link import SshLink
from launchpad.transport.ssh.openssh import OpenSsh
from launchpad.transport.zygote import Zygote
from tests.support.command import DEADLINE, MARK, Launchpad, wait_until
from tests.support.ports import free_port
from tests.support.sshd import SSHD, Cluster

Open = Callable[[], Link]

REAL = ["local", "zygote", "paramiko", "openssh", "process", "joined"]
PIECE = bytes(1 << 20)

# How long a send may take. It only queues, but the machine may be busy.
AT_ONCE = 5.0


def _member(offer: NodeOffer) -> Member:
    return Member(offer.name, 1, "")


class Played(MemoryLink):
    """A MemoryLink whose agent greets and answers pings."""

    def __init__(self) -> None:
        super().__init__("n1")
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while command := self.heard.get(timeout=DEADLINE):
            if isinstance(command, Hello):
                self.say(AgentReady(time.monotonic_ns(), time.time(), 0, "n1", 1, -1, None, 1, 1, 0))
            elif isinstance(command, Ping):
                self.say(Pong(time.monotonic_ns(), command.time))

    def close(self) -> None:
        super().close()
        self.heard.put(None)
        self._thread.join(DEADLINE)


class Heard:
    """What a link's agent says, read by a thread as the head does it."""

    def __init__(self, link: Link) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        read = self._deliver if isinstance(link, Delivering) else self._read
        self._thread = threading.Thread(target=read, args=(link,))
        self._thread.start()

    def _deliver(self, link: Delivering) -> None:
        link.deliver(self._events.put)

    def _read(self, link: Link) -> None:
        try:
            for event in link.messages():
                self._events.put(event)
        except OSError as error:  # the process in between says why
            self._events.put(error)
        finally:
            self._events.put(None)

    def next(self) -> Any:
        return self._events.get(timeout=DEADLINE)

    def rest(self) -> list[Any]:
        """All until the end of the link."""
        found = list(iter(self.next, None))
        self._thread.join(DEADLINE)
        return found


def asks_of(link: LocalLink) -> _socket.socket:
    """The socket over which the link's guard can be asked for further agents."""
    assert link.asks
    return link.asks


@pytest.fixture
def start(request: pytest.FixtureRequest, launchpad: Launchpad, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens a link of the kind that the test is run for; agents have the test's mark and temporary folder."""
    kind = request.param
    for name in (MARK, "TMPDIR"):
        monkeypatch.setenv(name, launchpad.environ[name])
    cache = launchpad.folder / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    links: list[Link] = []

    def keep(link: Link) -> Link:
        links.append(link)
        return link

    startup = Startup("python3", exact=True)
    if kind == "memory":
        yield lambda: keep(Played())
    elif kind == "local":
        yield lambda: keep(LocalLink())
    elif kind == "zygote":
        first = LocalLink()
        greet(first)
        zygote = Zygote(asks_of(first))

        def fork() -> Link:
            link = LocalLink(zygote.fork())
            link.wait()
            assert not link.why_cold
            return keep(link)

        yield fork
        for link in (*links, first):
            link.close()
    elif kind == "process":
        entered = startup._replace(enter=("env", f"{MARK}={launchpad.mark}"))

        def enter() -> Link:
            return keep(Openings().begin("n1", lambda: ProcessLink("n1", entered.words), entered, DEADLINE))

        yield enter
    elif kind == "joined":
        port = free_port()
        joining = Joining(Meeting("127.0.0.1", port, 2), JobSpec(Target("program", "true")), b"none", print, _member)

        def join() -> Link:
            launchpad.start("join", f"127.0.0.1:{port}")
            ((link, _),) = joining.wait()
            return keep(link)

        yield join
        joining.leave()
    else:
        if SSHD is None:
            pytest.skip("sshd is not installed (openssh-server)")
        environ = {MARK: launchpad.mark, "TMPDIR": str(launchpad.scratch), "XDG_CACHE_HOME": str(cache)}
        with Cluster(launchpad.folder / "ssh", 1, environ=environ) as cluster:
            config = SshConfig(str(cluster.ssh_config))
            pool, ssh = ConnectionPool(config), OpenSsh(config, accept_new=False, ask=None)
            if kind == "paramiko":
                yield lambda: keep(SshLink("n1", pool.connect("n1"), startup))
            else:
                yield lambda: keep(ssh.connect("n1", "", 0, startup))
            for link in links:
                link.close()
            ssh.abandon()
            pool.close()
    for link in links:
        link.close()


every = pytest.mark.parametrize("start", ["memory", *REAL], indirect=True)
every_real = pytest.mark.parametrize("start", REAL, indirect=True)


def greet(link: Link) -> tuple[Heard, AgentReady]:
    """Start to read, and wait until the agent is ready."""
    heard = Heard(link)
    link.send(Hello(__version__, False, 0, 0.0))
    ready = heard.next()
    assert isinstance(ready, AgentReady)
    return heard, ready


@every
def test_commands_arrive_in_order_and_so_do_the_answers(start: Open) -> None:
    link = start()
    heard, _ = greet(link)
    for number in range(500):
        link.send(Ping(number))
    assert [heard.next().ping for _ in range(500)] == list(range(500))
    link.close()
    assert all(isinstance(event, AgentFailed) for event in heard.rest()), "it was not told to finish"


@every
def test_closing_ends_the_messages_and_may_be_repeated(start: Open) -> None:
    link = start()
    heard, ready = greet(link)
    link.close()
    heard.rest()
    link.send(Ping(1))
    link.close()
    assert not ready.pid or not os.path.exists(f"/proc/{ready.pid}")


@every_real
def test_a_link_that_nobody_reads_can_be_closed(start: Open) -> None:
    start().close()


@every_real
def test_an_agent_that_does_not_read_blocks_nobody(start: Open) -> None:
    link = start()
    heard, ready = greet(link)
    os.kill(ready.pid, signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(24):
        link.send(Call(PIECE))
    link.send(Ping(7))
    assert time.monotonic() - began < AT_ONCE
    os.kill(ready.pid, signal.SIGCONT)
    while not isinstance(event := heard.next(), Pong):
        pass
    assert event.ping == 7
    link.close()
    heard.rest()


@every_real
def test_a_killed_agent_is_reported_and_ends_the_link(start: Open) -> None:
    link = start()
    heard, ready = greet(link)
    os.kill(ready.pid, signal.SIGKILL)
    (failed,) = heard.rest()
    assert isinstance(failed, AgentFailed)
    assert failed.reason == "the agent was killed by signal 9"
    link.send(Ping(1))
    link.close()


@every_real
def test_an_agent_that_stands_still_can_be_abandoned(start: Open, launchpad: Launchpad) -> None:
    """It is killed by its guard, once it has noticed; the head waits for neither."""
    others = {*launchpad.scratch.glob("launchpad-*")}
    link = start()
    heard, ready = greet(link)
    os.kill(ready.pid, signal.SIGSTOP)
    if not link.remote:
        link.close()  # to abandon an agent on this machine is to close its link
    link.abandon()
    assert not [event for event in heard.rest() if not isinstance(event, AgentFailed)]
    wait_until(lambda: not os.path.exists(f"/proc/{ready.pid}"), "the guard to kill the agent")
    left = functools.partial(launchpad.scratch.glob, "launchpad-*")
    wait_until(lambda: {*left()} == others, "the guard to remove the agent's folder")
