"""Finds the ranks that have not entered the collective that the others wait in, or have entered another one. Pure.

A process group numbers its collectives. All members must enter the same operation as number N, on tensors of the same
type and, for most operations, of the same size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.job.outcome import ranks_in_words
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


def mismatches(dumps: Sequence[StackDump], cwd: str) -> list[Mismatch]:
    """One per process group whose ranks are not in the same collective."""
    reported = {one.rank: one.collectives for one in dumps if "entries" in one.collectives}
    groups: dict[str, tuple[str, list[int]]] = {}
    for collectives in reported.values():
        groups.update(collectives.get("groups", {}))
    result = []
    for name in sorted({entry["group"] for collectives in reported.values() for entry in collectives["entries"]}):
        description, members = groups.get(name, ("", list(reported)))
        ranks = {
            rank: _entries(reported[rank], name)
            for rank in members
            if rank in reported and name in reported[rank].get("groups", {})
        }
        found = _other_operation(ranks, cwd) or _not_entered(ranks, cwd)
        if found:
            result.append(found._replace(sentence=f"group {_label(name, description)}: {found.sentence}"))
    return result


def _label(name: str, description: str) -> str:
    return description if description not in ("", "undefined") else name


def _entries(collectives: Mapping[str, Any], group: str) -> dict[int, Entry]:
    entries = collectives["entries"]
    return {entry["number"]: entry for entry in entries if entry["group"] == group and not entry.get("p2p")}


def _other_operation(ranks: Mapping[int, Mapping[int, Entry]], cwd: str) -> Mismatch | None:
    numbers = sorted({number for entries in ranks.values() for number in entries})
    for number in numbers:
        entered = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
        kinds = Counter(_kind(entry) for entry in entered.values())
        if len(kinds) < 2 or all(entry["done"] for entry in entered.values()):
            continue
        parts, minority = [], []
        for kind, count in sorted(kinds.items(), key=lambda item: (item[1], item[0])):
            same = [rank for rank, entry in entered.items() if _kind(entry) == kind]
            minority += same if count < max(kinds.values()) else []
            verb = "has" if len(same) == 1 else "have"
            parts.append(f"{ranks_in_words(same)} {verb} entered {_in_words(entered[same[0]], cwd)}")
        return Mismatch(f"collective {number} is not the same on all ranks: {'; '.join(parts)}", minority)
    return None


def _not_entered(ranks: Mapping[int, Mapping[int, Entry]], cwd: str) -> Mismatch | None:
    last = {rank: max(entries, default=0) for rank, entries in ranks.items()}
    most = max(last.values(), default=0)
    behind = {rank: number for rank, number in last.items() if number < most}
    if not behind:
        return None
    least = min(behind.values())
    missing = [rank for rank, number in behind.items() if number == least]
    entered = [rank for rank, number in last.items() if number > least]
    entry = next((ranks[rank][least + 1] for rank in entered if least + 1 in ranks[rank]), None)
    what = f", {_in_words(entry, cwd)}," if entry else ","
    has = "has" if len(missing) == 1 else "have"
    have = "has" if len(entered) == 1 else "have"
    return Mismatch(
        f"{ranks_in_words(missing)} {has} not entered collective {least + 1}{what} "
        f"which {ranks_in_words(entered)} {have}",
        missing,
    )


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
