"""Times a call that all ranks make together, and measures the links between them.

Every call comes after a barrier, and its time is that of the rank that took longest: a collective is done when the last
rank has its result. Without the barrier a broadcast's root would run ahead of the others and seem to cost nothing
(OSU's benchmarks have one too; nccl-tests have not, and report calls in a row). Of all calls the median is reported,
which a process that gets in the way now and then doesn't move, and the least and the greatest beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launchpad import collectives as dist

FEWEST, MOST = 3, 1000
"""Calls that are timed."""

SMALL, LARGE = 8, 4 << 20
"""Bytes of the messages of a link's latency and of its bandwidth."""

LINK_RANKS = 8
"""On one host the links of so many ranks are measured, one after the other."""


@dataclass(frozen=True)
class Timing:
    """In seconds, each call's time that of its slowest rank."""

    median: float
    least: float
    most: float
    calls: int


def agree(value: float, device: torch.device) -> float:
    """The greatest of the ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def total(value: int, device: torch.device) -> int:
    """The sum of the ranks' values, each summed here: nothing that is being measured is relied on."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    found[dist.get_rank()] = value
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found.sum())


def time_call(call: Callable[[], Any], seconds: float, device: torch.device) -> Timing:
    """Call it FEWEST to MOST times, for about so many seconds, after two calls that don't count: they connect."""
    wait = _waiting(device)
    _times(call, 2, wait)
    times: list[float] = []
    begin = time.perf_counter()
    more = FEWEST
    while more > 0:
        taken = torch.tensor(_times(call, more, wait), dtype=torch.float64, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times += taken.tolist()
        elapsed = agree(time.perf_counter() - begin, device)
        # What so many calls have taken tells how many more there is time for; at most doubled, lest it told wrong.
        more = min(int((seconds - elapsed) / elapsed * len(times)), len(times), MOST - len(times))
    return Timing(statistics.median(times), min(times), max(times), len(times))


def _times(call: Callable[[], Any], calls: int, wait: Callable[[], Any]) -> list[float]:
    taken = []
    for _ in range(calls):
        dist.barrier()
        wait()
        begin = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begin)
    return taken


def adding(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds for a byte of one LARGE tensor that is added to another, while all ranks do so."""
    total = torch.zeros(LARGE // dtype.itemsize, dtype=dtype, device=device)
    other = torch.zeros_like(total)
    return statistics.median(_times(lambda: total.add_(other), 7, _waiting(device))) / LARGE


def _waiting(device: torch.device) -> Callable[[], Any]:
    return torch.cuda.synchronize if device.type == "cuda" else _nothing


def _nothing() -> None:
    pass


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All pairs, in rounds in which nobody is in two (the circle method of tournaments)."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ring.insert(1, ring.pop())
    return found


def plan_links(ranks_on: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Who sends to whom, round by round: the first ranks of all hosts, and on each host its first two.

    `ranks_on` has each host's ranks. Between hosts the pairs of a round send at the same time, each host in one; on a
    single host all pairs of its first ranks take turns.
    """
    if len(ranks_on) == 1:
        return [[pair] for one in rounds(ranks_on[0][:LINK_RANKS]) for pair in one]
    within = [(ranks[0], ranks[1]) for ranks in ranks_on if len(ranks) > 1]
    return [*([within] if within else []), *rounds([ranks[0] for ranks in ranks_on])]


def measure_links(
    plan: Sequence[Sequence[tuple[int, int]]], seconds: float, device: torch.device
) -> dict[tuple[int, int], tuple[float, float]]:
    """By pair: half a round trip of a SMALL and of a LARGE message, in seconds; on all ranks."""
    rank = dist.get_rank()
    mine: list[tuple[tuple[int, int], tuple[float, float]]] = []
    each = seconds / max(1, len(plan))
    for pairs in plan:
        dist.barrier()
        for pair in pairs:
            if rank in pair:
                peer = pair[1] if rank == pair[0] else pair[0]
                times = [_ping_pong(peer, rank == pair[0], size, each / 2, device) for size in (SMALL, LARGE)]
                if rank == pair[0]:
                    mine.append((pair, (times[0], times[1])))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {pair: times for found in everyone for pair, times in found}


def _ping_pong(peer: int, first: bool, size: int, seconds: float, device: torch.device) -> float:
    """Half the median round trip."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    wait = _waiting(device)

    def trip() -> float:
        begin = time.perf_counter()
        if first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        wait()
        return time.perf_counter() - begin

    trip()
    once = min(trip(), trip())
    calls = torch.tensor([min(MOST, max(5, int(seconds / max(once, 1e-7))))], device=device)
    if first:
        dist.send(calls, peer)
    else:
        dist.recv(calls, peer)
    return statistics.median([trip() for _ in range(int(calls))]) / 2
