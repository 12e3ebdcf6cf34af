"""Times collective calls and measures the links between ranks.

Every call follows a barrier, and its time is that of the slowest rank: a collective is done when the last rank has its
result. Without the barrier, a broadcast's root would run ahead of the others and seem to cost nothing. (OSU's
benchmarks have the barrier too; nccl-tests don't, and time calls back to back.) The median over all calls is reported,
as occasional interference doesn't move it, along with the minimum and the maximum.
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
"""How many calls are timed."""

SMALL, LARGE = 8, 4 << 20
"""Message sizes in bytes, for a link's latency and for its bandwidth."""

LINK_RANKS = 8
"""How many ranks have their links measured on a single host."""


@dataclass(frozen=True)
class Timing:
    """Times in seconds; each call's time is that of its slowest rank."""

    median: float
    least: float
    most: float
    calls: int


def max_over_ranks(value: float, device: torch.device) -> float:
    """The maximum of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def sum_over_ranks(value: int, device: torch.device) -> int:
    """The sum of all ranks' values, added up here, so that it doesn't rely on the sums being measured."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    found[dist.get_rank()] = value
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found.sum())


def time_call(call: Callable[[], Any], seconds: float, device: torch.device) -> Timing:
    """Time FEWEST to MOST calls, for about `seconds`, after two warm-up calls, which open connections."""
    synchronize = _synchronizer(device)
    _times(call, 2, synchronize)
    times: list[float] = []
    begin = time.perf_counter()
    more = FEWEST
    while more > 0:
        slowest = torch.tensor(_times(call, more, synchronize), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times += slowest.tolist()
        elapsed = max_over_ranks(time.perf_counter() - begin, device)
        # Estimate how many more calls fit; at most double the number, in case the estimate is off.
        more = min(int((seconds - elapsed) / elapsed * len(times)), len(times), MOST - len(times))
    return Timing(statistics.median(times), min(times), max(times), len(times))


def _times(call: Callable[[], Any], calls: int, synchronize: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(calls):
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - begin)
    return times


def time_to_add(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds per byte to add one LARGE tensor to another while all ranks do the same."""
    total = torch.zeros(LARGE // dtype.itemsize, dtype=dtype, device=device)
    other = torch.zeros_like(total)
    return statistics.median(_times(lambda: total.add_(other), 7, _synchronizer(device))) / LARGE


def _synchronizer(device: torch.device) -> Callable[[], Any]:
    return torch.cuda.synchronize if device.type == "cuda" else _nothing


def _nothing() -> None:
    pass


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All pairs, in rounds in which no rank occurs twice (the circle method of round-robin tournaments)."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ring.insert(1, ring.pop())
    return found


def plan_links(ranks_on: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """The pairs to measure, round by round: the first ranks of all hosts, and the first two ranks of each host.

    `ranks_on` holds each host's ranks. Across hosts, the pairs of a round send at the same time, each host in one of
    them; on a single host, all pairs of its first LINK_RANKS ranks take turns.
    """
    if len(ranks_on) == 1:
        return [[pair] for one in rounds(ranks_on[0][:LINK_RANKS]) for pair in one]
    within = [(ranks[0], ranks[1]) for ranks in ranks_on if len(ranks) > 1]
    return [*([within] if within else []), *rounds([ranks[0] for ranks in ranks_on])]


def measure_links(
    plan: Sequence[Sequence[tuple[int, int]]], seconds: float, device: torch.device
) -> dict[tuple[int, int], tuple[float, float]]:
    """For each pair, half the round trip of a SMALL and of a LARGE message, in seconds. All ranks get the result."""
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
    """Half the median round trip, in seconds."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    synchronize = _synchronizer(device)

    def trip() -> float:
        begin = time.perf_counter()
        if first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        synchronize()
        return time.perf_counter() - begin

    trip()
    once = min(trip(), trip())
    calls = torch.tensor([min(MOST, max(5, int(seconds / max(once, 1e-7))))], device=device)
    if first:
        dist.send(calls, peer)
    else:
        dist.recv(calls, peer)
    return statistics.median([trip() for _ in range(int(calls))]) / 2
