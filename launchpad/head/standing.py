"""Decides whether an agent may say what it says, by what is declared with each event in protocol/events.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchpad.protocol.events import EVENTS, Event

# From a node that is lost, or has left, only this counts.
OF_LOST = frozenset(event for event in EVENTS if event.of_lost)

# In a job without a part that takes it, nobody may say this.
NEEDS_PART = frozenset(event for event in EVENTS if event.needs_part)


def may_send(node: int, event: Any, node_of: Mapping[int, int]) -> bool:
    """Whether a node may say this. `node_of`: where each rank runs."""
    if not (isinstance(event, Event) and event.about):
        return False
    return set(map(node_of.get, event.about())) <= {node}
