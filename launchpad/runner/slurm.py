"""The nodes of a Slurm allocation: one srun starts `launchpad join` on each of them, which dials back to us.

A node on which roles have several worlds is one for each of them.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from launchpad import linux
from launchpad.console.message import QueuedMessages
from launchpad.errors import LaunchpadError, NodeError
from launchpad.job.allocation import INSTEAD
from launchpad.job.hosts import Host, some_of
from launchpad.job.offer import NodeOffer
from launchpad.job.slurm import srun_line
from launchpad.job.world import join_seconds, parse_conf, place
from launchpad.protocol.commands import JobEnded
from launchpad.runner.joining import Reminders
from launchpad.runner.options import RunOptions
from launchpad.runner.this_machine import own_addresses
from launchpad.transport.join.server import TELL_SECONDS, JoinedLink, JoinServer, listen
from launchpad.transport.local import SECRET

# How much of what srun and its tasks say is kept, and shown if they fail: lines.
_KEPT_LINES = 200
_SHOWN_LINES = 6

# srun ends by itself when its tasks have. On TERM it kills them first, and waits long for a node that doesn't answer;
# if it is killed, its child has Slurm cancel what is left.
_SRUN_EXIT_SECONDS = 10.0
_SRUN_TERM_SECONDS = 2.0

# How long a task of srun's tries to reach us. We listen before it is started, or we have been killed.
_DIAL_SECONDS = 60.0

# How long a node has to join again after it was lost.
AGAIN_SECONDS = 30.0

# What says nothing about the reason when srun has failed.
_NOISE = (
    "srun: launch/slurm:",
    "srun: cluster configuration lacks",
    "srun: Job step aborted",
    "srun: error: Timed out waiting for job step",
)


class _Srun:
    """One srun, which starts a task on each of some nodes."""

    def __init__(
        self, nodes: Sequence[int], argv: Sequence[str], environ: dict[str, str], ended: Callable[[], None]
    ) -> None:
        """`nodes`: by their numbers in the job. `ended` is called in a thread when srun has exited."""
        self.nodes = nodes
        self.gone = threading.Event()
        self.failed = ""  # why it could not be started
        self._argv = argv
        self._environ = environ
        self._ended = ended
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._unwanted = False

    def start(self) -> None:
        """Start it, in a thread: a signal interrupts the main thread, also between the start and the note of it."""
        threading.Thread(target=self._run, name="srun", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._lock:
                if self._unwanted:
                    return
                self._process = subprocess.Popen(
                    self._argv,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is ours to handle
                )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._lines.append(line.rstrip())
            self._process.wait()
        except OSError as error:
            self.failed = f"srun: {error.strerror}; this is a Slurm allocation, so srun has to be on PATH; or {INSTEAD}"
        finally:
            self.gone.set()
            self._ended()

    def said(self) -> list[str]:
        """The last that srun and its tasks have said, each thing once."""
        lines = dict.fromkeys(line for line in list(self._lines) if line and not line.startswith(_NOISE))
        return list(lines)[-_SHOWN_LINES:]

    def close(self) -> None:
        """Wait until it has exited; end it if it doesn't."""
        if not self.gone.wait(_SRUN_EXIT_SECONDS):
            self.end()

    def end(self) -> None:
        """Have it kill its tasks, and exit."""
        with self._lock:
            self._unwanted = True
        if self._process is not None and not self.gone.is_set():
            self._process.terminate()  # srun alone at first: what it has forked is to see to its tasks if it fails
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SRUN_TERM_SECONDS)
            if self._process.poll() is None:
                self._process.kill()
            linux.end_group(self._process.pid, _SRUN_TERM_SECONDS)


