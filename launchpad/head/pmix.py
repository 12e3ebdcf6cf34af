"""The head's part in worlds of Open MPI: fences across nodes, data for other nodes, published values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.protocol.commands import Command, PmixFetch, PmixReply
from launchpad.protocol.events import PmixFetched, PmixRequest

_SUCCESS, _BAD_PARAM, _OUT_OF_RESOURCE, _NOT_FOUND, _DUPLICATE = 0, -27, -29, -46, -53

# How many names and values ranks may publish: they stay in our memory.
MOST_PUBLISHED = 10_000

_TOGETHER = ("fence", "group", "connect", "disconnect")  # what all members take part in

Replies = list[tuple[int, Command]]  # a node, and what to send it
Meeting = tuple[str, str, tuple[tuple[int, int], ...]]  # a verb, a group's name, and the members


class _Published:
    """A published value."""

    def __init__(self, by: Sequence[int], once: bool, kind: int, data: str) -> None:
        self.by, self.once, self.kind, self.data = tuple(by), once, kind, data


class PmixExchange:
    """What the ranks of Open MPI on different nodes tell each other over us."""

    def __init__(self) -> None:
        self._node_of: list[list[int]] = []  # by world and MPI rank
        self._arrived: dict[Meeting, dict[int, tuple[int, str]]] = {}  # nodes, by what they do together
        self._groups = 0  # how many have been made
        self._silent: set[int] = set()  # nodes that have not taken part in a fence
        self._fetches: dict[int, tuple[int, int]] = {}  # the node that asks, and its number
        self._last_fetch = 0
        self._published: dict[str, _Published] = {}
        self._lookups: list[tuple[int, int, list[str]]] = []  # that wait: node, number, keys

    def add(self, node_of: list[int]) -> None:
        """A world, by the node of each of its ranks."""
        if not self._node_of:
            self._silent = set(node_of)
        self._node_of.append(node_of)

    def makes_sense(self, node: int, event: PmixRequest) -> bool:
        """Whether this node can have sent this."""
        nodes = self._nodes(event.members)
        if event.verb in _TOGETHER:
            return node in nodes
        one = len(nodes) == len(event.members) == 1 and event.members[0][1] >= 0
        return one and (event.verb == "modex" or node in nodes)

    def _nodes(self, members: Sequence[Sequence[int]]) -> set[int]:
        """The nodes of these members; empty if there are no such members."""
        found: set[int] = set()
        for member in members:
            if len(member) != 2 or not 0 <= member[0] < len(self._node_of):
                return set()
            world = self._node_of[member[0]]
            if not -1 <= member[1] < len(world):
                return set()
            found.update(world if member[1] < 0 else [world[member[1]]])
        return found

    def waits_for(self, node: int) -> bool:
        """Whether other nodes wait for this one in MPI_Init."""
        together = [self._nodes(members) - arrived.keys() for (_, _, members), arrived in self._arrived.items()]
        return node in self._silent and any(node in missing for missing in together)

    def on(self, node: int, event: PmixRequest) -> Replies:
        """The answers to a request; maybe there are none yet. Raises ValueError if it is malformed."""
        match event.verb, event.given:
            case "fence", [str(data)]:
                self._silent.discard(node)
                return self._together(node, event, "", data)
            case "group", [str(name), str(data)]:
                return self._together(node, event, name, data)
            case "connect" | "disconnect", []:
                return self._together(node, event, "", "")
            case "modex", []:
                ((world, rank),) = event.members
                self._last_fetch += 1
                self._fetches[self._last_fetch] = (node, event.number)
                return [(self._node_of[world][rank], PmixFetch(self._last_fetch, world, rank))]
            case "publish", [bool(once), list(values)] if all(map(_is_value, values)):
                return self._publish(node, event, once, values)
            case "lookup", [bool(waits), list(keys)] if all(isinstance(key, str) for key in keys):
                if waits:
                    self._lookups.append((node, event.number, keys))
                    return self._look_up_again()
                found = self._take(keys)
                return [(node, PmixReply(event.number, _SUCCESS if found else _NOT_FOUND, found))]
            case "unpublish", [list(keys)] if all(isinstance(key, str) for key in keys):
                for key in keys:
                    self._published.pop(key, None)
                return [(node, PmixReply(event.number, _SUCCESS, None))]
            case "worlds", []:  # what we had to say of them is on its way before this
                return [(node, PmixReply(event.number, _SUCCESS, None))]
        raise ValueError(event.verb)

    def fetched(self, event: PmixFetched) -> Replies:
        """The answer to a PmixFetch."""
        asked = self._fetches.pop(event.number, None)
        return [(asked[0], PmixReply(asked[1], event.status, event.data))] if asked else []

    def _together(self, node: int, event: PmixRequest, name: str, data: str) -> Replies:
        meeting = event.verb, name, tuple(sorted((world, rank) for world, rank in event.members))
        arrived = self._arrived.setdefault(meeting, {})
        arrived[node] = event.number, data
        if arrived.keys() < self._nodes(event.members):
            return []
        del self._arrived[meeting]
        found: dict[str, Any] | None = None
        if event.verb in ("fence", "group"):
            found = {"data": [data for _, data in arrived.values()]}
        if found and event.verb == "group":
            self._groups += 1
            found["group"] = self._groups
        return [(to, PmixReply(number, _SUCCESS, found)) for to, (number, _) in arrived.items()]

    def _publish(self, node: int, event: PmixRequest, once: bool, values: list[Any]) -> Replies:
        if any(key in self._published for key, _, _ in values):
            return [(node, PmixReply(event.number, _DUPLICATE, None))]
        if len(self._published) + len(values) > MOST_PUBLISHED:
            return [(node, PmixReply(event.number, _OUT_OF_RESOURCE, None))]
        for key, kind, data in values:
            self._published[key] = _Published(event.members[0], once, kind, data)
        return [(node, PmixReply(event.number, _SUCCESS, None)), *self._look_up_again()]

    def _look_up_again(self) -> Replies:
        replies: Replies = []
        waiting, self._lookups = self._lookups, []
        for node, number, keys in waiting:
            if all(key in self._published for key in keys):
                replies.append((node, PmixReply(number, _SUCCESS, self._take(keys))))
            else:
                self._lookups.append((node, number, keys))
        return replies

    def _take(self, keys: Sequence[str]) -> list[list[Any]]:
        found = []
        for key in keys:
            value = self._published.get(key)
            if value is not None:
                found.append([*value.by, key, value.kind, value.data])
                if value.once:
                    del self._published[key]
        return found


def _is_value(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [str, int, str]
