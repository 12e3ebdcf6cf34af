"""Measures what processes use, each with all its descendants, in one pass over /proc."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from ... import linux

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

# Processes that don't descend from us are not looked at again for this many passes; then their pids may be reused.
_PASSES = 30


class TreeUse(NamedTuple):
    """What a process and its descendants use."""

    state: str  # the process's main thread's, a letter as in proc(5)
    cpu: float  # seconds, with those of descendants that are gone
    memory: int  # resident bytes; what several of the processes share counts for each
    threads: int
    read: int  # bytes, by system calls; -1 if unknown
    written: int  # likewise


class ProcessFigures(NamedTuple):
    """What one process uses, with children of its that are gone."""

    state: str
    parent: int
    group: int
    session: int
    cpu: float
    memory: int
    threads: int


class ProcessTrees:
    """Reads /proc again and again."""

    def __init__(self) -> None:
        self._others: set[int] = set()  # pids of processes that don't descend from us
        self._passes = 0
        self.root_of: dict[int, int] = {}  # by pid: whose tree it was in at the last pass
        self.found: dict[int, ProcessFigures] = {}  # by pid, at that pass

    def read(self, roots: Collection[int]) -> dict[int, TreeUse]:
        """What the trees of these children of ours use; without those that are gone, or that /proc doesn't show."""
        if not linux.shows_our_pids():
            return {}
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._passes += 1
        self._others = self._others & present if self._passes % _PASSES else set()
        found = {pid: process for pid in present - self._others if (process := _process(pid)) is not None}
        members: dict[int, list[int]] = {root: [] for root in roots if root in found}
        us = os.getpid()
        for pid, process in found.items():
            place = pid
            for _ in found:  # not without limit: where a pid has been used again, parents may form a circle
                if place not in found or place == us or place in members:
                    break
                place = found[place].parent
            if place == us:  # perhaps an orphan, which has become our child
                place = next((leader for leader in (process.session, process.group) if leader in members), us)
            if place in members:
                members[place].append(pid)
            elif place != us:
                self._others.add(pid)
        self.found = found
        self.root_of = {pid: root for root, pids in members.items() for pid in pids}
        return {root: _sum(found[root].state, [found[pid] for pid in pids], pids) for root, pids in members.items()}


def _process(pid: int) -> ProcessFigures | None:
    """A process; None if it is gone, or hidden."""
    try:
        fields = linux.contents(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        return ProcessFigures(
            state=fields[0].decode(),
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            # utime and stime, then the same of children that have been waited for.
            cpu=sum(map(int, fields[11:15])) / _TICKS,
            memory=int(fields[21]) * _PAGE,
            threads=int(fields[17]),
        )
    except (OSError, ValueError, IndexError):
        return None


def _sum(state: str, processes: list[ProcessFigures], pids: list[int]) -> TreeUse:
    read = written = 0
    for pid in pids:
        try:
            lines = dict(line.split(b": ") for line in linux.contents(f"/proc/{pid}/io").splitlines())
            read, written = read + int(lines[b"rchar"]), written + int(lines[b"wchar"])
        except (FileNotFoundError, ProcessLookupError):  # it has just gone
            continue
        except (OSError, ValueError, LookupError):
            read = written = -1
            break
    return TreeUse(
        state=state,
        cpu=round(sum(process.cpu for process in processes), 2),
        memory=sum(process.memory for process in processes),
        threads=sum(process.threads for process in processes),
        read=read,
        written=written,
    )
