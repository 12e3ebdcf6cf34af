"""Reads the marks `ranks` and `parallel`: on how many ranks a test runs, and for how long at most. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# How many ranks mpi-pytest's mark stands for if it names no number.
_PARALLEL_DEFAULT = 3

_RANKS = "@pytest.mark.ranks"
_PARALLEL = "@pytest.mark.parallel"


class RanksMark(NamedTuple):
    """What a test's mark asks for."""

    sizes: tuple[int, ...]  # it runs once on each of these numbers of ranks
    ids: tuple[str, ...]  # their names in the test's id
    timeout: float | None  # seconds for set-up, call and teardown together
    mpi: bool  # the ranks can form an MPI_COMM_WORLD, whatever --ranks-backend says


def read_ranks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RanksMark:
    """`ranks(4)`, `ranks(2, 4)`, `ranks(4, timeout=30)`. Raises ValueError."""
    if unknown := kwargs.keys() - {"timeout"}:
        raise ValueError(f"{_RANKS} has no argument {sorted(unknown)[0]!r}: it takes numbers of ranks, and timeout=")
    if not args:
        raise ValueError(f"{_RANKS} needs the number of ranks, for example {_RANKS}(4)")
    sizes = _sizes(_RANKS, args)
    timeout = kwargs.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise ValueError(f"{_RANKS}: timeout={timeout!r} is not a number of seconds above 0")
    return RanksMark(sizes, tuple(f"ranks{size}" for size in sizes), timeout, mpi=False)


def read_parallel(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RanksMark:
    """mpi-pytest's mark, with its default and its ids: `parallel`, `parallel(3)`, `parallel([2, 3])`, `nprocs=`.

    Raises ValueError.
    """
    given = [*args, *kwargs.values()]
    if kwargs.keys() - {"nprocs"} or len(given) > 1:
        raise ValueError(f"{_PARALLEL} takes one argument, nprocs: a number of ranks, or a list of them")
    count = given[0] if given else _PARALLEL_DEFAULT
    sizes = _sizes(_PARALLEL, count if isinstance(count, list | tuple) else [count])
    return RanksMark(sizes, tuple(f"nprocs={size}" for size in sizes), None, mpi=True)


def _sizes(mark: str, sizes: Sequence[Any]) -> tuple[int, ...]:
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{mark}: {size!r} is not a number of ranks: use whole numbers from 1")
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"{mark}: each number of ranks must be named, and only once")
    return tuple(sizes)
