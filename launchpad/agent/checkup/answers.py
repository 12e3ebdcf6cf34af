"""Answers the questions of a checkup, each in a thread of its own: one that hangs holds up no other."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ... import linux
from ...image import keeper_control
from ...protocol import wire
from ...protocol.commands import Check
from ...protocol.events import Checked, Event
from ...protocol.health import Identity, KeptImages, LookUp
from ...protocol.printable import printable
from ..host.probe import machine
from . import host, mpi, software
from .network import EchoServer, probe, stream
from .quick import LOOKS, seen
from .trial_rank import TrialRank

_Request = dict[str, Any]


class Checkup:
    """One connection: commands come from descriptor 0, answers leave through descriptor 1."""

    def __init__(self, keeper: str) -> None:
        """`keeper`: where that of kept images would listen."""
        self._writing = threading.Lock()
        self._listener = EchoServer()
        self._rank = TrialRank(keeper)
        self._world = mpi.TrialWorld(self._say)
        self._answers: dict[str, Callable[[_Request], Any]] = {
            "identity": _identity,
            "network": lambda request: self._listener.listen(request["secret"]),
            "lookup": _look_up,
            "probes": probe,
            "heard": lambda _: self._listener.heard(),
            "stream": stream,
            **LOOKS,
            "cache": lambda request: host.folder(host.expanded("cache", request)),
            "load": lambda _: host.load(),
            "software": software.versions,
            "platform": software.platform,
            "code": software.code_files,
            "sshd": lambda _: host.ssh_server(),
            "kept": lambda _: _kept(keeper),
            "import": self._rank.begin,
            "all_reduce": self._rank.finish,
            "mpi": mpi.look,
            "world": self._world.run,
        }

    def run(self) -> NoReturn:
        """Answer until the head hangs up."""
        decoder = wire.Decoder()
        while data := _read():
            for command in decoder.feed(data):
                if isinstance(command, Check):
                    threading.Thread(target=self._answer, args=[command], daemon=True).start()
                else:
                    self._world.hear(command)
        self._rank.kill()
        self._world.kill()
        os._exit(0)  # whatever still hangs

    def _answer(self, command: Check) -> None:
        facts, problem = seen(lambda request: self._answers[command.subject](request), command.request)
        self._say(Checked(time.monotonic_ns(), command.subject, facts, problem))

    def _say(self, event: Event) -> None:
        frame = wire.encode(event)
        with self._writing:
            try:
                linux.write_all(1, frame)
            except OSError:  # the head is gone
                os._exit(1)


def _read() -> bytes:
    try:
        return os.read(0, 1 << 16)
    except OSError:
        return b""


def _identity(_: _Request) -> Identity:
    return Identity(printable(socket.gethostname()), machine(), sys.executable, time.time())


def _look_up(request: _Request) -> LookUp:
    return LookUp([_addresses_of(name) for name in request["names"]])


def _addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(place[4][0]) for place in found))


def _kept(keeper: str) -> KeptImages:
    return KeptImages([", ".join(image["preload"]) or "plain Python" for image in keeper_control.ready(keeper)])
