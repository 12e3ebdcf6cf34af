"""Starts the node's ranks: forks them from the forkserver if there are modules to preload, else executes them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...protocol.commands import Start
from ...protocol.events import (
    STDERR,
    STDOUT,
    ImageUnused,
    ModulesImported,
    NotForked,
    RankExited,
    RankStarted,
    SpareReady,
    StartFailed,
)
from .. import PACKAGE
from ..outbox import OutputStream
from ..part import AgentHub
from ..parts import Parts
from . import forkserver_client, rank, rundir
from .input import Input
from .store import Store

if TYPE_CHECKING:
    import _socket

    from ..mpi.node_worlds import NodeWorlds

_EXECUTED = os.path.join(PACKAGE, "rank", "executed.py")

# How long the end of an attempt waits for a fork that is under way: it takes milliseconds.
_FORK_SECONDS = 1.0

# These end a rank that has not been forked yet, as they would end an interpreter that is importing torch.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


class Starter:
    """Owns the forkserver. `begun` is called with each rank once it has a process."""

    def __init__(
        self,
        hub: AgentHub,
        parts: Parts,
        store: Store,
        stdin: Input,
        files: tuple[int, int],
        begun: Callable[[rank.Rank], None],
        kept: forkserver_client.KeptFork | None = None,
        why_cold: str = "",
    ) -> None:
        self._poll = hub.poll
        self._outbox = hub.outbox
        self._folder = hub.folder
        self._hub = hub
        self._parts = parts
        self._store = store
        self._input = stdin
        self._files = files
        self._begun = begun
        self._kept = kept  # not used yet
        self._why_cold = why_cold  # not said yet
        self._lack: _socket.socket | None = None  # the keeper of images knows what was lacking until this is closed
        self._forkserver: forkserver_client.Forkserver | None = None
        self._opened = 0  # when it was started
        self._waiting: dict[int, tuple[dict[str, Any], rank.Outlets]] = {}  # ranks waiting to be forked
        self._spawned: dict[int, dict[str, Any]] = {}  # ranks waiting for MPI to be ready for them
        self._cancelled = 0  # a signal that came while a rank was being forked

    def start(self, start: Start, reap: Callable[[], None]) -> None:
        """Start the ranks. `reap` is called after each, so that exits are reported in order."""
        self._start = start
        self._stacks = self._hub.channel.path  # the socket over which ranks are asked
        self._shared = {**os.environ, **start.environ}
        self._shared.pop("", None)  # some shells export an empty name, which exec rejects
        for name, value in start.defaults.items():
            self._shared.setdefault(name, value)
        self._store.starting(start)
        self._input.starting(start)
        self._parts.starting(start, self._shared)
        self._may_begin = self._mpi is None or self._mpi.is_ready(0)
        self._failure = ""
        self._cancelled = 0
        if self._why_cold:
            self._outbox.say(ImageUnused(time.monotonic_ns(), self._why_cold))
            self._why_cold = ""
        if (start.preload or self._kept) and self._forkserver is None:
            self._open_forkserver()
        for entry in start.ranks:
            if self._may_fork(entry) or not self._may_begin:
                self._prepare(entry)
            else:
                self._execute(entry)
                reap()
        if self._mpi is not None and not self._may_begin:
            self._mpi.when_ready(0, self._allow)
        elif self._forkserver is not None and self._forkserver.state == "ready":
            self._order_all()
        if self._forkserver is None or self._forkserver.state != "importing":
            self._say_ready()

    def start_more(self, ranks: list[dict[str, Any]]) -> None:
        """Execute additional ranks."""

        def begin() -> None:
            for entry in ranks:
                if self._spawned.pop(entry["rank"], None):  # else a signal has ended it
                    self._execute(entry)

        assert self._mpi is not None
        self._spawned |= {entry["rank"]: entry for entry in ranks}
        self._mpi.when_ready(self._mpi.world_of(ranks[0]["rank"]), begin)

    def _allow(self) -> None:
        """MPI is ready for the ranks."""
        self._may_begin = True
        self._begin()

    def _begin(self) -> None:
        """Start the ranks that wait, once MPI and the forkserver are ready for them."""
        if not self._may_begin:
            return
        for number, (entry, outlets) in list(self._waiting.items()):
            if not self._may_fork(entry):
                del self._waiting[number]
                self._execute(entry, outlets)
        if self._waiting and self._forkserver is not None and self._forkserver.state == "ready":
            self._order_all()

    def _may_fork(self, entry: dict[str, Any]) -> bool:
        """Whether this rank is forked, if not now, then later."""
        return self._forkserver is not None and self._forkserver.state != "off" and not entry.get("executes")

    @property
    def _mpi(self) -> NodeWorlds | None:
        return self._hub.mpi

    @property
    def cwd(self) -> str:
        """The ranks' folder."""
        return self._start.cwd

    # Executed ranks.

    def _execute(self, entry: dict[str, Any], outlets: rank.Outlets | None = None) -> None:
        number = entry["rank"]
        environ = {**self._shared, **self._own_environ(entry)}
        if entry.get("python"):
            environ |= self._for_hooks(entry)
        if not self._failure:
            try:
                outlets = outlets or self._open_outlets(number)
                try:
                    argv = self._command(entry)
                    cwd = entry.get("cwd", self._start.cwd)
                    stdin = self._input.descriptor(number, outlets)
                    session, bound = self._own_session(entry), entry.get("bind")
                    begun = rank.start(
                        number, argv, environ, cwd, stdin, outlets, self._files, bound, own_session=session
                    )
                except OSError:
                    _close(outlets.stdout, outlets.stderr)
                    raise
                finally:
                    _close_far_ends(outlets)
                self._open_streams(begun, outlets)
                return
            except OSError as error:
                self._failure = f"its process can't be created: {error.strerror}"
        elif outlets is not None:
            _close(*outlets)
        self._outbox.say(StartFailed(time.monotonic_ns(), number, self._failure))

    def _open_outlets(self, number: int) -> rank.Outlets:
        outlets = rank.open_outlets(self._input.terminal(number))
        try:
            self._input.open(number, outlets)
            if self._mpi is None or not self._mpi.has(number):
                return outlets
            return outlets._replace(rank_link=self._mpi.open(number))
        except OSError:
            _close(*outlets)
            raise

    def _command(self, entry: dict[str, Any]) -> list[str]:
        argv: list[str] = entry["argv"]
        return [argv[0], "-u", _EXECUTED, *argv[2:]] if entry.get("python") else argv

    def _for_hooks(self, entry: dict[str, Any]) -> dict[str, str]:
        """Variables for rank/executed.py, which removes them from the environment."""
        return {
            "LAUNCHPAD_STACKS": self._stacks,
            "LAUNCHPAD_WATCHED": "1" if self._start.watched else "",
            "LAUNCHPAD_IN_MPI": "1" if self._in_mpi(entry) else "",
            "LAUNCHPAD_CALLS": entry.get("calls", ""),
            "LAUNCHPAD_DEBUG": "1" if entry.get("debug") else "",
        }

    def _own_environ(self, entry: dict[str, Any]) -> dict[str, str]:
        own = self._parts.environ(entry["rank"])
        own |= {name: value for name, value in self._start.interfaces.items() if name not in self._shared}
        own |= {**entry["environ"], "TORCHELASTIC_ERROR_FILE": rundir.error_file(self._folder, entry["rank"])}
        own["LAUNCHPAD_STOP_BY"] = rundir.stop_by_file(self._folder)
        return own

    def _in_mpi(self, entry: dict[str, Any]) -> bool:
        return self._mpi is not None and self._mpi.has(entry["rank"])

    def _own_session(self, entry: dict[str, Any]) -> bool:
        """Whether a rank gets a session of its own. Ranks of MPI share one, as they wait by yielding the CPU to others.

        sched_yield reaches only processes of the same session, as each session is a group of the scheduler (autogroup,
        sched(7)). 4 ranks on 2 cores took 27 ms for an all-reduce instead of 44 us.
        """
        return not self._in_mpi(entry) or bool(self._input.terminal(entry["rank"]))

    def _open_streams(self, begun: rank.Rank, outlets: rank.Outlets) -> None:
        begun.typed = self._input.is_typed(begun.rank)
        self._begun(begun)
        self._outbox.say(RankStarted(time.monotonic_ns(), begun.rank, begun.pid))
        for stream, fd in ((STDOUT, outlets.stdout), (STDERR, outlets.stderr)):
            self._outbox.open(OutputStream(begun.rank, stream, fd, self._start.window))

    # Forked ranks.

    def _open_forkserver(self) -> None:
        try:
            self._store.open_bell()
        except OSError as error:
            reason = f"the socket over which they request torch's store can't be created ({error.strerror})"
            self._outbox.say(NotForked(time.monotonic_ns(), reason))
            return
        start = self._start
        opened = self._take_kept()
        if opened is None:
            try:
                if start.preload:
                    opened = forkserver_client.Forkserver.started(start.argv, self._shared, start.cwd, self._files)
            except OSError:  # executing the ranks will fail likewise, and report it
                pass
            if opened is None:
                self._store.close_bell()
                return
        self._opened = time.monotonic_ns()
        self._forkserver = opened
        self._poll.watch(opened.link.fileno(), lambda _: self.hear())
        for fd in opened.streams:
            self._poll.watch(fd, self._on_printed)
        self._store.serve_by(opened)
        opened.prepare(start.preload, start.calls)

    def _take_kept(self) -> forkserver_client.Forkserver | None:
        """The forkserver of a kept image, if it is what a new one would be."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        start = self._start
        why_not = kept.why_not(start, self._shared)
        if not why_not:
            if kept.imported:
                self._say_imported(*kept.imported)
            return forkserver_client.Forkserver.kept(kept, start.argv, self._shared, start.cwd)
        os.kill(kept.pid, signal.SIGKILL)
        if kept.imported:
            return None
        self._outbox.say(ImageUnused(time.monotonic_ns(), why_not))
        from ...image import keeper_link

        self._lack = keeper_link.tell_lack(start.argv[0], start.preload, self._shared, why_not)
        return None

    def _on_printed(self, fd: int) -> None:
        assert self._forkserver is not None
        if not self._forkserver.read_printed(fd):
            self._poll.unwatch(fd)

    def _prepare(self, entry: dict[str, Any]) -> None:
        number = entry["rank"]
        try:
            self._waiting[number] = (entry, self._open_outlets(number))
        except OSError as error:
            reason = f"its pipes can't be created: {error.strerror}"
            self._outbox.say(StartFailed(time.monotonic_ns(), number, reason))

    def _order_all(self) -> None:
        assert self._forkserver is not None
        orders = self._store.serve_again() if self._start.store == "serve" else []
        for number, (entry, outlets) in self._waiting.items():
            self._forkserver.print_again(outlets)
            environ = self._own_environ(entry)
            bell = self._store.bell if self._start.store == "serve" else ""
            request = {
                "argv": entry["argv"],
                "calls": entry["calls"],
                "debug": entry["debug"],
                "bind": entry["bind"],
                "environ": environ,
                "agent": os.getpid(),
                "own_session": self._own_session(entry),
                "stacks": [self._stacks, self._start.watched],
                "store": [environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), bell] if self._start.store else [],
            }
            fds = (self._input.descriptor(number, outlets), *(fd for fd in outlets[2:] if fd >= 0))
            orders.append(forkserver_client.ForkOrder(number, request, fds))
        if self._start.once and self._forkserver.is_kept and orders and orders[0].request["own_session"]:
            self._store.leave_to_rank()
            self._forkserver.become(orders[0])
        else:
            self._forkserver.order(orders)

    def hear(self) -> None:
        """Handle messages from the forkserver."""
        if self._forkserver is None:
            return
        before = self._forkserver.state
        if not self._forkserver.hear(self._forked, self._failed):
            self._poll.unwatch(self._forkserver.link.fileno())
            if self._forkserver.state == "spent":
                self._forkserver.link.close()
                self._forkserver = None
                return
            if not self._forkserver.pid and before != "off":
                self._turn_off("the forkserver died")
                self._say_ready()
                return
        if before != "importing" or self._forkserver.state == "importing":
            return
        if self._forkserver.state == "ready":
            if not self._forkserver.is_kept:
                now = time.monotonic_ns()
                self._say_imported(now, (now - self._opened) / 1e9)
            self._begin()
        else:
            self._turn_off(self._forkserver.why_off)
        self._say_ready()

    def _say_imported(self, at: int, seconds: float) -> None:
        if self._start.ranks:
            self._outbox.say(ModulesImported(at, seconds, list(self._start.preload)))

    def _say_ready(self) -> None:
        if not self._start.ranks:
            self._outbox.say(SpareReady(time.monotonic_ns()))

    def _forked(self, number: int, pid: int) -> None:
        if number == forkserver_client.STORE:
            self._store.forked(pid)
            return
        _, outlets = self._waiting.pop(number)
        _close_far_ends(outlets)
        begun = rank.Rank(number, pid, None)
        self._open_streams(begun, outlets)
        if self._cancelled:
            begun.signal(self._cancelled)

    def _failed(self, number: int, reason: str) -> None:
        if number == forkserver_client.STORE:
            self._store.failed(f"can't get torch's store: {reason}")
            return
        _close(*self._waiting.pop(number)[1])
        self._outbox.say(StartFailed(time.monotonic_ns(), number, reason))

    def _turn_off(self, reason: str) -> None:
        """Stop forking: execute the waiting ranks and all later ones."""
        opened = self._forkserver
        assert opened is not None
        opened.state = "off"
        self._end_forkserver()
        opened.cancel_orders()
        if self._waiting:
            self._outbox.say(NotForked(time.monotonic_ns(), reason))
        self._begin()

    # Signals and exits.

    def signal(self, signum: int, *, stops: bool = False) -> None:
        """Apply a signal to ranks that have no process yet. `stops`: it asks the ranks to stop."""
        if (stops or signum in _ENDING) and (self._waiting or self._spawned):
            self._cancelled = signum
            in_flight = self._forkserver.cancel_orders() if self._forkserver and self._waiting else ()
            ended = [number for number in self._waiting if number not in in_flight]
            for number in ended:
                _close(*self._waiting.pop(number)[1])
            for number in (*ended, *self._spawned):
                self._outbox.say(RankExited(time.monotonic_ns(), number, -signum, 0, False))
            self._spawned.clear()
        elif signum in (signal.SIGSTOP, signal.SIGCONT) and self._forkserver is not None and self._forkserver.pid:
            self._forkserver.process.signal(signum)

    def exited(self, pid: int) -> None:
        """A child that is not a rank has exited."""
        if self._forkserver is not None and pid == self._forkserver.pid:
            self._forkserver.process.pid = 0
            self.hear()
            # What it had begun to fork goes on without it; the end of the link says that no more will come.
            if self._forkserver.state != "off" and not self._forkserver.is_forking:
                self._turn_off("the forkserver died")
                self._say_ready()
        elif self._kept is not None and pid == self._kept.pid:
            self._kept.link.close()
            self._kept, self._why_cold = None, "the process that was forked from it has died"
        elif pid == self._store.pid:
            self._store.exited()

    def finish(self, leave: bool) -> set[int]:
        """All ranks are gone: end the store and, with `leave`, the forkserver. Returns their pids."""
        self.hear()
        self._await_store()
        own = self.own
        self._store.end()
        if leave:
            self._end_forkserver()
        return own

    def _await_store(self) -> None:
        """If the store's process is being forked, wait until it is known, as it has to be ended, too."""
        if self._forkserver is not None and forkserver_client.STORE in self._forkserver.cancel_orders():
            select.select([self._forkserver.link], [], [], _FORK_SECONDS)
            self.hear()

    @property
    def own(self) -> set[int]:
        """The pids of our own processes, which are not reported."""
        return {pid for pid in (self._store.pid, self._forkserver.pid if self._forkserver else 0) if pid}

    def _end_forkserver(self) -> None:
        if self._forkserver is not None:
            self._forkserver.kill()


def _close_far_ends(outlets: rank.Outlets) -> None:
    _close(outlets.rank_stdout, outlets.rank_stderr, outlets.rank_link)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
