"""How much output may be under way: an agent gets credit again for what every sink is done with."""

from __future__ import annotations

from collections.abc import Callable

from launchpad.events import Output

# All streams together may have this much output under way between agent and sinks, each at most LARGEST_WINDOW.
WINDOW_BYTES = 16 << 20
LARGEST_WINDOW = 1 << 20
LEAST_WINDOW = 16 << 10


class Flow:
    """The ledger of one job's output."""

    def __init__(self, ranks: int, give: Callable[[int, int, int], None]) -> None:
        """`give(rank, stream, bytes)` tells the rank's agent that so many more may be sent."""
        self.window = max(LEAST_WINDOW, min(LARGEST_WINDOW, WINDOW_BYTES // (2 * ranks)))
        self._give = give
        self._attempt = 0
        self._held: dict[int, tuple[int, Output, int]] = {}  # by id: holding sinks, output, its attempt
        self._owed: dict[tuple[int, int], int] = {}  # credit to be given, by rank and stream

    def start(self, attempt: int) -> None:
        """The ranks are started (again): their streams begin with a whole window."""
        self._attempt = attempt
        self._owed.clear()

    def shown(self, output: Output, holders: int) -> None:
        """All sinks have seen it, and so many of them still hold its bytes."""
        if holders:
            self._held[id(output)] = (holders, output, self._attempt)
        else:
            self._owe(output)

    def written(self, output: Output) -> None:
        """A sink that held it is done with it."""
        holders, _, attempt = self._held.pop(id(output))
        if holders > 1:
            self._held[id(output)] = (holders - 1, output, attempt)
        elif attempt == self._attempt:
            self._owe(output)

    def _owe(self, output: Output) -> None:
        """Give in portions: a frame for every few bytes would cost more than the bytes."""
        key = (output.rank, output.stream)
        owed = self._owed.get(key, 0) + len(output.data)
        if owed * 4 >= self.window:
            self._give(*key, owed)
            owed = 0
        self._owed[key] = owed
