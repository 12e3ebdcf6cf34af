"""What a session of calls has the loop do: send commands to nodes, and calls to the nodes that are other machines."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from launchpad.head.hub import Hub
from launchpad.head.part import Part
from launchpad.head.sender import PIECE_BYTES, Window
from launchpad.named import NamedTuple
from launchpad.protocol.commands import Command, NextCall
from launchpad.protocol.events import ChunksTaken


class Orders(NamedTuple):
    """Send these commands, each to a node that is still connected."""

    commands: Sequence[tuple[int, Command]]


class SendCall(NamedTuple):
    """Send the call in a file, which is closed then, to these nodes."""

    file: int
    nodes: Sequence[int]


class CallSender(Part):
    """Sends calls in pieces, with a window for each node."""

    takes = (Orders, SendCall, ChunksTaken)

    def __init__(self, hub: Hub) -> None:
        self._nodes = hub.nodes
        self._windows: dict[int, deque[Window]] = {}

    def on(self, source: int, message: Any) -> None:
        """Take what the session wants, and what a node has taken."""
        match message:
            case Orders(commands=commands):
                for node, command in commands:
                    if node in self._nodes.open:
                        self._nodes.send(node, command)
            case SendCall():
                self._send(message)
            case ChunksTaken(size=size):
                self._taken(source, size)

    def _send(self, call: SendCall) -> None:
        """Begin to send a call."""
        import mmap

        size = os.fstat(call.file).st_size
        view = memoryview(mmap.mmap(call.file, size, access=mmap.ACCESS_READ))
        os.close(call.file)
        for node in call.nodes:
            self._windows.setdefault(node, deque()).append(Window(_pieces(view)))
            self._advance(node)

    def _taken(self, node: int, size: int) -> None:
        """A node has taken so many bytes."""
        windows = self._windows.get(node)
        if windows:
            windows[0].taken(size)
            if windows[0].done:
                windows.popleft()
            self._advance(node)

    def _advance(self, node: int) -> None:
        windows = self._windows[node]
        if windows and node in self._nodes.open:
            for piece in windows[0].open():
                self._nodes.send(node, piece)


def _pieces(view: memoryview) -> Iterator[NextCall]:
    for at in range(0, len(view), PIECE_BYTES):
        data = bytes(view[at : at + PIECE_BYTES])
        yield NextCall(len(view) - at - len(data), data)