class SrunNodes:
    """The nodes, in their order. As a context manager: at the end they are told how it ended, and are left."""

    def __init__(self, hosts: Sequence[Host], options: RunOptions, say: Callable[[str], None]) -> None:
        """Listen for the nodes. Raises NodeError."""
        self._names = [host.name for host in hosts]
        self._every = set(self._names) == {host.name for host in options.hosts.allocation}
        self._messages = QueuedMessages(say)
        self._seconds = join_seconds(parse_conf(options.nodes.rdzv_conf))
        self._changed = threading.Condition()
        self._links: dict[int, JoinedLink] = {}
        self._sruns: list[_Srun] = []
        self._told = False
        self._absent: list[int] = []  # those that have not joined, or are lost, when the job ends
        self._secret = os.urandom(32).hex()
        self._server = _listen(self._secret.encode(), self)

    def _start(self, nodes: Sequence[int], every: bool) -> _Srun:
        names = [self._names[node] for node in nodes]
        argv, environ = srun_line(names, every, os.environ)
        places = ",".join(place(address, self._server.port) for address in _addresses(names))
        argv += [sys.executable, "-P", "-m", "launchpad", "join", "--quiet"]
        argv += [f"--rdzv-conf=join_timeout={_DIAL_SECONDS:g}", places]
        srun = _Srun(nodes, argv, {**environ, SECRET: self._secret}, self._notify)
        self._sruns.append(srun)  # before it is started, so that `__exit__` ends it whenever a signal comes
        srun.start()
        return srun

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # In the server's thread.

    def state(self) -> dict[str, Any]:
        """Nothing: nodes that srun has started follow no other head."""
        return {}

    def told(self, place: tuple[str, int], term: int) -> None:
        """Likewise."""

    def admit(self, link: JoinedLink, offered: dict[str, Any]) -> dict[str, Any]:
        """Judge a node."""
        name = NodeOffer.from_json(offered).name
        with self._changed:
            if name not in self._names:
                return {"error": f"{name} is none of the job's nodes, which are {some_of(self._names)}"}
            free = [node for node, one in enumerate(self._names) if one == name and not self._is_known(node)]
            if not free:
                return {"error": f"{name} has joined already"}
            self._links[free[0]] = link
        return {"welcome": []}

    def joined(self, link: JoinedLink) -> None:  # noqa: ARG002
        """An admitted node knows that it is."""
        self._notify()

    def refused(self, address: str, reason: str) -> None:
        """Tell the user: only what srun has started knows the secret."""
        self._messages.say(f"a node at {address} can't join: {reason}")

    # In the head's own threads.

    def wait(self) -> list[JoinedLink]:
        """Start launchpad on all nodes, and wait for them. Raises NodeError."""
        nodes = range(len(self._names))
        self._await(self._start(nodes, self._every), self._seconds)
        return [self._links[node] for node in nodes]

    def _await(self, srun: _Srun, seconds: float) -> None:
        """Wait for the nodes that this srun starts."""
        start = time.monotonic()
        reminders = Reminders(start)
        with self._changed:
            while True:
                left = list(dict.fromkeys(self._names[node] for node in srun.nodes if not self._is_here(node)))
                if not left:
                    return
                now = time.monotonic()
                missing = f"no launchpad on {some_of(left)} of the Slurm allocation"
                if srun.failed:
                    raise NodeError(srun.failed)
                if srun.gone.is_set():
                    raise NodeError("\n  ".join([f"{missing}: srun has ended; {INSTEAD}", *srun.said()]))
                if now >= start + seconds:
                    raise NodeError("\n  ".join([f"{missing} within {seconds:g} s", *srun.said()]))
                if reminders.due(now):
                    self._messages.say("\n  ".join([f"{missing} after {now - start:.0f} s", *srun.said()]))
                self._changed.wait(reminders.wait(now, start + seconds))

    def _is_known(self, node: int) -> bool:
        link = self._links.get(node)
        return link is not None and not link.gone.is_set()

    def _is_here(self, node: int) -> bool:
        return self._is_known(node) and self._links[node].ready

    def reopen(self, node: int) -> JoinedLink:
        """Start launchpad again on a lost node. Raises NodeError if it doesn't join in time."""
        with self._changed:
            before = self._links.get(node)
        if before is not None and not before.gone.is_set():
            before.abandon()
            before.gone.wait(TELL_SECONDS)
        srun = self._start([node], len(self._names) == 1 and self._every)
        try:
            self._await(srun, AGAIN_SECONDS)
        except NodeError:
            srun.end()
            raise
        return self._links[node]

    def tell(self, lines: list[str], code: int) -> None:  # noqa: ARG002  # what srun's tasks print is not shown
        """Tell the nodes how the job ended."""
        self._told = True
        self._absent = [node for node in range(len(self._names)) if not self._is_here(node)]
        self._server.tell(list(self._links.values()), JobEnded(code, []))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._told:
            self.tell([], _code(error))
        self._server.stop_listening()
        for link in self._links.values():
            link.close()
        for srun in self._sruns:
            if self._absent:  # their tasks would not end by themselves
                srun.end()
            else:
                srun.close()
        self._server.close()
        self._messages.close()


def _code(error: BaseException | None) -> int:
    match error:
        case None:
            return 0
        case LaunchpadError():
            return error.exit_code
        case SystemExit(code=int(code)):
            return code
    return 1


def _listen(secret: bytes, gate: SrunNodes) -> JoinServer:
    """At a free port of all addresses. Raises NodeError."""
    try:
        return JoinServer(listen(("::", 0)), secret, gate)  # IPv4 too
    except OSError:  # this kernel has no IPv6
        try:
            return JoinServer(listen(("0.0.0.0", 0)), secret, gate)
        except OSError as error:
            raise NodeError(f"can't listen for the nodes on this machine: {error.strerror}") from None


def _addresses(nodes: Sequence[str]) -> list[str]:
    """This machine's addresses, those first from which it reaches the nodes; loopback if there is no other."""
    towards = [address for name in (nodes[0], nodes[-1]) for address in _towards(name)]
    rest = sorted((address for address in own_addresses() if not address.is_link_local), key=lambda one: one.version)
    found = list(dict.fromkeys([*towards, *map(str, rest)]))
    return found or ["127.0.0.1"]


def _towards(name: str) -> Iterator[str]:
    """The addresses from which this machine reaches the node, if its name has an address here."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, place in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect(place)  # chooses the route, and sends nothing
                yield str(trial.getsockname()[0])
