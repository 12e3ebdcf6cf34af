"""Takes over a job whose launchpad was killed, and whose ranks go on without it (--keep-running)."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.errors import ConnectError, NodeError, UsageError, failed_hosts
from launchpad.head import own_signals
from launchpad.head.bringup import BringUp
from launchpad.head.checkpoints import HeadState, boot
from launchpad.head.nodes import Nodes
from launchpad.job.hosts import Host, some_of
from launchpad.job.outcome import signal_name
from launchpad.output.mark import Resumed
from launchpad.protocol.events import AgentFailed, HeadResumed
from launchpad.record import checkpoint
from launchpad.record.checkpoint import Checkpoint
from launchpad.record.liveness import own_process
from launchpad.record.resume_lock import ResumeLock
from launchpad.runner.connector import Connector
from launchpad.runner.options import HostOptions
from launchpad.runner.takeover import Before
from launchpad.transport import Link
from launchpad.transport.held_link import HeldLink, HolderGone, LinkState
from launchpad.transport.memory import MemoryLink
from launchpad.transport.ssh.bundle import Startup

if TYPE_CHECKING:
    from launchpad.runner.departure import Departure


def resume(
    folder: str, found: Checkpoint, lock: ResumeLock, closing: ExitStack, departure: Departure | None = None
) -> int:
    """Run the job to its end, and return its exit code. Raises LaunchpadError if that can't be begun."""
    lock.sign()  # to leave the terminal, it has forked
    name = os.path.basename(folder)
    head: HeadState = pickle.loads(found.head)  # a private file of the user's
    ahead = 0.0 if head.boot == boot() else time.monotonic() - head.now - (time.time() - head.wall)
    head.move_clock(ahead)
    bringup = BringUp()
    bringup.job = name
    try:
        with own_signals.exit_on_signals():
            links = _Links(head, closing)
            bringup.nodes = links.nodes(bringup, ahead)
            links.dial()
            from launchpad.runner.supervise import supervise  # 40 ms, while the hosts answer

            links.await_one(name)
    except own_signals.Stopped as stopped:
        say_on_stderr(f"stopped by {signal_name(stopped.signum)}; job {name} still goes on without launchpad")
        raise
    checkpoint.cut(folder, found)
    own_signals.catch(bringup.post)
    event = HeadResumed(
        *(time.monotonic_ns(), time.time(), os.getpid(), *own_process()),
        away=max(0.0, time.time() - head.wall),
        ahead=int(ahead * 1e9),
    )
    before = Before(found, head, Resumed(os.path.realpath(folder), found.states), event)
    return supervise(
        *(bringup, head.planner, say_nothing, links.reopen, found.settings.reports, None),
        departure=departure,
        before=before,
    )


class _Links:
    """Those to the job's hosts."""

    def __init__(self, head: HeadState, closing: ExitStack) -> None:
        self._head = head
        self._closing = closing
        self._connectors: dict[tuple[str, str], Connector] = {}
        self._links = {
            number: self._connector(state).resume(_host(state), state)
            for number, state in head.links.items()
            if number in head.open
        }
        for link in self._links.values():
            closing.callback(link.close)
        self._wanted = [number for number in self._links if not head.links[number].ended]
        self._outcomes: queue.SimpleQueue[tuple[str, ConnectError | None]] = queue.SimpleQueue()

    def _connector(self, state: LinkState) -> Connector:
        """For hosts that are reached the same way."""
        ssh, ssh_config = state.way.ssh, state.way.ssh_config
        if (ssh, ssh_config) not in self._connectors:
            options = HostOptions(
                ssh=ssh or None,  # type: ignore[arg-type]
                ssh_config=ssh_config or None,
                keep_running=state.seconds,
                heartbeat_timeout=state.silence,
            )
            self._connectors[ssh, ssh_config] = connector = Connector(options)
            self._closing.callback(connector.abandon)
        return self._connectors[ssh, ssh_config]

    def nodes(self, bringup: BringUp, ahead: float) -> Nodes:
        """The nodes as they were; those that were open are read once there is somebody who leads.

        There may be so much to read that nothing else gets to run.
        """
        links: list[Link] = []
        for number, name in enumerate(self._head.names):
            link = MemoryLink(name, remote=True)
            links.append(self._links.get(number, link))
            if number in self._head.open and number not in self._links:
                link.say(AgentFailed(time.monotonic_ns(), "its ranks ended with the launchpad before this one"))
                link.hang_up()
        nodes = Nodes(links, bringup.inbox.put, 0.0)
        for number in range(len(nodes)):
            if number in self._head.open:
                nodes[number].clock = self._head.clocks[number].moved(int(ahead * 1e9))
                nodes.prepare(number)
            else:
                nodes.ended(number)
        return nodes

    def dial(self) -> None:
        """Begin to reach the hosts that have something of the job."""
        states = [self._head.links[number] for number in self._wanted]
        for connector in self._connectors.values():
            connector.begin([_host(state) for state in states if self._connector(state) is connector])
        for number in self._wanted:
            link = self._links[number]
            threading.Thread(target=self._take_over, args=(link,), name=f"dial-{link.name}", daemon=True).start()

    def _take_over(self, link: HeldLink) -> None:
        failure: ConnectError | None = None
        try:
            link.take_over()
        except ConnectError as error:
            failure = error
        except Exception as error:  # an unexpected error from a library fails only this host
            failure = ConnectError("protocol", link.name, f"{type(error).__name__}: {error}")
        self._outcomes.put((link.name, failure))

    def await_one(self, job: str) -> None:
        """Wait until one of them is reached; those that are not will count as cut off. Raises NodeError if none can be.

        If the user is asked for a passphrase or the like, all are waited for. From then on, the terminal is the job's.
        """
        try:
            self._await_one(job)
        finally:
            for connector in self._connectors.values():
                connector.stop_asking()

    def _await_one(self, job: str) -> None:
        failures: dict[str, ConnectError] = {}
        for _ in self._wanted:
            name, failure = self._outcomes.get()
            if failure is not None:
                failures[name] = failure
            elif not any(connector.asked for connector in self._connectors.values()):
                return
        if len(failures) < len(self._wanted) or not failures:
            return
        if all(isinstance(error, HolderGone) for error in failures.values()):
            why_gone = next(iter(failures.values())).text
            raise NodeError(f"job {job} can't be resumed: on {some_of(sorted(failures))}, {why_gone}")
        why = {name: f"{error.kind}: {error.text}" for name, error in failures.items()}
        raise NodeError(failed_hosts(why, len(failures), "", f"can't be reached, so job {job} was not resumed"))

    def reopen(self, number: int) -> Link:
        """A new link to a host that is lost. Raises ConnectError."""
        state = self._head.links.get(number)
        if state is None:
            raise UsageError("it was the machine of the launchpad before this one")
        link = self._connector(state).connect(_host(state), Startup(state.way.python))
        self._closing.callback(link.close)
        return link


def _host(state: LinkState) -> Host:
    return Host(state.name, state.way.user, state.way.port, here=state.way.here)
