"""The data of each kind of operation: its buffers, the call, and the results that arithmetic predicts.

Values are small integers, so that sums are exact in every dtype up to some world size. They repeat with a prime period,
so that misplaced or shifted pieces show up as wrong values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from launchpad import collectives as dist
from launchpad.bench.operations import Kind

SUMMED, MOVED = 5, 113
"""The periods of summed values (0 … 4) and of moved ones (0 … 112, exact even in bfloat16)."""

# Integers up to here are exact.
_EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}


@dataclass(frozen=True)
class Prepared:
    """An operation at one size, ready to call."""

    size: int  # bytes
    count: int  # elements
    call: Callable[[], Any]
    fill: Callable[[], Any]  # set the inputs and poison the outputs
    wrong: Callable[[], int]  # the number of wrong elements on this rank
    clear: Callable[[], None]  # zero everything: repeated sums would soon be infinite


def own_values(period: int, rank: int, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Elements start … start + count of a rank's data, of shape (count,)."""
    return _cycle((torch.arange(period) + _SHIFT[period] * rank) % period, start, count, like)


def sums(ranks: int, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """The sums of these elements over all ranks, computed locally."""
    values = torch.arange(SUMMED)
    total = sum(((values + _SHIFT[SUMMED] * rank) % SUMMED for rank in range(ranks)), torch.zeros_like(values))
    return _cycle(total, start, count, like)


_SHIFT = {SUMMED: 3, MOVED: 31}


def _cycle(values: torch.Tensor, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """The values repeated, starting with the one at `start`."""
    rotated = values.roll(-(start % len(values))).to(like.device, like.dtype)
    return rotated.repeat(-(-count // len(values)))[:count]


def _differ(found: torch.Tensor, expected: torch.Tensor, ranks: int) -> int:
    """How many elements differ; if sums are too large to be exact, by more than rounding."""
    if (SUMMED - 1) * ranks <= _EXACT.get(found.dtype, 1 << 31):
        return int((found != expected).sum())
    allowed = expected.abs() * (ranks * torch.finfo(found.dtype).eps)
    return int(((found - expected).abs() > allowed).sum())


def prepare(kind: Kind, function: Any, size: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Buffers of about `size` bytes, rounded to whole elements, and to equal parts if the ranks share them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    item = dtype.itemsize
    if kind == "barrier":
        return Prepared(0, 0, function, _nothing, lambda: 0, _nothing)
    if kind in _WHOLE:
        count = max(1, size // item)
        whole = torch.empty(count, dtype=dtype, device=device)
        call, fill, wrong, buffers = _WHOLE[kind](function, whole, rank, ranks)
    else:
        part = max(1, size // item // ranks)
        count = part * ranks
        whole, share = (torch.empty(length, dtype=dtype, device=device) for length in (count, part))
        call, fill, wrong, buffers = _SHARED[kind](function, whole, share, rank, ranks)

    def clear() -> None:
        for buffer in buffers:
            buffer.zero_()

    return Prepared(count * item, count, call, fill, wrong, clear)


def _nothing() -> None:
    pass


_Parts = tuple[Callable[[], Any], Callable[[], Any], Callable[[], int], tuple[torch.Tensor, ...]]
"""`call`, `fill` and `wrong` of Prepared, and the buffers to clear."""


def _all_reduce(function: Any, whole: torch.Tensor, rank: int, ranks: int) -> _Parts:
    count = len(whole)
    return (
        lambda: function(whole),
        lambda: whole.copy_(own_values(SUMMED, rank, 0, count, whole)),
        lambda: _differ(whole, sums(ranks, 0, count, whole), ranks),
        (whole,),
    )


def _all_reduce_into(function: Any, whole: torch.Tensor, rank: int, ranks: int) -> _Parts:
    count, result = len(whole), torch.empty_like(whole)
    expected = sums(ranks, 0, count, whole)

    def fill() -> None:
        whole.copy_(own_values(SUMMED, rank, 0, count, whole))
        result.copy_(expected + 1)

    return lambda: function(whole, result), fill, lambda: _differ(result, expected, ranks), (whole, result)


def _reduce(function: Any, whole: torch.Tensor, rank: int, ranks: int) -> _Parts:
    count = len(whole)
    return (
        lambda: function(whole, 0),
        lambda: whole.copy_(own_values(SUMMED, rank, 0, count, whole)),
        lambda: _differ(whole, sums(ranks, 0, count, whole), ranks) if rank == 0 else 0,
        (whole,),
    )


def _broadcast(function: Any, whole: torch.Tensor, rank: int, _: int) -> _Parts:
    root = own_values(MOVED, 0, 0, len(whole), whole)
    return (
        lambda: function(whole, 0),
        lambda: whole.copy_(root if rank == 0 else root + 1),
        lambda: _differ(whole, root, 1),
        (whole,),
    )


def _send_recv(function: Any, whole: torch.Tensor, rank: int, ranks: int) -> _Parts:
    """A ring, as in nccl-tests: send to the next rank, receive from the previous one."""
    received = torch.empty_like(whole)
    previous, following = (rank - 1) % ranks, (rank + 1) % ranks
    expected = own_values(MOVED, previous, 0, len(whole), whole)

    def call() -> None:
        sending, receiving = dist.P2POp(dist.isend, whole, following), dist.P2POp(dist.irecv, received, previous)
        for work in function([sending, receiving]):
            work.wait()

    def fill() -> None:
        whole.copy_(own_values(MOVED, rank, 0, len(whole), whole))
        received.copy_(expected + 1)

    return call, fill, lambda: _differ(received, expected, 1), (whole, received)


def _all_gather(function: Any, whole: torch.Tensor, share: torch.Tensor, rank: int, ranks: int) -> _Parts:
    part = len(share)
    expected = torch.cat([own_values(MOVED, other, 0, part, whole) for other in range(ranks)])

    def fill() -> None:
        share.copy_(own_values(MOVED, rank, 0, part, share))
        whole.copy_(expected + 1)

    return lambda: function(whole, share), fill, lambda: _differ(whole, expected, 1), (whole, share)


def _all_gather_list(function: Any, whole: torch.Tensor, share: torch.Tensor, rank: int, ranks: int) -> _Parts:
    pieces = list(torch.split(whole, len(share)))
    return _all_gather(lambda _, own: function(pieces, own), whole, share, rank, ranks)


def _reduce_scatter(function: Any, whole: torch.Tensor, share: torch.Tensor, rank: int, ranks: int) -> _Parts:
    part = len(share)
    expected = sums(ranks, rank * part, part, share)

    def fill() -> None:
        whole.copy_(own_values(SUMMED, rank, 0, len(whole), whole))
        share.copy_(expected + 1)

    return lambda: function(share, whole), fill, lambda: _differ(share, expected, ranks), (whole, share)


def _all_to_all(function: Any, whole: torch.Tensor, share: torch.Tensor, rank: int, ranks: int) -> _Parts:
    part, received = len(share), torch.empty_like(whole)
    expected = torch.cat([own_values(MOVED, other, rank * part, part, whole) for other in range(ranks)])

    def fill() -> None:
        whole.copy_(own_values(MOVED, rank, 0, len(whole), whole))
        received.copy_(expected + 1)

    return lambda: function(received, whole), fill, lambda: _differ(received, expected, 1), (whole, received)


def _gather(function: Any, whole: torch.Tensor, share: torch.Tensor, rank: int, ranks: int) -> _Parts:
    part = len(share)
    pieces = list(torch.split(whole, part)) if rank == 0 else None
    expected = torch.cat([own_values(MOVED, other, 0, part, whole) for other in range(ranks)])

    def fill() -> None:
        share.copy_(own_values(MOVED, rank, 0, part, share))
        whole.copy_(expected + 1)

    wrong = (lambda: _differ(whole, expected, 1)) if rank == 0 else (lambda: 0)
    return lambda: function(share, pieces, 0), fill, wrong, (whole, share)


def _scatter(function: Any, whole: torch.Tensor, share: torch.Tensor, rank: int, _: int) -> _Parts:
    part = len(share)
    pieces = list(torch.split(whole, part)) if rank == 0 else None
    expected = own_values(MOVED, 0, rank * part, part, share)

    def fill() -> None:
        whole.copy_(own_values(MOVED, 0, 0, len(whole), whole))
        share.copy_(expected + 1)

    return lambda: function(share, pieces, 0), fill, lambda: _differ(share, expected, 1), (whole, share)


_WHOLE: dict[Kind, Callable[..., _Parts]] = {
    "all_reduce": _all_reduce,
    "all_reduce_into": _all_reduce_into,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "send_recv": _send_recv,
}
_SHARED: dict[Kind, Callable[..., _Parts]] = {
    "all_gather": _all_gather,
    "all_gather_list": _all_gather_list,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
}
