"""Records the last operations of each group, for `launchpad stacks` and stall reports, and when they were entered.

Torch's flight recorder does this for torch's own groups. A record is made when an operation starts; it holds no tensor
and no frame, as it would keep them alive.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, Protocol
from weakref import ref

KEPT = 64
"""How many operations to keep per group."""

KEPT_TIMES = 2000
"""Of how many operations to keep when they were entered."""


class RecordedGroup(Protocol):
    """A process group whose operations are recorded."""

    recorded: Ring

    def getGroupName(self) -> str: ...


class RecordedWork(Protocol):
    """What a record needs to know of an operation."""

    _done: bool


_groups: list[ref[RecordedGroup]] = []
_rings: deque[Ring] = deque(maxlen=64)

_library: dict[str, bool] = {}  # whether a file belongs to a library, by path


class Ring:
    """One group's last operations. Collectives and point-to-point messages are numbered separately."""

    def __init__(self, group: RecordedGroup) -> None:
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self.times: deque[tuple[int, str, int]] = deque(maxlen=KEPT_TIMES)  # (number, what or "" for a message, ns)
        self.name = ""  # of the group, which may be gone
        self._group = ref(group)
        _rings.append(self)
        self._collectives = self._messages = 0
        _groups[:] = [known for known in _groups if known() is not None] + [ref(group)]

    def add(self, work: RecordedWork, what: str, tensors: Any) -> None:
        """Record the start of an operation on `tensors`, which may be nested lists."""
        message = what[:4] in ("send", "recv")
        if message:
            self._messages = number = self._messages + 1
        else:
            self._collectives = number = self._collectives + 1
            if not self.name and (group := self._group()):
                self.name = group.getGroupName()
        self.times.append((number, "" if message else what, time.monotonic_ns()))
        while type(tensors) is list and tensors:
            tensors = tensors[0]
        size, dtype = (None, None) if type(tensors) is list else (tensors.shape, tensors.dtype)
        code = (frame := sys._getframe(2)).f_code
        # Keyed by path, as hashing a code object is slow.
        while (_library.get(code.co_filename) or _is_library(code.co_filename)) and (back := frame.f_back):
            code = (frame := back).f_code
        self._entries.append((number, message, what, size, dtype, ref(work), code, frame.f_lineno))

    def entries(self, name: str) -> list[dict[str, Any]]:
        """The operations, in the form that rank/stack_server.py sends."""
        found = []
        for number, message, what, size, dtype, reference, code, line in tuple(self._entries):
            work = reference()
            found.append(
                {
                    "group": f"{name} messages" if message else name,
                    "number": number,
                    "p2p": message,
                    "what": what,
                    "sizes": [] if size is None else [list(size)],
                    "types": [] if size is None else [str(dtype)],
                    "done": work is None or work._done,
                    "frames": [[code.co_filename, line or 0, code.co_name]],
                }
            )
        return found


def _is_library(path: str) -> bool:
    known = _library.get(path)
    if known is None:
        parts = ("/site-packages/", "/dist-packages/", "/lib/python3", "/launchpad/collectives/", "<frozen")
        known = _library[path] = any(part in path for part in parts)
    return known


def entries(everything: bool) -> list[dict[str, Any]]:
    """The operations of all groups; without `everything`, only the last of each group and those in flight."""
    found = []
    for reference in _groups:
        group = reference()
        if group is None:
            continue
        recorded = group.recorded.entries(group.getGroupName())
        found += recorded if everything else [entry for entry in recorded if not entry["done"]] + recorded[-1:]
    return found


def entered() -> list[tuple[str, int, str, int, int]]:
    """(group, number, what, when by the monotonic clock, 0) of the last operations; of messages `what` is empty."""
    return [(f"mpi {ring.name}", number, what, at, 0) for ring in _rings for number, what, at in tuple(ring.times)]
