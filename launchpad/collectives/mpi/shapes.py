"""Check an operation's tensors before MPI sees them; there, a wrong size is a crash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

ONE = "{what}: the mpi frontend takes one tensor (or list), not {count}"
WHOLE = "{what}: {whole} must have {size} times the elements of {part}, and the same dtype"
COUNT = "{what}: the list has {count} tensors for {size} ranks"
DTYPES = "{what}: the tensors differ in dtype: {dtypes}"
OWN = "{what}: tensor {rank} of the list, {piece}, must match this rank's own, {own}"
SPLITS = "{what}: the splits {given} must be {size} numbers >= 0 that add up to {rows}, the first dimension of {tensor}"
UNEVEN = "{what}: the first dimension of {tensor} can't be split evenly among {size} ranks; pass the split sizes"


def describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def one(what: str, given: Sequence[T]) -> T:
    if len(given) != 1:
        raise ValueError(ONE.format(what=what, count=len(given)))
    return given[0]


def check_whole(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(WHOLE.format(what=what, whole=describe(whole), size=size, part=describe(part)))


def check_pieces(what: str, pieces: Sequence[Tensor], own: Tensor | None, rank: int, size: int) -> None:
    """Check a list with one tensor per rank; `own` is what goes to or comes from this rank's item."""
    if len(pieces) != size:
        raise ValueError(COUNT.format(what=what, count=len(pieces), size=size))
    dtypes = {tensor.dtype for tensor in pieces} | ({own.dtype} if own is not None else set())
    if len(dtypes) > 1:
        raise ValueError(DTYPES.format(what=what, dtypes=", ".join(sorted(map(str, dtypes)))))
    if own is not None and pieces[rank].numel() != own.numel():
        raise ValueError(OWN.format(what=what, rank=rank, piece=describe(pieces[rank]), own=describe(own)))


def splits(what: str, tensor: Tensor, given: Sequence[int], size: int) -> list[int]:
    """How many elements go to or come from each rank. `given` counts rows; empty means equal shares."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not given:
        if rows % size:
            raise ValueError(UNEVEN.format(what=what, tensor=describe(tensor), size=size))
        given = [rows // size] * size
    if len(given) != size or sum(given) != rows or min(given) < 0:
        raise ValueError(SPLITS.format(what=what, given=list(given), size=size, rows=rows, tensor=describe(tensor)))
    row = math.prod(tensor.shape[1:])
    return [count * row for count in given]
