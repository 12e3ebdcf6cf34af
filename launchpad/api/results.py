"""What the ranks return, and the sink that collects it while the job runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Self, SupportsIndex

from launchpad import errors, linux
from launchpad.api.unpickling import unpickle
from launchpad.errors import RankError, RemoteTraceback
from launchpad.job.outcome import exit_in_words
from launchpad.job.plan import Plan
from launchpad.protocol.events import RESULT, Output, RankExited, Restarted, WorldRestarted
from launchpad.rank import pickling


class Results(tuple[Any, ...]):
    """What the function returned on each rank: a tuple, in rank order.

    `results[3]` is the value of rank 3, and `results["n2", 0]` that of the first rank on host n2. `places` holds the
    (host, local rank) of each.
    """

    places: tuple[tuple[str, int], ...]

    def __new__(cls, values: Iterable[Any], places: Iterable[tuple[str, int]] = ()) -> Self:
        """`places`: the (host, local rank) that each value comes from."""
        made = super().__new__(cls, values)
        made.places = tuple(places)
        return made

    def __getitem__(self, key: SupportsIndex | slice | tuple[str, int]) -> Any:
        """The value of a rank, of a (host, local rank), or of a slice. Raises IndexError or KeyError."""
        if not isinstance(key, tuple):
            return super().__getitem__(key)
        if key not in self.places:
            raise KeyError(f"no rank ran at {key}; the ranks were at {', '.join(map(str, self.places))}")
        return super().__getitem__(self.places.index(key))

    def __repr__(self) -> str:
        return f"Results({super().__repr__()})"


class ResultCollector:
    """A sink. Each rank has a memfd: local ranks write their result to it, and results of other nodes are put there."""

    deadline = None

    def __init__(self, plan: Plan, remote: Sequence[bool]) -> None:  # noqa: ARG002
        """`remote`: whether each node is another machine."""
        self.codes: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """From now on the ranks are those of this plan."""
        self._plan = plan
        for rank in plan.ranks:
            if rank.rank not in self._files:
                self._files[rank.rank] = os.memfd_create(f"launchpad-result-{rank.rank}")

    def environ(self, rank: int) -> dict[str, str]:
        """The variables that tell a rank of this machine where to write its result."""
        return {"LAUNCHPAD_RESULT": linux.path_of(self._files[rank])}

    def on(self, event: Any) -> bool:
        """Keep the results and exit codes of the last attempt."""
        if type(event) is Output and event.stream == RESULT:
            linux.write_all(self._files[event.rank], event.data)
        elif type(event) is RankExited:
            self.codes[event.rank] = event.code
        elif type(event) is WorldRestarted:
            for rank in event.ranks:
                self.codes.pop(rank, None)
                self._empty(self._files[rank])
        elif type(event) is Restarted:
            self.codes.clear()
            for file in self._files.values():
                self._empty(file)
        return False

    def _empty(self, file: int) -> None:
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)

    def tick(self, now: float) -> None:
        """There are no deadlines."""

    def close(self) -> None:
        """Close the memfds; values that are mapped from them stay valid."""
        while self._files:
            os.close(self._files.popitem()[1])

    def results(self) -> Results:
        """The values, once every rank has exited with 0. Raises RankError if a rank did not return."""
        return Results([self._returned(rank.rank) for rank in self._plan.ranks], self.places)

    @property
    def places(self) -> list[tuple[str, int]]:
        """The (host, local rank) of each rank."""
        return [(node.name, rank.local_rank) for node in self._plan.nodes for rank in node.ranks]

    def _returned(self, rank: int) -> Any:
        ended = self._ended(rank)
        if ended is None:
            code = self.codes.get(rank, 0)
            raise self._exited(rank, code)
        return ended[1]

    def _exited(self, rank: int, code: int) -> RankError:
        text = f"{self._name(rank)} exited ({exit_in_words(code)}) before its function returned"
        return RankError(text, rank, self._host(rank), code)

    def failure(self, rank: int, report: str) -> Exception:
        """The exception to raise if this rank failed first; `report` is the text that the command would show."""
        return self.failure_of(rank, self._ended(rank), report)

    def failure_of(self, rank: int, ended: Any, report: str) -> Exception:
        """The exception for what a call has come to there (rank/call.py)."""
        match ended:
            case ("refused", kind, why):
                refusal: Exception = getattr(errors, kind)(why)
                return refusal
            case ("raised", pickled, last, text):
                trace = RemoteTraceback(f"{self._name(rank)}:\n{text.rstrip()}")
                try:
                    error = unpickle(pickled) if pickled else None
                except Exception:  # its class is not available here, or its constructor takes other arguments
                    error = None
                if not isinstance(error, Exception):
                    error = RankError(f"{self._name(rank)} raised {last}", rank, self._host(rank), 1)
                error.__cause__ = trace
                return error
            case ("interrupted",):
                return RankError(f"{self._name(rank)} raised KeyboardInterrupt", rank, self._host(rank), 130)
        return RankError(report, rank, self._host(rank), self.codes.get(rank, 1))

    def _ended(self, rank: int) -> Any:
        if rank not in self._files:  # it was spawned, and runs no function of ours
            return None
        try:
            return pickling.load(pickling.map_file(self._files[rank], shared=True), unpickle)[0]
        except EOFError:
            return None
        except Exception as error:
            raise self.unreadable(rank, error) from error

    def unreadable(self, rank: int, error: Exception) -> RankError:
        """The exception for an outcome that can't be unpickled here."""
        text = f"what {self._name(rank)} returned can't be unpickled here: {type(error).__name__}: {error}"
        return RankError(text, rank, self._host(rank), 0)

    def _name(self, rank: int) -> str:
        several = len(self._plan.nodes) > 1
        return f"rank {rank} on {self._host(rank)}" if several else f"rank {rank}"

    def _host(self, rank: int) -> str:
        return next((node.name for node in self._plan.nodes for one in node.ranks if one.rank == rank), "")
