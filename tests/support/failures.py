"""Failures as events, for verdict, reports and restarts."""

from __future__ import annotations

from typing import Any

from launchpad.protocol.events import (
    ExceptionRaised,
    JobPlanned,
    PhaseChanged,
    RankExited,
    RankStarted,
)

MS = 1_000_000
GLOO = "[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:20115. This is typically caused by a remote worker"


def job(*nodes: int) -> list[Any]:
    """A job with these numbers of ranks per node, all started at 1 s; rank n has pid 100 + n."""
    numbers = iter(range(sum(nodes)))
    placed = [[f"h{place}", [next(numbers) for _ in range(count)]] for place, count in enumerate(nodes)]
    planned = JobPlanned(0, 1.7e9, "0a1b", 1, "id", ["train.py"], "/work", placed, {}, 60.0, "")
    return [planned, *(RankStarted(1000 * MS, rank, 100 + rank) for rank in range(sum(nodes)))]


def at(ms: float) -> int:
    """The time in ns, this long after the ranks' start."""
    return int((1000 + ms) * MS)


def recorded(kind: str, message: str, line: int = 7, **more: Any) -> dict[str, Any]:
    """A traceback, as a rank records it."""
    frames = [["/w/train.py", line, "step", f"line {line}"], ["/v/site-packages/lib.py", 9, "inner", "x"]]
    return {"type": kind, "message": message, "frames": frames, **more}


def raises(ms: float, rank: int, kind: str, message: str, line: int = 7, code: int = 1, after: float = 5) -> list[Any]:
    """An exception, and the rank's exit a little later."""
    raised = ExceptionRaised(at(ms), rank, 100 + rank, "", recorded(kind, message, line))
    return [raised, exits(ms + after, rank, code)]


def exits(ms: float, rank: int, code: int, killed: bool = False) -> RankExited:
    return RankExited(at(ms), rank, code, 64 << 20, killed)


def stopping(ms: float, ranks: list[int], cause: str = "failure", signum: int = 15) -> PhaseChanged:
    return PhaseChanged(at(ms), "stopping", cause, signum, 5.0, ranks)


def over(ms: float, cause: str = "failure") -> PhaseChanged:
    return PhaseChanged(at(ms), "over", cause, 0, 0.0, [])
