"""An operation's tensors as MPI takes them: of the right sizes (a wrong one is a crash), in memory that it can use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from mpi4py import MPI

Message = list[Any]
"""What mpi4py accepts as a buffer: memory, count (or counts and displacements), datatype."""

T = TypeVar("T")

ONE = "{what}: the mpi frontend takes one tensor (or list), not {count}"
WHOLE = "{what}: {whole} must have {size} times the elements of {part}, and the same dtype"
COUNT = "{what}: the list has {count} tensors for {size} ranks"
DTYPES = "{what}: the tensors differ in dtype: {dtypes}"
OWN = "{what}: tensor {rank} of the list, {piece}, must match this rank's own, {own}"
SPLITS = "{what}: the splits {given} must be {size} numbers >= 0 that add up to {rows}, the first dimension of {tensor}"
UNEVEN = "{what}: the first dimension of {tensor} can't be split evenly among {size} ranks; pass the split sizes"


def is_usable(tensor: torch.Tensor) -> bool:
    """Whether MPI can use the tensor's own memory."""
    dense = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
    return dense and not tensor.is_neg() and not tensor.is_conj()


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, in memory that MPI can use."""
    if is_usable(tensor):
        return tensor
    check_dense(tensor)
    return tensor.detach().cpu().resolve_neg().resolve_conj().contiguous()


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Memory in which the tensor's new values can arrive: its own, or an uninitialised buffer."""
    if is_usable(tensor):
        return tensor
    check_dense(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"mpi: tensors must be dense, not {tensor.layout}")


def stored(tensor: torch.Tensor, host: torch.Tensor) -> Callable[[], object] | None:
    """A function that copies what arrives in `host` to the tensor; None if it arrives in the tensor's own memory."""
    return None if host is tensor else lambda: tensor.detach().copy_(host)


def flat_room(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One uninitialised buffer with room for all of them, in order."""
    return torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype if tensors else torch.uint8)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new buffer with the values of all of them, in order."""
    return torch.cat([loaded(t).reshape(-1) for t in tensors]) if tensors else torch.empty(0)


def store_all(tensors: Sequence[torch.Tensor], host: torch.Tensor) -> None:
    for tensor, piece in zip(tensors, torch.split(host, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(piece.view(tensor.shape))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they share memory: MPI refuses to send from and receive into the same buffer at once."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def typed(host: torch.Tensor, datatype: MPI.Datatype, ranks: int = 1) -> Message:
    """A buffer to reduce, split evenly among `ranks`."""
    return [MPI.buffer.fromaddress(host.data_ptr(), host.nbytes), host.numel() // ranks, datatype]


def raw(host: torch.Tensor, ranks: int = 1) -> Message:
    """A buffer to move byte by byte, whatever its dtype, split evenly among `ranks`."""
    return [MPI.buffer.fromaddress(host.data_ptr(), host.nbytes), host.nbytes // ranks, MPI.BYTE]


def parts(host: torch.Tensor, counts: Iterable[int]) -> Message:
    """A buffer to move in parts; `counts` are the numbers of elements in each, in order."""
    sizes = [count * host.itemsize for count in counts]
    return [MPI.buffer.fromaddress(host.data_ptr(), host.nbytes), (sizes, None), MPI.BYTE]


def describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def one(what: str, given: Sequence[T]) -> T:
    if len(given) != 1:
        raise ValueError(ONE.format(what=what, count=len(given)))
    return given[0]


def check_whole(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(WHOLE.format(what=what, whole=describe(whole), size=size, part=describe(part)))


def check_pieces(what: str, pieces: Sequence[torch.Tensor], own: torch.Tensor | None, rank: int, size: int) -> None:
    """Check a list with one tensor per rank; `own` is what goes to or comes from this rank's item."""
    if len(pieces) != size:
        raise ValueError(COUNT.format(what=what, count=len(pieces), size=size))
    dtypes = {tensor.dtype for tensor in pieces} | ({own.dtype} if own is not None else set())
    if len(dtypes) > 1:
        raise ValueError(DTYPES.format(what=what, dtypes=", ".join(sorted(map(str, dtypes)))))
    if own is not None and pieces[rank].numel() != own.numel():
        raise ValueError(OWN.format(what=what, rank=rank, piece=describe(pieces[rank]), own=describe(own)))


def splits(what: str, tensor: torch.Tensor, given: Sequence[int], size: int) -> list[int]:
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
