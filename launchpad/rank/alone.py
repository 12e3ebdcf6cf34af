"""Tells whether a rank can only wait: no other thread runs Python, and it would not survive the wait's time-out."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

_LAUNCHPAD = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# These raise again what they catch.
_PASS_ON = (
    "torch/distributed/c10d_logger.py",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py",
    "/runpy.py",
    "<frozen runpy>",
)

# Instructions at the beginning of a handler that may end the exception; a finally clause has none of them.
_CATCHES = frozenset({"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "WITH_EXCEPT_START", "RETURN_VALUE", "RETURN_CONST"})


def is_alone(main: int, own: int) -> bool:
    """Whether nothing but what its main thread waits for can get the program any further.

    `own` is a thread of ours.
    """
    frames = sys._current_frames()
    return main in frames and frames.keys() <= {main, own} and not _is_caught(frames[main])


def _is_caught(frame: FrameType | None) -> bool:
    """Whether the program might go on after an exception that is raised here."""
    while frame is not None and not frame.f_code.co_filename.startswith(_LAUNCHPAD):
        if not frame.f_code.co_filename.endswith(_PASS_ON) and catches(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def catches(code: CodeType, at: int) -> bool:
    """Whether the function might go on after an exception of the instruction at this offset."""
    import dis

    while (handler := _handler(code, at)) >= 0:
        before = ""
        for one in dis.get_instructions(code):
            if one.offset < handler:
                continue
            if one.opname in _CATCHES or (before == "PUSH_EXC_INFO" and one.opname == "POP_TOP"):  # `except:`
                return True
            if one.opname == "RERAISE":
                at = one.offset
                break
            before = one.opname
        else:
            return True
    return False


def _handler(code: CodeType, at: int) -> int:
    """Where the handler for this instruction is, -1 for none (CPython: InternalDocs/exception_handling.md)."""
    table = iter(code.co_exceptiontable)

    def number() -> int:
        byte = next(table)
        value = byte & 63
        while byte & 64:
            byte = next(table)
            value = value << 6 | byte & 63
        return value

    try:
        while True:
            start, size, target, _ = 2 * number(), 2 * number(), 2 * number(), number()
            if start <= at < start + size:
                return target
    except StopIteration:
        return -1
