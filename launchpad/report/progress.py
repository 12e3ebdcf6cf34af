"""Which ranks have not entered the collective that the others wait in, or have entered another one. Pure.

A process group counts its collectives; what all its members enter as number N is one operation, on tensors of one type
and, in most operations, of one size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launchpad.job.outcome import ranks_in_words
from launchpad.stacks import Examined, is_library, user_frame

# Ranks may bring tensors of different sizes to these.
_SIZES_DIFFER = ("alltoall", "all_to_all", "_v", "coalesced")

# What torch's C++ calls some types, and Python otherwise.
_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16"}
_TYPES |= {"Byte": "uint8", "Char": "int8"}

Entry = Mapping[str, Any]


class Disagreement(NamedTuple):
    """A group whose ranks are not at the same collective."""

    sentence: str
    ranks: list[int]  # the few that differ from the many, or are behind; none where nobody can tell which those are


def disagreements(examined: Sequence[Examined], cwd: str) -> list[Disagreement]:
    """One for each group in which the ranks are not at the same collective."""
    told = {one.rank: one.collectives for one in examined if "entries" in one.collectives}
    groups: dict[str, list[Any]] = {}
    for said in told.values():
        groups.update(said.get("groups", {}))
    lines = []
    for name in sorted({entry["group"] for said in told.values() for entry in said["entries"]}):
        description, members = groups.get(name, ["", list(told)])
        ranks = {
            rank: _entries(told[rank], name)
            for rank in members
            if rank in told and name in told[rank].get("groups", {})
        }
        found = _other_operation(ranks, cwd) or _not_entered(ranks, cwd)
        if found:
            lines.append(found._replace(sentence=f"group {_label(name, description)}: {found.sentence}"))
    return lines


def _label(name: str, description: str) -> str:
    return description if description not in ("", "undefined") else name


def _entries(said: Mapping[str, Any], group: str) -> dict[int, Entry]:
    return {entry["number"]: entry for entry in said["entries"] if entry["group"] == group and not entry.get("p2p")}


def _other_operation(ranks: Mapping[int, Mapping[int, Entry]], cwd: str) -> Disagreement | None:
    numbers = sorted({number for entries in ranks.values() for number in entries})
    for number in numbers:
        there = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
        kinds = Counter(_kind(entry) for entry in there.values())
        if len(kinds) < 2 or all(entry["done"] for entry in there.values()):
            continue
        parts, few = [], []
        for kind, count in sorted(kinds.items(), key=lambda item: (item[1], item[0])):
            same = [rank for rank, entry in there.items() if _kind(entry) == kind]
            few += same if count < max(kinds.values()) else []
            verb = "has" if len(same) == 1 else "have"
            parts.append(f"{ranks_in_words(same)} {verb} entered {_in_words(there[same[0]], cwd)}")
        return Disagreement(f"number {number} is not the same everywhere: {'; '.join(parts)}", few)
    return None


def _not_entered(ranks: Mapping[int, Mapping[int, Entry]], cwd: str) -> Disagreement | None:
    last = {rank: max(entries, default=0) for rank, entries in ranks.items()}
    most = max(last.values(), default=0)
    behind = {rank: number for rank, number in last.items() if number < most}
    if not behind:
        return None
    least = min(behind.values())
    missing = [rank for rank, number in behind.items() if number == least]
    there = [rank for rank, number in last.items() if number > least]
    entry = next((ranks[rank][least + 1] for rank in there if least + 1 in ranks[rank]), None)
    what = f", {_in_words(entry, cwd)}," if entry else ","
    verb = "has" if len(missing) == 1 else "have"
    have = "has" if len(there) == 1 else "have"
    they = ranks_in_words(missing)
    return Disagreement(
        f"{they} {verb} not entered number {least + 1}{what} which {ranks_in_words(there)} {have}", missing
    )


def _kind(entry: Entry) -> tuple[str, str, int]:
    """What must be the same for all."""
    what = str(entry["what"])
    of_root = what in ("gather", "scatter", "barrier")  # the root has other tensors than the rest, or none has any
    sizes = 0 if of_root or any(part in what for part in _SIZES_DIFFER) else sum(map(math.prod, entry["sizes"]))
    return what, "" if of_root else ",".join(sorted(set(entry["types"]))), sizes


def _in_words(entry: Entry, cwd: str) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "one number" for size in entry["sizes"][:3])
    types = "/".join(sorted({_TYPES.get(str(one), str(one).removeprefix("torch.").lower()) for one in entry["types"]}))
    text = str(entry["what"])
    if entry["sizes"]:
        text += f" of {sizes}{' …' if len(entry['sizes']) > 3 else ''} {types}".rstrip()
    frame = user_frame(entry["frames"])
    if frame is not None and not is_library(frame[0]):
        text += f" at {short_path(frame[0], cwd)}:{frame[1]}"
    return text


def short_path(path: str, cwd: str) -> str:
    """A file's name as a reader knows it: from the working folder, or from where packages are installed."""
    for part in ("/site-packages/", "/dist-packages/", "/lib/python3."):
        if part in path:
            after = path.rpartition(part)[2]
            return after.partition("/")[2] if part.endswith(".") else after
    return path.removeprefix(cwd.rstrip("/") + "/")
