"""Summarises where the ranks are: one line per place, with the ranks that hold up the others first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.diagnosis import awaited, tracebacks
from launchpad.diagnosis.mismatch import Mismatch, mismatches, short_path
from launchpad.diagnosis.secondary import secondary_kind
from launchpad.job.outcome import several_in_words
from launchpad.protocol.events import NO_HANDLER, ChildStack, RanksHeld, StackDump, StacksTaken
from launchpad.protocol.printable import printable
from launchpad.protocol.stacks import Where, is_library, main_frames, where

# What fits on a screen: groups of ranks, stacks, and lines per stack.
MOST_GROUPS = 8
MOST_STACKS = 3
MOST_LINES = 10
MOST_COMMAND = 60

# Of so many ranks with equal stacks the pids are told.
MOST_PIDS = 8

_WHY = {
    "asked": "where the ranks are:",
    "timeout": "the job has timed out; where the ranks are:",
    "stall": (hanging := "the job is hanging; where the ranks are:"),
    "vain": hanging,
}

_STATES = {
    "": "in an unknown state (/proc is hidden)",
    "R": "running",
    "S": "sleeping",
    "D": "blocked in the kernel (uninterruptible)",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}

# Exceptions that tell something else.
_NO_FAILURES = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "CancelledError", "Empty", "Full")


class RankGroup(NamedTuple):
    """Ranks at the same place."""

    where: Where
    outside: str  # what a rank without stacks does, as seen from outside
    ranks: list[int]
    example: StackDump


def hosts_of(nodes: Sequence[Sequence[Any]]) -> dict[int, str]:
    """The node of each rank, if there are several; from [name, [rank, …]] of each."""
    return {rank: name for name, ranks in nodes for rank in ranks} if len(nodes) > 1 else {}


def held(taken: StacksTaken, cwd: str, nodes: Mapping[int, str]) -> RanksHeld:
    """Which ranks the others wait for, and where all of them are."""
    different, ranks = _differences(taken, cwd)
    groups = [group for group in grouped(taken.dumps, ranks) if not _is_exiting(group, taken.why)]
    raising = {one.rank: found for one in taken.dumps if (found := _raising(one)) is not None}
    busy = [rank for group in groups if not group.where.waits_in for rank in group.ranks if rank in raising]
    ranks = [rank for rank in ranks if rank in busy] or ranks or busy
    if not ranks and groups:  # those that do not wait are the ones that others wait for
        others = groups[1:]
        if taken.why == "failure":  # the ranks that failed were waiting
            held_up = bool(others) or not groups[0].where.waits_in
        else:
            held_up = any(_waits(group) for group in others)
        ranks = groups[0].ranks if held_up else []
    groups.sort(key=lambda group: not set(ranks) & set(group.ranks))
    lines = [_sentence(group, cwd, nodes) for group in groups[:MOST_GROUPS]] + [one.sentence for one in different]
    return RanksHeld(taken.time, taken.why, ranks, lines, raising.get(ranks[0]) if ranks else None)


def _raising(one: StackDump) -> dict[str, Any] | None:
    """The exception of its own that the rank is handling, or on its way out with."""
    recorded = one.collectives.get("raising")
    found = tracebacks.from_event(recorded) if isinstance(recorded, dict) and recorded else None
    if found is None or found.kind in _NO_FAILURES or (found.kind, found.message) == ("SystemExit", "0"):
        return None
    return None if secondary_kind(found) else recorded


def _differences(taken: StacksTaken, cwd: str) -> tuple[list[Mismatch], list[int]]:
    """The mismatches in the ranks' collectives, and the ranks of the first one that shows which ranks are wrong."""
    different = mismatches(taken.dumps, cwd)
    return different, next((one.ranks for one in different if one.ranks), [])


def _waits(group: RankGroup) -> bool:
    return bool(group.where.waits_in) or group.example.state in ("S", "D")


def _is_exiting(group: RankGroup, why: str) -> bool:
    """Whether these ranks are dead, or no longer in the user's code."""
    if group.outside:
        return group.example.state in ("Z", "X") or (why == "failure" and group.example.why == NO_HANDLER)
    return not group.where.file or is_library(group.where.file)


