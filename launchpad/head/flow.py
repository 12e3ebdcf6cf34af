"""Flow control of the ranks' output: an agent gets credit back for bytes that every sink is done with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from launchpad.protocol.events import Output

# The most output that may be in flight between agents and sinks, and the limits for one stream's share of it.
WINDOW_BYTES = 16 << 20
LARGEST_WINDOW = 1 << 20
LEAST_WINDOW = 16 << 10

# The same for ranks that go on without the head, whose output waits on their hosts (--keep-running).
KEPT_BYTES = 128 << 20
LARGEST_KEPT_WINDOW = 32 << 20

# Which start of its rank an output is from: the job's attempt, and how often it was started again alone.
Start = tuple[int, int]


class Flow:
    """Tracks the output in flight in one job."""

    def __init__(self, ranks: int, give: Callable[[int, int, int], None], *, kept: bool = False) -> None:
        """`give(rank, stream, bytes)` lets the rank's agent send that many more bytes.

        `kept`: the ranks go on without us.
        """
        self._most, self._largest = (KEPT_BYTES, LARGEST_KEPT_WINDOW) if kept else (WINDOW_BYTES, LARGEST_WINDOW)
        self.resize(ranks)
        self._give = give
        self._attempt = 0
        self._again = Counter[int]()  # by rank: how often it was started again alone
        self._held: dict[int, tuple[int, Output, Start]] = {}  # by id: number of sinks that hold it, output, start
        self._owed: dict[tuple[int, int], int] = {}  # credit not yet given, by rank and stream

    def resize(self, ranks: int) -> None:
        """The job has so many ranks from now on."""
        self.window = max(LEAST_WINDOW, min(self._largest, self._most // (2 * ranks)))

    def start(self, attempt: int) -> None:
        """The ranks are (re)started: each stream gets a full window."""
        self._attempt = attempt
        self._owed.clear()

    def start_again(self, ranks: Iterable[int]) -> None:
        """The same for these alone."""
        for rank in ranks:
            self._again[rank] += 1
            for key in [key for key in self._owed if key[0] == rank]:
                del self._owed[key]

    def _start_of(self, rank: int) -> Start:
        return self._attempt, self._again[rank]

    def shown(self, output: Output, holders: int) -> None:
        """All sinks have seen it, and `holders` of them still hold its bytes."""
        if holders:
            self._held[id(output)] = (holders, output, self._start_of(output.rank))
        else:
            self._owe(output)

    def written(self, output: Output) -> None:
        """A sink that held it has written it."""
        held = self._held.pop(id(output), None)
        if held is None:  # another head has given credit for it
            return
        holders, _, start = held
        if holders > 1:
            self._held[id(output)] = (holders - 1, output, start)
        elif start == self._start_of(output.rank):
            self._owe(output)

    def _owe(self, output: Output) -> None:
        """Give credit in batches: a frame for every few bytes would cost more than the bytes."""
        key = (output.rank, output.stream)
        owed = self._owed.get(key, 0) + len(output.data)
        if owed * 4 >= self.window:
            self._give(*key, owed)
            owed = 0
        self._owed[key] = owed
