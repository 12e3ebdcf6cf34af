"""Bounds what strangers cost a node that listens: how many it hears at a time, of each address, and for how long."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from ... import linux

# As many as at the door of a job (transport/join/server.py). Whoever knows the secret says it at once, so the oldest
# goes: nobody is kept out by those who say nothing.
MOST = 512
MOST_OF_ADDRESS = 128
SECONDS = 10.0

_Peer = TypeVar("_Peer")


class Strangers(Generic[_Peer]):
    """Who has connected, and has not proven yet who it is. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._since: dict[_Peer, tuple[float, str]] = {}  # the oldest first
        self._of_network: Counter[str] = Counter()

    def add(self, peer: _Peer, address: str, now: float) -> _Peer | None:
        """There is another one. Returns whom to hang up on for it, who is forgotten: the oldest of too many."""
        network = linux.network_of(address)
        self._since[peer] = now, network
        self._of_network[network] += 1
        if self._of_network[network] > MOST_OF_ADDRESS:
            return self._remove(next(one for one, (_, where) in self._since.items() if where == network))
        return self.oldest() if len(self._since) > MOST else None

    def oldest(self) -> _Peer | None:
        """The oldest, if there is one, who is forgotten."""
        return self._remove(next(iter(self._since))) if self._since else None

    def late(self, now: float) -> list[_Peer]:
        """Those who have had their time, who are forgotten."""
        return [self._remove(one) for one, (since, _) in list(self._since.items()) if since + SECONDS <= now]

    @property
    def deadline(self) -> float | None:
        """When the next one will have had its time."""
        return next((since + SECONDS for since, _ in self._since.values()), None)

    def forget(self, peer: _Peer) -> None:
        """This one is no stranger any more, or has hung up."""
        if peer in self._since:
            self._remove(peer)

    def _remove(self, peer: _Peer) -> _Peer:
        _, network = self._since.pop(peer)
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]
        return peer
