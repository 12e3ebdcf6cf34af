"""Sends nodes data that is too large for one frame: in pieces, to all nodes at once, with a window for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launchpad.errors import NodeError
from launchpad.head.bringup import BringUp
from launchpad.protocol.commands import Call, FileChunk, NextCall
from launchpad.protocol.events import ChunksTaken

# The most bytes in flight to a node, and the most in one piece.
WINDOW_BYTES = 4 << 20
PIECE_BYTES = 256 << 10

# A node that accepts nothing for this long is stuck.
STUCK_SECONDS = 60.0


class Window:
    """One node's pieces, and how many of their bytes are in flight. For None there will be a piece later."""

    def __init__(self, pieces: Iterator[FileChunk | Call | NextCall | None]) -> None:
        self._pieces = pieces
        self._next: FileChunk | Call | NextCall | None = None
        self._ended = False
        self._in_flight = 0
        self._advance()

    def open(self) -> Iterator[FileChunk | Call | NextCall]:
        """The pieces that fit into the window now."""
        if self._next is None:
            self._advance()
        while self._next is not None and self._in_flight < WINDOW_BYTES:
            self._in_flight += len(self._next.data)
            yield self._next
            self._advance()

    def _advance(self) -> None:
        try:
            self._next = next(self._pieces)
        except StopIteration:
            self._next, self._ended = None, True

    def taken(self, size: int) -> None:
        """The node has accepted `size` bytes."""
        self._in_flight -= size

    @property
    def waits(self) -> bool:
        """Whether the node has yet to accept what was sent to it."""
        return self._in_flight > 0

    @property
    def done(self) -> bool:
        """Whether the node has accepted everything."""
        return self._ended and self._in_flight <= 0


def send(
    bringup: BringUp,
    pieces: Mapping[int, Iterator[FileChunk | Call | None]],
    what: str,
    *,
    until: type | None = None,
    taken: Callable[[int, int], None] = lambda *_: None,
) -> dict[int, Any]:
    """Send each node its pieces, until it has accepted them all or, if `until` is given, has sent that event.

    Returns each node's `until` event; if one has a `problem`, nothing more is sent to any node. `taken` gets a node and
    the number of bytes that it has newly accepted; `what` names the data in messages. Raises NodeError if no node
    accepts anything any more.
    """
    windows = {node: Window(one) for node, one in pieces.items()}
    ended: dict[int, Any] = {}
    deadline = bringup.clock() + STUCK_SECONDS  # other events don't extend it
    while True:
        left = [node for node, window in windows.items() if node not in ended and (until or not window.done)]
        if not left:
            return ended
        for node in left:
            for piece in windows[node].open():
                bringup.nodes.send(node, piece)
        heard = bringup.hear(deadline)
        if heard is None:
            stuck = [node for node in left if windows[node].waits] or left  # others may be held up by them
            names = ", ".join(map(bringup.nodes.name, stuck))
            raise NodeError(f"{names}: accepted nothing of {what} for {STUCK_SECONDS:g} s")
        node, event = heard
        if isinstance(event, ChunksTaken):
            windows[node].taken(event.size)
            taken(node, event.size)
        elif until is not None and isinstance(event, until):
            ended[node] = event
            if ended[node].problem:
                return ended
        else:
            continue
        deadline = bringup.clock() + STUCK_SECONDS
