"""The base of the MPI process group: its communicator, name, timeout and lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Self

import torch
from mpi4py import MPI
from torch.distributed import DistBackendError, ProcessGroup

from launchpad.collectives.mpi import lifetime
from launchpad.collectives.mpi.recorder import Ring
from launchpad.collectives.mpi.work import Bundle, Work

DEAD = "group {name} is dead: {reason}"
DESTROYED = "it was destroyed"
NO_RANK = "{what}: there is no rank {rank} in group {name}, which has {size} ranks"

TAGS = 32768
"""The number of tags that every MPI supports."""

SWEEP_ABOVE = 32
"""Works in flight above which completed ones that nobody waits on are swept."""


class Base(ProcessGroup):
    """Torch's ProcessGroup over its own communicator."""

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # the overload for subclasses
        self._comm = comm
        self._rank = comm.rank
        self._size = comm.size
        self._name = self._description = ""
        self._death: str | None = None
        self._kept: list[object] = []
        self._pending: set[Work] = set()
        self._sweep_above = SWEEP_ABOVE
        self._coalescing: list[Work] | None = None
        self.recorded = Ring(self)
        self.timeout = timeout.total_seconds()

    @classmethod
    def create(cls, ranks: Sequence[int], timeout: timedelta) -> Self:
        """A group of `ranks`, which only they call; the world if `ranks` is empty."""
        comm = lifetime.join()
        if not ranks:
            return cls(comm.Dup(), timeout)
        # The tag separates groups that several threads create at the same time.
        return cls(comm.Create_group(comm.Get_group().Incl(ranks), tag=hash(tuple(ranks)) % TAGS), timeout)

    # The camelCase methods are called from C++.

    def getBackendName(self) -> str:
        return "mpi"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def name(self) -> str:
        return "mpi"

    def _get_backend(self, _device: torch.device) -> Self:  # type: ignore[override]
        """The group itself, for tensors of every device: torch 2.14 asks it whether operations can be coalesced."""
        return self

    def get_backend(self, device: torch.device) -> Self:
        """The same: its name since torch 2.15."""
        return self._get_backend(device)

    @property
    def label(self) -> str:
        return repr(self._description if self._description not in ("", "undefined") else self._name)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def die(self, reason: str, keep: object = None) -> None:
        """Refuse all further operations: after an abandoned one, the ranks no longer agree on which is next."""
        self._death = self._death or reason
        self._kept.append(keep)
        lifetime.Failure.reason = reason

    def hold(self, work: Work) -> None:
        """Keep the work and its tensors alive until it is done, even if the program drops it."""
        self._pending.add(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        if len(self._pending) > self._sweep_above:
            self._sweep()
            self._sweep_above = max(SWEEP_ABOVE, 2 * len(self._pending))

    def _start_coalescing(self, _device: torch.device) -> None:
        """To torch, all operations from here to `_end_coalescing` are one."""
        self._coalescing = []

    def _end_coalescing(self, _device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return Bundle(self, "coalesced operations", None, works, [])

    def drop(self, work: Work) -> None:
        self._pending.discard(work)

    def _sweep(self) -> None:
        for work in tuple(self._pending):
            work.poll()

    def shutdown(self) -> None:
        self._sweep()
        if self._death is None and not self._pending and not MPI.Is_finalized():
            self._comm.Free()
        self._death = self._death or DESTROYED

    def abort(self) -> None:
        self._death = self._death or DESTROYED

    def _live(self) -> MPI.Intracomm:
        if self._death is not None:
            raise DistBackendError(DEAD.format(name=self.label, reason=self._death))
        return self._comm

    def _check_rank(self, what: str, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(NO_RANK.format(what=what, rank=rank, name=self.label, size=self._size))