def merged(taken: StacksTaken, cwd: str, nodes: Mapping[int, str]) -> str:
    """The summary: where the ranks are, mismatched collectives, and the main thread's stack of the first groups."""
    different, behind = _differences(taken, cwd)
    groups = grouped(taken.dumps, behind)
    lines = [_WHY.get(taken.why, _WHY["asked"])]
    lines += [f"  {printable(_sentence(group, cwd, nodes))}" for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        more = [rank for group in groups[MOST_GROUPS:] for rank in group.ranks]
        places = len(groups) - MOST_GROUPS
        lines.append(f"  {several_in_words(more)}: in {places} other place{'s' if places > 1 else ''}")
    silent = sorted(set(taken.ranks) - {one.rank for one in taken.dumps} - set(taken.starting))
    if taken.starting:
        has = "has" if len(taken.starting) == 1 else "have"
        lines.append(f"  {_subject(list(taken.starting), nodes)} {has} not been started yet")
    if silent:
        lines.append(f"  nothing is known about {_subject(silent, nodes)}: launchpad's agent there does not answer")
    if not taken.ranks:
        lines.append("  no rank is running")
    lines += [f"  {one.sentence}" for one in different]
    for group in [group for group in groups if main_frames(group.example)][:MOST_STACKS]:
        also = group.ranks[1:]
        lines.append(f"  rank {group.ranks[0]}" + (f" (and {len(also)} more)" if also else "") + ":")
        lines += [f"    {line}" for line in _short(main_frames(group.example), cwd)]
        helpers = len(group.example.threads) - 1
        if helpers:
            lines.append(f"    (and {helpers} other thread{'s' if helpers > 1 else ''})")
        lines += [f"    {line}" for line in _child_lines(group.example, cwd)]
    return "\n".join(lines)


def grouped(dumps: Sequence[StackDump], first: Sequence[int] = ()) -> list[RankGroup]:
    """Group ranks by place. `first` come first, then ranks that do not wait, then small groups before large ones."""
    found: dict[tuple[Any, ...], RankGroup] = {}
    places: dict[tuple[int, bool], Where] = {}  # by stack: equal ones are the same object (protocol/stacks.py)
    for one in dumps:
        stack = id(one.threads), bool(one.collectives.get("mpi"))
        place = places.get(stack) or places.setdefault(stack, where(main_frames(one), stack[1]))
        if place.waits_in and place.innermost:
            place = place._replace(innermost="")  # ranks in the same wait may be at different steps of it
        outside = "" if one.threads else _from_outside(one)
        if spins := one.collectives.get("spins"):
            place = place._replace(waits_in=spins[0])
        waits = () if place.waits_in else (one.awaits.get("what"), one.awaits.get("holder"))
        key = place, outside, waits
        group = found.get(key) or found.setdefault(key, RankGroup(place, outside, [], one))
        group.ranks.append(one.rank)
    leading = set(first)

    def order(group: RankGroup) -> tuple[bool, bool, int, list[int]]:
        return leading.isdisjoint(group.ranks), bool(group.where.waits_in), len(group.ranks), group.ranks

    return sorted(found.values(), key=order)


def _from_outside(one: StackDump) -> str:
    if spins := one.collectives.get("spins"):
        return f"spinning in {spins[0]} ({one.why})"
    state = _STATES.get(one.state, one.state)
    kernel = f" in {one.wchan}" if one.wchan else ""
    if one.why == NO_HANDLER and one.collectives.get("mpi"):  # mpi4py calls it when the interpreter is gone
        return f"at the end of the program, in MPI_Finalize ({state}{kernel})"
    return f"{state}{kernel} ({one.why})"


def _subject(ranks: list[int], nodes: Mapping[int, str]) -> str:
    names = sorted({nodes[rank] for rank in ranks if rank in nodes})
    return several_in_words(ranks) + (f" on {names[0]}" if len(names) == 1 else "")


def _sentence(group: RankGroup, cwd: str, nodes: Mapping[int, str]) -> str:
    subject = _subject(group.ranks, nodes)
    one = len(group.ranks) == 1
    place = group.where
    if group.outside:
        return f"{subject} {'is' if one else 'are'} {group.outside}"
    if not place.file:
        return f"{subject} {'is' if one else 'are'} not in the program: not begun yet, or already finished"
    at = f"{short_path(place.file, cwd)}:{place.line}"
    waits = awaited.in_words(group.example, cwd)
    if place.waits_in:
        locked = f"; it waits for {waits}" if one and "holder" in group.example.awaits else ""
        return f"{subject} {'waits' if one else 'wait'} in {place.waits_in} at {at}{locked}"
    if waits and one:
        subject, place = f"{subject} waits for {waits}; the rank", place._replace(innermost="")
    inside = f" (in {place.innermost})" if place.innermost else ""
    text = f": {place.text}" if place.text else ""
    raising = tracebacks.from_event(recorded) if (recorded := _raising(group.example)) else None
    handles = f", handling {raising.title}" if raising else ""
    example = f"; rank {group.ranks[0]} waits for {waits}" if waits and not one else ""
    return f"{subject} {'is' if one else 'are'} in {place.function} at {at}{inside}{text}{handles}{example}"


def _short(frames: Sequence[Sequence[Any]], cwd: str) -> list[str]:
    lines = [_line(frame, cwd) for frame in frames]
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 2], f"… ({len(lines) - MOST_LINES + 1} frames)", lines[-1]]


