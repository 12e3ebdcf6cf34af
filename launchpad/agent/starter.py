"""Starts the node's ranks: forked from the nursery where modules are to be imported once for all, else executed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..commands import Start
from ..events import STDERR, STDOUT, NotForked, RankExited, RankStarted, StartFailed
from . import nursery, port, rank, scratch
from .outbox import Outbox, Stream
from .poll import Poll

if TYPE_CHECKING:
    from .input import Input
    from .mpi import Mpi

_EXECUTED = os.path.join(os.path.dirname(nursery.MAIN), "executed.py")

# To a rank that has not been forked yet these do what they would have done to an interpreter that is importing torch.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

# Beside the agent's package, where it was sent to this node (transport/ssh/parcel.py).
_FOR_RANKS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "for_ranks")


class Starter:
    """Owns the nursery, the store's process and the port. `begun` is called with each rank that has a process."""

    def __init__(
        self,
        poll: Poll,
        outbox: Outbox,
        folder: str,
        stdin_fd: int | None,
        files: tuple[int, int],
        begun: Callable[[rank.Rank], None],
    ) -> None:
        self._poll = poll
        self._outbox = outbox
        self._folder = folder
        self._stdin_fd = stdin_fd
        self._files = files
        self._begun = begun
        self._nursery: nursery.Nursery | None = None
        self._port: port.Port | None = None
        self._store = 0  # the pid of the store's process
        self._asked_for_store = False
        self._waiting: dict[int, tuple[dict[str, Any], rank.Outlets]] = {}  # ranks to be forked
        self._input: Input | None = None
        self.has_call = False  # what the ranks are to call has come to the job's folder
        self.brings_launchpad = False  # whether ranks are to find the launchpad that came with the agent
        self.mpi: Mpi | None = None
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._cancelled = 0  # the signal that came while a rank was being forked

    def hold_port(self, wanted: int, address: str = port.ADDRESS) -> int:
        """Hold the rendezvous port, and no other any more; returns its number, -1 where it is taken."""
        if self._port is not None:
            self._port.close()
        self._port = port.Port(wanted, address)
        return self._port.number

    def start(self, start: Start, reap: Callable[[], None], answers: str) -> None:
        """Start the ranks; `reap` is called between two, so that deaths are told in their order.

        `answers`: the socket by which they can be asked where they are.
        """
        self._start = start
        self._answers = answers
        self._shared = {**os.environ, **start.environ}
        self._shared.pop("", None)  # some shells export one; exec takes none
        for name, value in start.defaults.items():
            self._shared.setdefault(name, value)
        if self.brings_launchpad and os.path.isdir(_FOR_RANKS):
            paths = [self._shared.get("PYTHONPATH", ""), _FOR_RANKS]
            self._shared["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.mpi is not None:
            self.mpi.prepare(self._shared)
        self._failure = ""
        self._cancelled = 0
        if start.sends_input and self._input is None:
            from .input import Input

            self._input = Input(self._poll, self._outbox)
            self._stdin_fd = self._input.reader
        if start.preload and self._nursery is None:
            self._open_nursery()
        for entry in start.ranks:
            if self._nursery is not None and self._nursery.state != "off":
                self._prepare(entry)
            else:
                self._execute(entry)
                reap()
        if self._nursery is not None and self._nursery.state == "ready":
            self._order_all()

    def start_more(self, ranks: list[dict[str, Any]]) -> None:
        """Execute these too."""
        for entry in ranks:
            self._execute(entry)

    @property
    def window(self) -> int:
        """Bytes of a rank's stream that may be under way."""
        return self._start.window

    def take_input(self, data: bytes) -> None:
        """Bytes of the head's standard input."""
        if self._input is not None:
            self._input.take(data)

    # Executed ranks.

    def _execute(self, entry: dict[str, Any], outlets: rank.Outlets | None = None) -> None:
        number = entry["rank"]
        environ = {**self._shared, **self._own_environ(entry)}
        if entry.get("python"):
            how = ("mpi " if self._in_mpi(entry) else "") + ("eager" if self._start.watched else "")
            environ["LAUNCHPAD_ANSWERS"] = f"{how}:{self._answers}"
        if not self._failure:
            try:
                outlets = outlets or self._open_outlets(number)
                try:
                    argv = self._command(entry)
                    cwd = entry.get("cwd", self._start.cwd)
                    begun = rank.start(number, argv, environ, cwd, self._stdin(number), outlets, self._files)
                except OSError:
                    _close(outlets.stdout, outlets.stderr)
                    raise
                finally:
                    _close_far_ends(outlets)
                self._open_streams(begun, outlets)
                return
            except OSError as error:
                self._failure = f"no process could be made for it: {error.strerror}"
        elif outlets is not None:
            _close(*outlets)
        self._outbox.say(StartFailed(time.monotonic_ns(), number, self._failure))

    def _open_outlets(self, number: int) -> rank.Outlets:
        outlets = rank.open_outlets(self._terminal(number))
        if self.mpi is None or not self.mpi.has(number):
            return outlets
        try:
            return outlets._replace(rank_link=self.mpi.open(number))
        except OSError:
            _close(*outlets)
            raise

    def _command(self, entry: dict[str, Any]) -> list[str]:
        argv: list[str] = entry["argv"]
        calls = argv[2:3] in (["--call"], ["--pickled"])  # a function: no interpreter has such options
        return [argv[0], "-u", _EXECUTED, *argv[2:]] if calls or entry.get("python") else argv

    def _own_environ(self, entry: dict[str, Any]) -> dict[str, str]:
        own = {**scratch.call_files(self._folder, entry["rank"])} if self.has_call else {}
        own |= {**entry["environ"], "TORCHELASTIC_ERROR_FILE": scratch.error_file(self._folder, entry["rank"])}
        return own | {"PMI_FD": "3"} if self._in_mpi(entry) else own

    def _in_mpi(self, entry: dict[str, Any]) -> bool:
        return self.mpi is not None and self.mpi.has(entry["rank"])

    def _terminal(self, number: int) -> list[int]:
        return self._start.terminal if self._stdin(number) != self._null else []

    def _stdin(self, number: int) -> int:
        return self._null if number != self._start.stdin_rank or self._stdin_fd is None else self._stdin_fd

    def _open_streams(self, begun: rank.Rank, outlets: rank.Outlets) -> None:
        self._begun(begun)
        self._outbox.say(RankStarted(time.monotonic_ns(), begun.rank, begun.pid))
        for stream, fd in ((STDOUT, outlets.stdout), (STDERR, outlets.stderr)):
            self._outbox.open(Stream(begun.rank, stream, fd, self._start.window))

    # Forked ranks.

    def _open_nursery(self) -> None:
        try:
            opened = nursery.Nursery(self._start.ranks[0]["argv"], self._shared, self._start.cwd, self._files)
            self._bell = port.Bell(self._folder)
        except OSError:  # executing the ranks will meet the same, and say it
            return
        self._nursery = opened
        self._poll.watch(opened.link.fileno(), lambda _: self.hear())
        for fd in opened.printed:
            self._poll.watch(fd, self._on_printed)
        self._poll.watch(self._bell.fileno(), lambda _: self._on_bell())
        opened.prepare(self._start.preload)

    def _on_printed(self, fd: int) -> None:
        assert self._nursery is not None
        if not self._nursery.read_printed(fd):
            self._poll.unwatch(fd)

    def _prepare(self, entry: dict[str, Any]) -> None:
        number = entry["rank"]
        try:
            self._waiting[number] = (entry, self._open_outlets(number))
        except OSError as error:
            reason = f"no pipes could be made for it: {error.strerror}"
            self._outbox.say(StartFailed(time.monotonic_ns(), number, reason))

    def _order_all(self) -> None:
        assert self._nursery is not None
        orders = []
        for number, (entry, outlets) in self._waiting.items():
            self._nursery.print_again(outlets)
            environ = self._own_environ(entry)
            bell = self._bell.path if self._start.store == "serve" else ""
            request = {
                "argv": entry["argv"],
                "environ": environ,
                "agent": os.getpid(),
                "answers": [self._answers, self._start.watched],
                "store": [environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), bell] if self._start.store else [],
            }
            fds = (self._stdin(number), *(fd for fd in outlets[2:] if fd >= 0))
            orders.append(nursery.Order(number, request, fds))
        self._nursery.order(orders)

    def hear(self) -> None:
        """Take what the nursery says."""
        if self._nursery is None:
            return
        before = self._nursery.state
        if not self._nursery.hear(self._forked, self._failed):
            self._poll.unwatch(self._nursery.link.fileno())
        if before == "importing" and self._nursery.state == "ready":
            self._order_all()
        elif before == "importing" and self._nursery.state == "off":
            self._turn_off(self._nursery.why_off)

    def _forked(self, number: int, pid: int) -> None:
        if number == nursery.STORE:
            self._store = pid
            return
        _, outlets = self._waiting.pop(number)
        _close_far_ends(outlets)
        begun = rank.Rank(number, pid, None)
        self._open_streams(begun, outlets)
        if self._cancelled:
            begun.signal(self._cancelled)

    def _failed(self, number: int, reason: str) -> None:
        if number == nursery.STORE:
            return
        _close(*self._waiting.pop(number)[1])
        self._outbox.say(StartFailed(time.monotonic_ns(), number, reason))

    def _turn_off(self, reason: str) -> None:
        """Execute the ranks instead, those that were to be forked now and all later ones."""
        opened = self._nursery
        assert opened is not None
        opened.state = "off"
        self._end_nursery()
        opened.cancel_orders()
        if self._waiting:
            self._outbox.say(NotForked(time.monotonic_ns(), reason))
        waiting, self._waiting = self._waiting, {}
        for entry, outlets in waiting.values():
            self._execute(entry, outlets)

    def _on_bell(self) -> None:
        """A rank asks for the store: the first time, listen for it and have its process forked."""
        assert self._nursery is not None
        assert self._port is not None
        if not self._asked_for_store and self._nursery.state == "ready" and self._port.listen():
            self._asked_for_store = True
            shared = self._start.ranks[0]["environ"]["GROUP_WORLD_SIZE"] != "1"
            address = [self._port.address, self._port.number, os.getpid(), shared]
            self._nursery.order([nursery.Order(nursery.STORE, {"serve": address}, (self._port.fileno(),))])
        self._bell.answer(self._asked_for_store)

    # The end.

    def signal(self, signum: int) -> None:
        """Do to ranks that have no process yet what the signal would do to them."""
        if signum in _ENDING and self._waiting:
            self._cancelled = signum
            under_way = self._nursery.cancel_orders() if self._nursery else ()
            for number in [number for number in self._waiting if number not in under_way]:
                _close(*self._waiting.pop(number)[1])
                self._outbox.say(RankExited(time.monotonic_ns(), number, -signum, 0, False))
        elif signum in (signal.SIGSTOP, signal.SIGCONT) and self._nursery is not None and self._nursery.pid:
            self._nursery.process.signal(signum)

    def exited(self, pid: int) -> None:
        """A child that is no rank is gone."""
        if self._nursery is not None and pid == self._nursery.pid:
            self._nursery.process.pid = 0
            self.hear()
            if self._nursery.state != "off":
                self._turn_off("the process that was to fork them died")
        elif pid == self._store:
            self._store = 0

    def finish(self, leave: bool) -> set[int]:
        """All ranks are gone: end the store, and the nursery when leaving. Returns whom to leave alone."""
        self.hear()
        if self._store:
            os.kill(self._store, signal.SIGKILL)
        if self._asked_for_store and self._port:
            self._port.stop_listening()
            self._asked_for_store = False
        if leave:
            self._end_nursery()
        return {self._nursery.pid} if self._nursery is not None and self._nursery.pid and not leave else set()

    @property
    def own(self) -> set[int]:
        """Processes of ours, which nobody is to be told of."""
        return {pid for pid in (self._store, self._nursery.pid if self._nursery else 0) if pid}

    def _end_nursery(self) -> None:
        if self._nursery is not None and self._nursery.pid:
            self._nursery.process.signal(signal.SIGKILL)


def _close_far_ends(outlets: rank.Outlets) -> None:
    _close(outlets.rank_stdout, outlets.rank_stderr, outlets.rank_link)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
