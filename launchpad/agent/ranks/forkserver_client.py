"""The agent's side of the forkserver: starts it, sends it fork requests in batches, and reads its replies."""

import _socket
import json
import os
import signal
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ... import linux
from ...image import channel
from ...named import NamedTuple
from .. import PACKAGE
from . import rank

if TYPE_CHECKING:
    from ...image.fit import Image
    from ...protocol.commands import Start

# Next to the package if that was sent to this node (transport/ssh/bundle.py): what ranks import of launchpad.
_FOR_RANKS = os.path.join(os.path.dirname(PACKAGE), "for_ranks")

MAIN = os.path.join(PACKAGE, "forkserver", "__main__.py")
# Every rank has to repeat what the imports print, so that must not be more than a terminal buffers.
PRINTED_BYTES = 3000

STORE = -1  # stands in for a rank number

# Ranks per request. They start when all of them have been forked, on other cores while the next ones are; but each
# request costs one extra process.
_AT_ONCE = 8


def command_line(argv: Sequence[str]) -> list[str]:
    """The forkserver's command line, for ranks with this one."""
    return [argv[0], "-u", MAIN, *argv[2:]]


def bring_launchpad(environ: dict[str, str]) -> None:
    """Let ranks with these variables import the launchpad that was sent with the agent, if it was."""
    before = environ.get("PYTHONPATH", "")
    if os.path.isdir(_FOR_RANKS) and _FOR_RANKS not in before.split(os.pathsep):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, _FOR_RANKS)))


class ForkOrder(NamedTuple):
    """A process to fork."""

    number: int  # the rank, or STORE
    request: dict[str, Any]
    fds: tuple[int, ...]  # for the process; they must stay open until it has been forked


class KeptFork(NamedTuple):
    """A forkserver that is the fork of a kept image: it has imported what it is to import, and waits for its job."""

    pid: int
    link: _socket.socket
    image: "Image"
    asked: Collection[str]  # the modules that its imports asked for
    found: Collection[str]  # those of them that are regular ones
    printed: tuple[bytes, bytes]  # by the imports, on standard output and error
    # Of an image made for this job: when it had imported all (time.monotonic_ns()), and how many seconds that took
    imported: tuple[int, float] | None = None

    def why_not(self, start: "Start", environ: dict[str, str]) -> str:
        """Why it isn't what a new one with these variables would be; "" if it is."""
        from ...image import fit, loaded, place
        from ...rank import program

        image = self.image
        python = place.interpreter(start.argv[0])
        wanted = fit.ColdStart(python, tuple(start.preload), environ, image.affinity, image.stack)
        if why := fit.misfit(image, wanted):
            return why
        first = program.first_on_path(start.argv[2:], start.calls, start.cwd)
        shadow = loaded.shadow(first, self.asked, self.found) if first else ""
        return f"{shadow} comes first on the path" if shadow else ""


