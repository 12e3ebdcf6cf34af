"""Where the ranks are, in a few lines: those at the same place together, the ones that hold up the others first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.failures import RanksHeld
from launchpad.job.outcome import ranks_in_words
from launchpad.report.progress import Disagreement, disagreements, short_path
from launchpad.stacks import NO_HANDLER, Examined, StacksTaken, Where, is_library, main_frames, where

# What fits a screen: groups of ranks, stacks of theirs, and lines of each.
MOST_GROUPS = 8
MOST_STACKS = 3
MOST_LINES = 10

_WHY = {
    "asked": "where the ranks are:",
    "timeout": "the time-out has come; where the ranks are:",
    "stall": "the job hangs; where the ranks are:",
}

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


class Group(NamedTuple):
    """Ranks at the same place."""

    where: Where
    outside: str  # of a rank without stacks: what it does as seen from outside
    ranks: list[int]
    example: Examined


def held(taken: StacksTaken, cwd: str, nodes: Mapping[int, str]) -> RanksHeld:
    """Whom the others wait for, and the sentences of the account."""
    different, ranks = _differences(taken, cwd)
    groups = [group for group in grouped(taken.examined, ranks) if not _is_leaving(group, taken.why)]
    # Those that have failed waited; of the rest, who does not wait was waited for.
    if not ranks and groups and (len(groups) > 1 or (taken.why == "failure" and not groups[0].where.waits_in)):
        ranks = groups[0].ranks
    lines = [_sentence(group, cwd, nodes) for group in groups[:MOST_GROUPS]] + [one.sentence for one in different]
    return RanksHeld(taken.time, taken.why, ranks, lines)


def _differences(taken: StacksTaken, cwd: str) -> tuple[list[Disagreement], list[int]]:
    """Where the ranks' collectives differ, and the ranks of the first that can be told to differ from the others."""
    different = disagreements(taken.examined, cwd)
    return different, next((one.ranks for one in different if one.ranks), [])


def _is_leaving(group: Group, why: str) -> bool:
    """Whether these ranks are at their end: dead, or in no code of the user's any more."""
    if group.outside:
        return group.example.state in ("Z", "X") or (why == "failure" and group.example.why == NO_HANDLER)
    return not group.where.file or is_library(group.where.file)


def merged(taken: StacksTaken, cwd: str, nodes: Mapping[int, str]) -> str:
    """The account: who is where, what the collectives say, and the main thread's stack of the first groups."""
    different, behind = _differences(taken, cwd)
    groups = grouped(taken.examined, behind)
    lines = [_WHY.get(taken.why, _WHY["asked"])]
    lines += [f"  {_sentence(group, cwd, nodes)}" for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        more = [rank for group in groups[MOST_GROUPS:] for rank in group.ranks]
        lines.append(f"  {ranks_in_words(more)}: at {len(groups) - MOST_GROUPS} other places")
    silent = sorted(set(taken.ranks) - {one.rank for one in taken.examined})
    if silent:
        lines.append(f"  {_subject(silent, nodes)} could not be asked: not started yet, just ended, or out of reach")
    if not taken.ranks:
        lines.append("  no rank runs")
    lines += [f"  {one.sentence}" for one in different]
    for group in [group for group in groups if main_frames(group.example)][:MOST_STACKS]:
        also = group.ranks[1:]
        lines.append(f"  rank {group.ranks[0]}" + (f" (and {len(also)} more)" if also else "") + ":")
        lines += [f"    {line}" for line in _short(main_frames(group.example), cwd)]
        helpers = len(group.example.threads) - 1
        if helpers:
            lines.append(f"    (and {helpers} other thread{'s' if helpers > 1 else ''})")
    return "\n".join(lines)


def grouped(examined: Sequence[Examined], first: Sequence[int] = ()) -> list[Group]:
    """Ranks by their places. First who is behind in a collective, or does not wait, then the few before the many."""
    found: dict[tuple[Any, ...], Group] = {}
    for one in examined:
        place = where(main_frames(one), bool(one.collectives.get("mpi")))
        if place.waits_in:
            place = place._replace(innermost="")  # in one and the same wait ranks are found at this step or that
        outside = "" if one.threads else _from_outside(one)
        group = found.setdefault((place, outside), Group(place, outside, [], one))
        group.ranks.append(one.rank)

    def order(group: Group) -> tuple[bool, bool, int, list[int]]:
        return not set(first) & set(group.ranks), bool(group.where.waits_in), len(group.ranks), group.ranks

    return sorted(found.values(), key=order)


def _from_outside(one: Examined) -> str:
    state = _STATES.get(one.state, one.state)
    kernel = f" in {one.wchan}" if one.wchan else ""
    return f"{state}{kernel} ({one.why})"


def _subject(ranks: list[int], nodes: Mapping[int, str]) -> str:
    names = sorted({nodes[rank] for rank in ranks if rank in nodes})
    return ranks_in_words(ranks) + (f" on {names[0]}" if len(names) == 1 else "")


def _sentence(group: Group, cwd: str, nodes: Mapping[int, str]) -> str:
    subject = _subject(group.ranks, nodes)
    one = len(group.ranks) == 1
    place = group.where
    if group.outside:
        return f"{subject} {'is' if one else 'are'} {group.outside}"
    if not place.file:
        return f"{subject} {'is' if one else 'are'} past the end of the program, or before its beginning"
    at = f"{short_path(place.file, cwd)}:{place.line}"
    if place.waits_in:
        return f"{subject} {'waits' if one else 'wait'} in {place.waits_in} at {at}"
    inside = f" (in {place.innermost})" if place.innermost else ""
    text = f": {place.text}" if place.text else ""
    return f"{subject} {'is' if one else 'are'} in {place.function} at {at}{inside}{text}"


def _short(frames: Sequence[Sequence[Any]], cwd: str) -> list[str]:
    lines = [_line(frame, cwd) for frame in frames]
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 2], f"… ({len(lines) - MOST_LINES + 1} frames)", lines[-1]]


def _line(frame: Sequence[Any], cwd: str) -> str:
    path, line, function, text = frame
    return f"{short_path(path, cwd)}:{line} in {function}" + (f": {text}" if text else "")


def full(taken: StacksTaken, cwd: str, nodes: Mapping[int, str]) -> str:
    """Every thread of every rank, and its last collectives."""
    lines: list[str] = []
    for one in taken.examined:
        if lines:
            lines.append("")
        lines.append(f"{_subject([one.rank], nodes)}, pid {one.pid}: " + (_from_outside(one) if one.why else ""))
        for number, thread in enumerate(one.threads):
            lines.append(f"  thread {thread['name']}" + (" (main)" if number == 0 else ""))
            lines += [f"    {_line(frame, cwd)}" for frame in thread["frames"]]
        for entry in one.collectives.get("entries", ())[-10:]:
            done = "" if entry["done"] else ", under way"
            lines.append(f"  group {entry['group']} number {entry['number']}: {entry['what']} {entry['sizes']}{done}")
        if one.native:
            lines += ["  by py-spy:", *(f"    {line}" for line in one.native.splitlines())]
    return "\n".join(lines)
