"""Finds the ranks that have not entered the collective that the others wait in, or have entered another one. Pure.

A process group numbers its collectives. All members must enter the same operation as number N, on tensors of the same
type and, for most operations, of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.job.outcome import several_in_words
from launchpad.protocol.events import StackDump
from launchpad.protocol.stacks import is_library, user_frame

# The ranks' tensors may differ in size in these operations.
_SIZES_DIFFER = ("alltoall", "all_to_all", "_v", "coalesced")

# Types that torch's C++ code and Python name differently.
_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16"}
_TYPES |= {"Byte": "uint8", "Char": "int8"}

Entry = Mapping[str, Any]


class Mismatch(NamedTuple):
    """A process group whose ranks are not in the same collective."""

    sentence: str
    ranks: list[int]  # the minority, or those that are behind; empty if it is unclear which ranks are wrong


class _Alike(NamedTuple):
    """Ranks that know the same about their collectives."""

    collectives: Mapping[str, Any]
    ranks: list[int]


class _SameProgress(NamedTuple):
    """Members of a group that have entered the same of its collectives."""

    entries: Mapping[int, Entry]  # by number
    ranks: list[int]


def mismatches(dumps: Sequence[StackDump], cwd: str) -> list[Mismatch]:
    """One per process group whose ranks are not in the same collective."""
    reported: dict[int, _Alike] = {}  # what equals something else is the same object (protocol/stacks.py)
    for one in dumps:
        if "entries" in one.collectives:
            reported.setdefault(id(one.collectives), _Alike(one.collectives, [])).ranks.append(one.rank)
    groups: dict[str, tuple[str, list[tuple[int, int, int]]]] = {}
    for alike in reported.values():
        groups.update(alike.collectives.get("groups", {}))
    result = []
    for name in sorted({entry["group"] for alike in reported.values() for entry in alike.collectives["entries"]}):
        if name not in groups:  # nobody says that it is in it
            continue
        description, steps = groups[name]
        members = [range(first, last + 1, step) for first, last, step in steps]
        entered = [
            _SameProgress(_entries(alike.collectives, name), ranks)
            for alike in reported.values()
            if name in alike.collectives.get("groups", {})
            and (ranks := [rank for rank in alike.ranks if any(rank in some for some in members)])
        ]
        found = _other_operation(entered, cwd) or _not_entered(entered, cwd)
        if found:
            result.append(found._replace(sentence=f"group {_label(name, description)}: {found.sentence}"))
    return result


def _label(name: str, description: str) -> str:
    return description if description not in ("", "undefined") else name


def _entries(collectives: Mapping[str, Any], group: str) -> dict[int, Entry]:
    entries = collectives["entries"]
    return {entry["number"]: entry for entry in entries if entry["group"] == group and not entry.get("p2p")}


def _other_operation(entered: Sequence[_SameProgress], cwd: str) -> Mismatch | None:
    for number in sorted({number for one in entered for number in one.entries}):
        there = [one for one in entered if number in one.entries]
        if all(one.entries[number]["done"] for one in there):
            continue
        kinds: dict[tuple[str, str, int], list[_SameProgress]] = {}
        for one in there:
            kinds.setdefault(_kind(one.entries[number]), []).append(one)
        if len(kinds) < 2:
            continue
        by_kind = {kind: _ranks(same) for kind, same in kinds.items()}
        most = max(map(len, by_kind.values()))
        parts, minority = [], []
        for kind, ranks in sorted(by_kind.items(), key=lambda item: (len(item[1]), item[0])):
            minority += ranks if len(ranks) < most else []
            verb = "has" if len(ranks) == 1 else "have"
            first = next(one for one in kinds[kind] if ranks[0] in one.ranks)
            parts.append(f"{several_in_words(ranks)} {verb} entered {_in_words(first.entries[number], cwd)}")
        return Mismatch(f"collective {number} is not the same on all ranks: {'; '.join(parts)}", minority)
    return None


def _not_entered(entered: Sequence[_SameProgress], cwd: str) -> Mismatch | None:
    last = [max(one.entries, default=0) for one in entered]
    behind = [number for number in last if number < max(last)]
    if not behind:
        return None
    least = min(behind)
    missing = _ranks([one for one, number in zip(entered, last, strict=True) if number == least])
    others = [one for one, number in zip(entered, last, strict=True) if number > least]
    entry = next((one.entries[least + 1] for one in others if least + 1 in one.entries), None)
    what = f", {_in_words(entry, cwd)}," if entry else ","
    there = _ranks(others)
    has = "has" if len(missing) == 1 else "have"
    have = "has" if len(there) == 1 else "have"
    return Mismatch(
        f"{several_in_words(missing)} {has} not entered collective {least + 1}{what} "
        f"which {several_in_words(there)} {have}",
        missing,
    )


def _ranks(entered: Sequence[_SameProgress]) -> list[int]:
    return sorted(rank for one in entered for rank in one.ranks)


def _kind(entry: Entry) -> tuple[str, str, int]:
    """What must be the same on all ranks: the operation, the types and the size."""
    what = str(entry["what"])
    by_rank = what in ("gather", "scatter", "barrier")  # the root's tensors differ from the others', or there are none
    sizes = 0 if by_rank or any(part in what for part in _SIZES_DIFFER) else sum(map(math.prod, entry["sizes"]))
    return what, "" if by_rank else ",".join(sorted(set(entry["types"]))), sizes


def _in_words(entry: Entry, cwd: str) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in entry["sizes"][:3])
    types = "/".join(sorted({_TYPES.get(str(one), str(one).removeprefix("torch.").lower()) for one in entry["types"]}))
    text = str(entry["what"])
    if entry["sizes"]:
        text += f" of {sizes}{' …' if len(entry['sizes']) > 3 else ''} {types}".rstrip()
    frame = user_frame(entry["frames"])
    if frame is not None and not is_library(frame[0]):
        text += f" at {short_path(frame[0], cwd)}:{frame[1]}"
    return text


def short_path(path: str, cwd: str) -> str:
    """A file's path relative to the working directory, or to where packages are installed."""
    for part in ("/site-packages/", "/dist-packages/", "/lib/python3."):
        if part in path:
            after = path.rpartition(part)[2]
            return after.partition("/")[2] if part.endswith(".") else after
    return path.removeprefix(cwd.rstrip("/") + "/")
