"""Says why this machine's environment can't run on a host (`--sync-env`): its wheels, or the Python it needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# PEP 600's names of the older tags.
_LEGACY = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


_REMEDIES = {
    "no Python": "install python{version} there, or make the environment with uv's Python or conda's, which are sent",
    "old glibc": "install wheels here that an older glibc will do for, or leave out the hosts with one",
    "no glibc": "without glibc, install the packages there, and leave out --sync-env",
    "other platform": "for another platform, install the packages there, and leave out --sync-env",
}


class Wheel(NamedTuple):
    """An installed wheel."""

    name: str
    tags: tuple[str, ...]  # those of its WHEEL file, like "cp311-cp311-manylinux_2_28_x86_64"


class Platform(NamedTuple):
    """What a host has."""

    machine: str  # like "x86_64"
    glibc: str  # its version, like "2.36"; "" with another C library
    python: bool  # whether it has a Python that the environment can be made with


def glibc_needed(wheel: Wheel) -> tuple[int, int]:
    """The oldest glibc that the wheel runs with; (0, 0) if its tags don't say."""
    needs = [_needed(tag) for tag in wheel.tags]
    return min(needs, default=(0, 0))


def _needed(tag: str) -> tuple[int, int]:
    platform = tag.rpartition("-")[2]
    if found := re.match(r"manylinux_(\d+)_(\d+)_", platform):
        return int(found[1]), int(found[2])
    return _LEGACY.get(platform.partition("_")[0], (0, 0))


def why_not(wheels: Sequence[Wheel], version: str, here: str, there: Platform) -> str:
    """Why the environment can't be used there; "" if it can. `version`: of its Python; `here`: this machine's kind."""
    if there.machine != here:
        return f"other platform: it is {there.machine}, and this machine's packages are for {here}"
    pickiest = max(wheels, key=glibc_needed, default=Wheel("", ()))
    needed = glibc_needed(pickiest)
    if needed > (0, 0) and not there.glibc:
        return f"no glibc: {pickiest.name}'s wheel needs glibc {_dotted(needed)}, and it has another C library"
    if there.glibc and needed > _numbers(there.glibc):
        return f"old glibc: {pickiest.name}'s wheel needs glibc {_dotted(needed)}, and it has {there.glibc}"
    if not there.python:
        return f"no Python: it has no python{version}, which this environment is for"
    return ""


def remedy(version: str, whys: Iterable[str]) -> str:
    """What to do about hosts that can't have the environment, for these reasons."""
    todo = [text for kind, text in _REMEDIES.items() if any(why.startswith(kind) for why in whys)]
    return "; ".join(todo).format(version=version)


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = [int(part) for part in re.findall(r"\d+", version)] + [0, 0]
    return major, minor


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
