"""Brings the call to the nodes that are other machines, in pieces, over their links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launchpad.head.bringup import BringUp
from launchpad.head.sender import PIECE_BYTES, send
from launchpad.protocol.commands import Call
from launchpad.rank.pickling import map_file


def deliver(bringup: BringUp, nodes: Sequence[int], call: int) -> None:
    """Send what the descriptor `call` holds to the nodes, which have it all when this returns. Raises NodeError."""
    if nodes:
        view = map_file(call, shared=False)
        send(bringup, {node: _pieces(view) for node in nodes}, "the function")


def _pieces(view: memoryview) -> Iterator[Call]:
    return (Call(bytes(view[at : at + PIECE_BYTES])) for at in range(0, len(view), PIECE_BYTES))
