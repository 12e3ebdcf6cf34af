"""Removes a word of ours from the command line that ps and pkill show for an executed rank.

This uses `_ctypes`, because importing ctypes takes longer than the rest of a rank's start-up. If the kernel or the
interpreter doesn't cooperate, the word stays.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

# Fields of /proc/self/stat, numbered as in proc(5): start_code end_code start_data end_data start_brk … start_stack
# arg_start arg_end env_start env_end, in the order of struct prctl_mm_map of linux/prctl.h. None: brk itself.
_FIELDS = (26, 27, 45, 46, 47, None, 28, 48, 49, 50, 51)
_ARG_START = 7


def drop_word(place: int) -> None:
    """Remove the word at this index, and move the words before it up. Best effort."""
    try:
        _drop(place)
    except Exception:
        pass


def _drop(place: int) -> None:
    with open("/proc/self/stat", "rb") as file:
        # The name and the state are not numbers.
        fields = [0, 0, 0, 0, *map(int, file.read().rpartition(b")")[2].split()[1:])]
    start, end = fields[48], fields[49]
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")[:-1]
    if sum(len(word) + 1 for word in words) != end - start:
        return
    before, length = b"".join(word + b"\0" for word in words[:place]), len(words[place]) + 1
    _ctypes: Any = __import__("_ctypes")

    class Pointer(_ctypes._SimpleCData):  # type: ignore[misc]
        _type_ = "P"

    class Long(_ctypes._SimpleCData):  # type: ignore[misc]
        _type_ = "L"

    class Byte(_ctypes._SimpleCData):  # type: ignore[misc]
        _type_ = "B"

    class Map(_ctypes.Array):  # type: ignore[misc]
        _type_ = Byte
        _length_ = 8 * (len(_FIELDS) + 2)

    class Function(_ctypes.CFuncPtr):  # type: ignore[misc]
        _flags_ = _ctypes.FUNCFLAG_CDECL
        _restype_ = Pointer

    libc = _ctypes.dlopen(None, 0)
    prctl, sbrk = (Function(_ctypes.dlsym(libc, name)) for name in ("prctl", "sbrk"))
    values = [sbrk(Long(0)) if field is None else fields[field] for field in _FIELDS]
    values[_ARG_START] += length
    # No auxiliary vector: its address, then its size and the descriptor of a new executable, -1, in four bytes each.
    tail = [bytes(12) + b"\xff" * 4]
    shown = Map.from_buffer(bytearray(b"".join([value.to_bytes(8, sys.byteorder) for value in values] + tail)))
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        saved = os.pread(memory, length + len(before), start)
        os.pwrite(memory, before, start + length)
        if prctl(Long(_PR_SET_MM), Long(_PR_SET_MM_MAP), shown, Long(8 * len(values) + 16), Long(0)):
            os.pwrite(memory, saved, start)
    finally:
        os.close(memory)
