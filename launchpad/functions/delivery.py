"""Brings the call to the nodes that are other machines, in pieces, over their links."""

from __future__ import annotations

from collections.abc import Sequence

from launchpad.commands import Call
from launchpad.errors import NodeError
from launchpad.events import Taken
from launchpad.head.gathering import Gathering
from launchpad.nursery.pickling import map_file

# So much may be under way to a node, in pieces of this size.
WINDOW_BYTES = 4 << 20
PIECE_BYTES = 256 << 10

# A node that takes nothing for so long is stuck.
STUCK_SECONDS = 60.0


def deliver(gathering: Gathering, nodes: Sequence[int], call: int) -> None:
    """Send what the descriptor `call` holds to the nodes, which have it all when this returns. Raises NodeError."""
    if not nodes:
        return
    view = map_file(call, shared=False)
    sent = dict.fromkeys(nodes, 0)
    taken = dict.fromkeys(nodes, 0)
    deadline = gathering.clock() + STUCK_SECONDS
    while left := [node for node in nodes if taken[node] < len(view)]:
        for node in left:
            while sent[node] < len(view) and sent[node] - taken[node] < WINDOW_BYTES:
                piece = bytes(view[sent[node] : sent[node] + PIECE_BYTES])
                gathering.nodes.send(node, Call(piece))
                sent[node] += len(piece)
        heard = gathering.hear(deadline)
        if heard is None:
            names = ", ".join(map(gathering.nodes.name, left))
            raise NodeError(f"{names}: nothing of the function was taken for {STUCK_SECONDS:g} s")
        node, event = heard
        if isinstance(event, Taken):
            taken[node] += event.size
            deadline = gathering.clock() + STUCK_SECONDS