class Forkserver:
    """A process that imports the modules, then forks. `state`: importing, ready, off, spent (it has become a rank)."""

    def __init__(
        self, process: rank.Rank, link: _socket.socket, streams: tuple[int, ...], terms: dict[str, Any]
    ) -> None:
        """`streams`: its standard output and error, unless it has printed already; `terms`: what it is to know."""
        self.state = "importing"
        self.why_off = ""
        self.process = process
        self.link = link
        self.streams = streams
        self.printed = [b"", b""]  # on standard output and error
        self._terms = terms
        self._orders: list[ForkOrder] = []
        self._asked = False  # a request is in flight
        self._in_flight: set[int] = set()  # numbers of its processes that have not been forked yet

    @classmethod
    def started(cls, argv: Sequence[str], environ: dict[str, str], cwd: str, files: tuple[int, int]) -> "Forkserver":
        """A new one. `argv` is a rank's whole command line; it uses the same interpreter. Raises OSError."""
        link, far_end = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        # Pipes, like those of the ranks: what Python detects about its standard streams at startup stays valid.
        null, null_writer = os.pipe()
        os.close(null_writer)
        outlets = rank.open_outlets([])._replace(rank_link=far_end.fileno())
        try:
            process = rank.start(-1, command_line(argv), environ, cwd, null, outlets, files)
        except OSError:
            link.close()
            channel.close((outlets.stdout, outlets.stderr))
            raise
        finally:
            channel.close((null, outlets.rank_stdout, outlets.rank_stderr))
            far_end.close()
        assert process.status_fd is not None
        os.close(process.status_fd)  # if exec fails here, it fails for the ranks too, and they report it
        return cls(process, link, (outlets.stdout, outlets.stderr), {})

    @classmethod
    def kept(cls, fork: KeptFork, argv: Sequence[str], environ: dict[str, str], cwd: str) -> "Forkserver":
        """One that is the fork of a kept image, and takes over this command line, environment and folder."""
        terms = {"argv": command_line(argv), "environ": environ, "cwd": cwd}
        made = cls(rank.Rank(-1, fork.pid, None), fork.link, (), terms)
        made.printed = list(fork.printed)
        return made

    @property
    def pid(self) -> int:
        """The pid of its process."""
        return self.process.pid

    @property
    def is_forking(self) -> bool:
        """Whether a request is in flight."""
        return self._asked

    def prepare(self, modules: Sequence[str], calls: str) -> None:
        """Have it import the modules. It replies when it has. `calls`: as in Start's ranks."""
        self._send({"preload": list(modules), "calls": calls, **self._terms}, ())

    @property
    def is_kept(self) -> bool:
        """Whether it is the fork of a kept image."""
        return not self.streams

    def become(self, order: ForkOrder) -> None:
        """Have a kept one become a rank itself, in the session that it leads, which saves two forks.

        It gets no SIGCONT, which the rank would see; there is no rank yet that could have stopped it.
        """
        self._in_flight, self._asked = {order.number}, True
        self._send({"becomes": order.request, "number": order.number}, order.fds)

    def order(self, orders: Sequence[ForkOrder]) -> None:
        """Queue processes to be forked. The store goes first: ranks that run already wait for it."""
        self._orders = sorted([*self._orders, *orders], key=lambda order: order.number != STORE)
        self._next()

    def cancel_orders(self) -> Collection[int]:
        """Drop the queue; returns the numbers of processes whose requests are already in flight."""
        self._orders.clear()
        return self._in_flight

    def read_printed(self, fd: int) -> bool:
        """Read what the forkserver has printed; False at end-of-file."""
        data = linux.read_now(fd, 1 << 16)
        if data is None:
            return True
        if self.state != "importing":
            return bool(data)
        which = self.streams.index(fd)
        self.printed[which] = (self.printed[which] + data)[: PRINTED_BYTES + 1]
        return bool(data)

    def print_again(self, outlets: rank.Outlets) -> None:
        """Repeat in a rank's pipes what the imports printed."""
        for printed, to in zip(self.printed, (outlets.rank_stdout, outlets.rank_stderr), strict=True):
            if printed:
                os.write(to, printed)

    def hear(self, forked: Callable[[int, int], None], failed: Callable[[int, str], None]) -> bool:
        """Read the replies that have arrived; False once there is no forkserver any more."""
        while True:
            try:
                data = self.link.recv(1 << 16, _socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                return False
            kind, *words = json.loads(data)
            if kind == "ready":
                self._ready(words[0])
                continue
            if kind == "forked":
                self._in_flight.discard(words[0])
                forked(*words)
                continue
            if kind == "became":
                self.state = "spent"
                forked(words[0], self.pid)
                return False
            unforked, self._in_flight, self._asked = self._in_flight, set(), False
            for number in sorted(unforked):
                failed(number, words[0])
            self._next()

    def _ready(self, why_off: str) -> None:
        for which, fd in enumerate(self.streams):
            while self.read_printed(fd) and len(self.printed[which]) <= PRINTED_BYTES:
                if not _readable(fd):
                    break
        if any(len(printed) > PRINTED_BYTES for printed in self.printed):
            why_off = why_off or "the imports print too much"
        self.why_off = why_off
        self.state = "off" if why_off else "ready"
        self._next()

    def _next(self) -> None:
        """Send the head of the queue, unless a request is in flight."""
        if self.state != "ready" or self._asked or not self._orders:
            return
        most = _AT_ONCE + (self._orders[0].number == STORE)
        batch, self._orders = self._orders[:most], self._orders[most:]
        self._in_flight, self._asked = {order.number for order in batch}, True
        processes = [{"number": order.number, "fds": len(order.fds), **order.request} for order in batch]
        self._send({"processes": processes}, [fd for order in batch for fd in order.fds])
        if self.pid:  # a rank may have stopped it
            os.kill(self.pid, signal.SIGCONT)

    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            channel.send(self.link, request, fds)
        except OSError:  # it is gone, or a limit has been reached: the ranks are executed once its exit is noticed
            self.kill()

    def kill(self) -> None:
        """End it, but not what it has just forked, which may still be in its process group."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])
