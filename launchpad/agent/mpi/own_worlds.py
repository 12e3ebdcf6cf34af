"""Tells of ranks that use MPI, but in worlds of their own, as nobody asked for one world (`--backend mpi`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from ...protocol.commands import Start
from ...protocol.events import OwnWorld
from ..part import AgentHub, AgentPart
from ..ranks import rundir
from ..ranks.rank import Rank

# When to look, in seconds after the start: MPI_Init comes early. Whoever ends before is looked at then.
LOOKS = (2.0, 10.0, 60.0)


class OwnWorlds(AgentPart):
    """Looks for the marks of Python ranks (rank/own_world.py); of another program it reads what it is linked with."""

    deadline: float | None = None  # when to look again

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._looks: list[float] = []
        self._told: set[int] = set()
        self._start: Start | None = None
        self._environ: dict[str, str] = {}
        self._linked: bool | None = None  # whether the program is linked with MPI; None: not known yet

    def starting(self, start: Start, environ: dict[str, str]) -> None:
        """Look at these ranks."""
        self._start, self._environ, self._linked = start, environ, None
        self._told.clear()
        now = time.monotonic()
        self._looks = [now + seconds for seconds in LOOKS] if self._hub.mpi is None else []
        self._next()

    def _next(self) -> None:
        self.deadline = self._looks[0] if self._looks else None

    def tick(self, now: float) -> None:
        """Look at the ranks that run."""
        del self._looks[:1]
        self._next()
        self._look(rank.rank for rank in self._hub.ranks.values())

    def exited(self, rank: Rank, code: int) -> None:
        """Look at it for the last time."""
        if self._hub.mpi is None:
            self._look([rank.rank])

    def _look(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._told and (rundir.has_own_world(self._hub.folder, rank) or self._is_linked()):
                self._told.add(rank)
                self._hub.outbox.say(OwnWorld(time.monotonic_ns(), rank))

    def _is_linked(self) -> bool:
        if self._linked is None:
            from ... import mpi_library

            assert self._start is not None
            environ = {**os.environ, **self._environ}
            programs = {entry["argv"][0] for entry in self._start.ranks if not entry["python"] and entry["argv"]}
            self._linked = any(mpi_library.is_linked(name, environ, self._start.cwd) for name in programs)
        return self._linked
