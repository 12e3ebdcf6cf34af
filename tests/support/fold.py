"""What the tests of fold share."""

from __future__ import annotations

import re

from launchpad.console.fold import Fold, FoldedLine

# (rank, stream, lines, seconds until the next)
Said = tuple[int, int, list[bytes], float]


def folded(talk: list[Said], fold: Fold) -> list[FoldedLine]:
    shown: list[FoldedLine] = []
    now = 100.0
    for rank, stream, lines, pause in talk:
        shown += fold.add(rank, stream, lines, now)
        now += pause
        shown += fold.tick(now)
    return shown + fold.rest()


def by_rank(shown: bytes) -> dict[int, list[bytes]]:
    """The lines of each rank, from folded ones."""
    found: dict[int, list[bytes]] = {rank: [] for rank in range(100)}
    for line in shown.split(b"\n")[:-1]:
        match = re.match(rb"\[([\d,-]+)\] ", line)
        assert match, line
        for part in match[1].split(b","):
            first, _, last = part.partition(b"-")
            for rank in range(int(first), int(last or first) + 1):
                found[rank].append(line[match.end() :])
    return found


# Each round begins on all ranks at the same moment: when the last one is there.
ROUNDS = 30
TOGETHER = (
    "import os, sys, time\nrank, size = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE'))\n"
    "def together(number):\n"
    "    open(f'here{number}-{rank}', 'w').close()\n"
    "    while not all(os.path.exists(f'here{number}-{one}') for one in range(size)): time.sleep(0.001)\n"
    f"for number in range({ROUNDS}):\n    together(number)\n"
)
