"""Says what a job that went well spent its time on, as far as its record knows. Pure."""

from __future__ import annotations

from launchpad.diagnosis.activity import seconds_in_words
from launchpad.diagnosis.history import History

# What the ranks waited for the slowest of them is worth a word from this share of the program's time on.
LEAST_SHARE = 0.01


def time_spent(history: History) -> str:
    """One sentence about the last attempt; "" if its start or its end is unknown."""
    exits = [one.exited.time for one in history.ranks.values() if one.exited is not None]
    if not history.started or not exits or history.over is None:
        return ""
    begin, started, last = history.begun, history.started, max(exits)
    before, program = _seconds(begin, started), _seconds(started, last)
    inside = []
    if history.grouped:
        inside.append(f"until the first process group: {_in_words(_seconds(started, history.grouped))}")
    if (waited := history.waited) >= max(0.005, LEAST_SHARE * program):
        inside.append(f"waiting for the slowest rank: {_in_words(waited)} each, on average")
    parts = [
        _part(before, "to start the ranks", [f"imports: {_in_words(history.imported)}"] if history.imported else []),
        _part(program, "in the program", inside),
        _part(_seconds(last, history.over.time), "to write the rest of the output and end", []),
    ]
    what = "the last attempt" if history.attempt else "it"
    return f"{what} took {_in_words(_seconds(begin, history.over.time))}: {', '.join(parts)}"


def _part(seconds: float, what: str, details: list[str]) -> str:
    return f"{_in_words(seconds)} {what}" + (f" ({'; '.join(details)})" if details else "")


def _seconds(since: int, until: int) -> float:
    return max(0, until - since) / 1e9


def _in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else seconds_in_words(seconds)
