"""Which of a node's GPUs a job gets (--gpus). Pure."""

from __future__ import annotations

import re

from launchpad.errors import UsageError
from launchpad.named import NamedTuple

_UUID = re.compile(r"(GPU|MIG)-[0-9a-zA-Z/-]{1,100}")

# More than any machine has.
_MOST = 1024


class GpuChoice(NamedTuple):
    """GPUs by their names, or so many that no other job has."""

    names: tuple[str, ...] = ()  # numbers as nvidia-smi's, or UUIDs; none: any
    number: int = 0  # of any; 0: all
    free: bool = False  # only those that nobody uses


def parse_gpus(text: str, option: str = "--gpus") -> GpuChoice:
    """Parse `1,3,5`, `GPU-…,MIG-…`, `4`, `free` or `free:4`; a single number in a list is `3,`. Raises UsageError."""
    word, colon, number = text.strip().partition(":")
    if word == "free" and (not colon or _count(number)):
        return GpuChoice(number=_count(number), free=True)
    if _count(text.strip()):
        return GpuChoice(number=_count(text.strip()))
    names = [name.strip() for name in text.split(",")]
    if names == ["0"]:
        raise UsageError(f"{option} 0: no GPU is nothing to choose; for GPU 0 write 0,")
    if len(names) > 1 and not names[-1]:
        names.pop()
    for name in names:
        if not ((name.isascii() and name.isdecimal() and int(name) < _MOST) or _UUID.fullmatch(name)):
            raise UsageError(
                f"{option} {text}: {name!r} is no GPU; write numbers or UUIDs like 1,3,5, how many (4), free or free:4"
            )
    canonical = [str(int(name)) if name.isdecimal() else name for name in names]
    for name in canonical:
        if canonical.count(name) > 1:
            raise UsageError(f"{option} {text}: GPU {name} is given twice; keep one")
    return GpuChoice(tuple(canonical))


def _count(text: str) -> int:
    """A number of GPUs; 0 if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 5 and int(text) <= _MOST else 0
