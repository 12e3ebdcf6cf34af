"""The agent's side of the nursery: start it, ask it to fork ranks, one at a time, and hear what came of it."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from . import rank

MAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "nursery", "__main__.py")
# What its imports print, every rank is to print; no more than a terminal takes at once.
PRINTED_BYTES = 3000

STORE = -1  # in the place of a rank's number

# So many descriptors go with one request; the kernel takes 253 (SCM_MAX_FD), and one is the request's own.
_DESCRIPTORS = 240


class Order(NamedTuple):
    """A process to be forked."""

    number: int  # the rank, or STORE
    request: dict[str, Any]
    fds: tuple[int, ...]  # for it; to be kept open until it has been forked


class Nursery:
    """A process that imports the modules, then forks. `state`: importing, ready, off."""

    def __init__(self, argv: Sequence[str], environ: dict[str, str], cwd: str, files: tuple[int, int]) -> None:
        """`argv` is a rank's whole command line; its interpreter is the nursery's. Raises OSError."""
        self.state = "importing"
        self.why_off = ""
        self._orders: list[Order] = []
        self._under_way: set[int] = set()  # numbers
        self.link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Pipes, as the ranks have: what Python finds out about its standard streams at its start stays right.
        null, null_writer = os.pipe()
        os.close(null_writer)
        outlets = rank.open_outlets([])._replace(rank_link=far.fileno())
        self.printed = {outlets.stdout: b"", outlets.stderr: b""}
        self._streams = (outlets.stdout, outlets.stderr)
        try:
            command = [argv[0], "-u", MAIN, *argv[2:]]
            self.process = rank.start(-1, command, environ, cwd, null, outlets, files)
        finally:
            _close((null, outlets.rank_stdout, outlets.rank_stderr))
            far.close()
        assert self.process.status_fd is not None
        os.close(self.process.status_fd)  # where it can't be executed, neither can the ranks, and they will tell

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def prepare(self, modules: Sequence[str]) -> None:
        """Have it import the modules; `hear` will be called when it has."""
        self._send({"preload": list(modules)}, ())

    def order(self, orders: Sequence[Order]) -> None:
        """Have processes forked, after what was ordered before."""
        self._orders += orders
        self._next()

    def cancel_orders(self) -> Collection[int]:
        """Forget what was ordered, but for what is under way; the numbers of that."""
        self._orders.clear()
        return self._under_way

    def read_printed(self, fd: int) -> bool:
        """Take what the nursery has printed; False at its end."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if self.state != "importing":
            return bool(data)
        self.printed[fd] = (self.printed[fd] + data)[: PRINTED_BYTES + 1]
        return bool(data)

    def print_again(self, outlets: rank.Outlets) -> None:
        """Write into a rank's pipes what the imports have printed."""
        for fd, to in zip(self._streams, (outlets.rank_stdout, outlets.rank_stderr), strict=True):
            if self.printed[fd]:
                os.write(to, self.printed[fd])

    def hear(self, forked: Callable[[int, int], None], failed: Callable[[int, str], None]) -> bool:
        """Take what the nursery says now; False where it has nothing more to say."""
        while True:
            try:
                data = self.link.recv(1 << 16, socket.MSG_DONTWAIT)
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
                self._under_way.discard(words[0])
                forked(*words)
                continue
            left, self._under_way = self._under_way, set()
            for number in sorted(left):
                failed(number, words[0])
            self._next()

    def _ready(self, why_off: str) -> None:
        for fd in self._streams:
            while self.read_printed(fd) and len(self.printed[fd]) <= PRINTED_BYTES:
                if not _readable(fd):
                    break
            if len(self.printed[fd]) > PRINTED_BYTES:
                why_off = why_off or "importing prints much"
        self.why_off = why_off
        self.state = "off" if why_off else "ready"
        self._next()

    def _next(self) -> None:
        """Hand over what was ordered, all at once: the ranks of one request cost one process more than they are."""
        if self.state != "ready" or self._under_way or not self._orders:
            return
        share = len(self._orders[0].fds)
        batch = [order for order in self._orders[: _DESCRIPTORS // share] if len(order.fds) == share]
        self._orders = self._orders[len(batch) :]
        self._under_way = {order.number for order in batch}
        processes = [{"number": order.number, **order.request} for order in batch]
        self._send({"processes": processes}, [fd for order in batch for fd in order.fds])

    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        # A command line may be longer than the longest message on a socket.
        sheet = os.memfd_create("launchpad-request")
        try:
            os.write(sheet, json.dumps(request).encode())
            os.lseek(sheet, 0, os.SEEK_SET)
            rights = array.array("i", [sheet, *fds])
            self.link.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:  # it is gone; its exit tells
            pass
        finally:
            os.close(sheet)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])
