"""Binds this process to CPUs, and has it prefer the memory of NUMA nodes. Children inherit both, also over an exec."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

# set_mempolicy(2)
_MPOL_PREFERRED = 1
_MPOL_PREFERRED_MANY = 5  # new in Linux 5.15

# The C library has no functions for these system calls: get_mempolicy, set_mempolicy.
_CALLS = {"x86_64": (239, 238), "ppc64le": (260, 261), "s390x": (269, 270)}
_CALLS |= dict.fromkeys(("aarch64", "riscv64", "loongarch64"), (236, 237))

_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind(cpus: Sequence[int], nodes: Sequence[int]) -> None:
    """Run on these CPUs only, and take memory of these nodes first; none: as before. Raises OSError for the CPUs.

    The process must have one thread.
    """
    os.sched_setaffinity(0, cpus)
    if nodes:
        _prefer(nodes)


def may_prefer_memory() -> bool:
    """Whether the kernel has memory policies, and lets us use them: containers often don't."""
    return _call(0, None, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) == 0


def _prefer(nodes: Sequence[int]) -> None:
    """Best effort: an older kernel takes a single node only, and the memory nearest to a CPU is its default anyway."""
    words = (ctypes.c_ulong * (max(nodes) // _BITS + 1))()
    for node in nodes:
        words[node // _BITS] |= 1 << node % _BITS
    mode = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_PREFERRED_MANY
    # The kernel counts one bit less than it is told.
    _call(1, ctypes.c_long(mode), ctypes.byref(words), ctypes.c_ulong(len(words) * _BITS + 1))


def _call(which: int, *arguments: object) -> int:
    numbers = _CALLS.get(os.uname().machine)
    return -1 if numbers is None else int(ctypes.CDLL(None).syscall(ctypes.c_long(numbers[which]), *arguments))
