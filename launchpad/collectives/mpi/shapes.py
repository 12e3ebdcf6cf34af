"""What an operation's tensors must be like, said before MPI, where a wrong size is a crash, is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

ONE = "{what}: torch passed {count} tensors (or lists) where the mpi frontend takes one"
WHOLE = "{what}: the whole, {whole}, must hold {size} times the part, {part}, of the same dtype"
COUNT = "{what}: {count} tensors for a group of {size}"
DTYPES = "{what}: the tensors differ in dtype: {dtypes}"
OWN = "{what}: tensor {rank} of the list, {piece}, must be like this rank's own, {own}"
SPLITS = "{what}: the splits {given} must be {size} numbers >= 0 that add up to {rows}, the first dimension of {tensor}"
UNEVEN = "{what}: the first dimension of {tensor} can't be divided by {size} ranks evenly; give the splits"


def looks(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def one(what: str, given: Sequence[T]) -> T:
    if len(given) != 1:
        raise ValueError(ONE.format(what=what, count=len(given)))
    return given[0]


def check_whole(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(WHOLE.format(what=what, whole=looks(whole), size=size, part=looks(part)))


def check_pieces(what: str, pieces: Sequence[Tensor], own: Tensor | None, rank: int, size: int) -> None:
    """A list with a tensor for each rank; `own` is what goes to or comes from this rank's place in it."""
    if len(pieces) != size:
        raise ValueError(COUNT.format(what=what, count=len(pieces), size=size))
    dtypes = {tensor.dtype for tensor in pieces} | ({own.dtype} if own is not None else set())
    if len(dtypes) > 1:
        raise ValueError(DTYPES.format(what=what, dtypes=", ".join(sorted(map(str, dtypes)))))
    if own is not None and pieces[rank].numel() != own.numel():
        raise ValueError(OWN.format(what=what, rank=rank, piece=looks(pieces[rank]), own=looks(own)))


def splits(what: str, tensor: Tensor, given: Sequence[int], size: int) -> list[int]:
    """How many elements go to or come from each rank, where `given` counts rows, or is empty for the same to each."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not given:
        if rows % size:
            raise ValueError(UNEVEN.format(what=what, tensor=looks(tensor), size=size))
        given = [rows // size] * size
    if len(given) != size or sum(given) != rows or min(given) < 0:
        raise ValueError(SPLITS.format(what=what, given=list(given), size=size, rows=rows, tensor=looks(tensor)))
    row = math.prod(tensor.shape[1:])
    return [count * row for count in given]