def _line(frame: Sequence[Any], cwd: str) -> str:
    path, line, function, text = frame
    return printable(f"{short_path(path, cwd)}:{line} in {function}" + (f": {text}" if text else ""))


def _child_lines(one: StackDump, cwd: str) -> list[str]:
    """A line for each process that descends from a rank, up to MOST_LINES."""
    lines = [f"process {child['pid']}{_named(child)} {awaited.process(child, (), cwd)}" for child in one.children]
    more = len(lines) - MOST_LINES
    return list(map(printable, lines[:MOST_LINES])) + ([f"(and {more} more processes)"] if more > 0 else [])


def _named(child: ChildStack) -> str:
    return f" ({child['command'][:MOST_COMMAND]})" if child["command"] and not child["frames"] else ""


def full(taken: StacksTaken, cwd: str, nodes: Mapping[int, str]) -> str:
    """All stacks: every thread, and the last collectives, of every rank; once for those in which they are equal."""
    texts: dict[tuple[int, ...], str] = {}  # equal ones are the same object (protocol/stacks.py)
    found: dict[tuple[str, str, str], list[StackDump]] = {}
    for one in taken.dumps:
        shared = id(one.threads), id(one.collectives), id(one.awaits), id(one.children)
        if shared not in texts:
            texts[shared] = "\n".join(_all_of(one, cwd))
        found.setdefault((_from_outside(one) if one.why else "", texts[shared], one.native), []).append(one)
    parts = []
    for (outside, text, native), alike in found.items():
        pids = [str(one.pid) for one in alike[:MOST_PIDS]] + ["…"] * (len(alike) > MOST_PIDS)
        pid = f"pid{'s' * (len(alike) > 1)} {', '.join(pids)}"
        lines = [f"{_subject([one.rank for one in alike], nodes)}, {pid}: {outside}", *filter(None, [text])]
        if native:
            lines += ["  by py-spy:", *(f"    {line}" for line in native.splitlines())]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _all_of(one: StackDump, cwd: str) -> list[str]:
    lines: list[str] = []
    for number, thread in enumerate(one.threads):
        lines.append(f"  thread {thread['name']}" + (" (main)" if number == 0 else ""))
        lines += [f"    {_line(frame, cwd)}" for frame in thread["frames"]]
    for task in (*one.awaits.get("chain", ()), *one.awaits.get("tasks", ())):
        lines.append(f"  task {printable(task['name'])}")
        lines += [f"    {_line(frame, cwd)}" for frame in task["frames"]]
    for child in one.children:
        lines.append(f"  process {child['pid']}{printable(_named(child))}, child of {child['parent']}:")
        lines += [f"    {_line(frame, cwd)}" for frame in child["frames"]] or [f"    {awaited.process(child, (), cwd)}"]
    for entry in one.collectives.get("entries", ())[-10:]:
        done = "" if entry["done"] else ", in progress"
        number, what = entry["number"], entry["what"]
        lines.append(f"  group {entry['group']} collective {number}: {what} {entry['sizes']}{done}")
    return lines
