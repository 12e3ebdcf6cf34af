"""What the tests of stacks share."""

from __future__ import annotations

from typing import Any

from launchpad.protocol.events import StackDump


def dumps(rank: int, frames: list[list[Any]], why: str = "", **collectives: Any) -> StackDump:
    threads = [{"name": "MainThread", "frames": frames}] if frames else []
    return StackDump(0, rank, 1, 100 + rank, why, threads, "S", "ep_poll", 1.0, False, 0, -1, collectives, "")
