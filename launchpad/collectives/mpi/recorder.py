"""The last operations of each group, for whoever asks where the ranks are: `launchpad stacks`, a stall.

Torch's flight recorder does this for its own groups. A record is made when an operation begins and holds no tensor and
no frame, which would keep them alive.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from launchpad.collectives.mpi.base import Base
    from launchpad.collectives.mpi.work import Work

KEPT = 64
"""Operations of a group."""

_groups: list[ref[Base]] = []

_library: dict[str, bool] = {}  # by file


class Ring:
    """One group's operations. Collectives and messages between two ranks are counted apart."""

    def __init__(self, group: Base) -> None:
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self._collectives = self._messages = 0
        _groups[:] = [one for one in _groups if one() is not None] + [ref(group)]

    def add(self, work: Work, what: str, tensors: Any) -> None:
        """An operation begins; `tensors`: what it works on, lists of them."""
        message = what[:4] in ("send", "recv")
        if message:
            self._messages = number = self._messages + 1
        else:
            self._collectives = number = self._collectives + 1
        while type(tensors) is list and tensors:
            tensors = tensors[0]
        size, dtype = (None, None) if type(tensors) is list else (tensors.shape, tensors.dtype)
        code = (frame := sys._getframe(2)).f_code
        # Not by the code itself, whose hash takes long.
        while (_library.get(code.co_filename) or _is_library(code.co_filename)) and (back := frame.f_back):
            code = (frame := back).f_code
        self._entries.append((number, message, what, size, dtype, ref(work), code, frame.f_lineno))

    def told(self, name: str) -> list[dict[str, Any]]:
        """As nursery/answering.py tells it."""
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
    """Of all groups; without `everything` the last of each, and those under way."""
    found = []
    for reference in _groups:
        group = reference()
        if group is None:
            continue
        told = group.recorded.told(group.getGroupName())
        found += told if everything else [entry for entry in told if not entry["done"]] + told[-1:]
    return found
