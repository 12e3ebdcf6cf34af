"""Tensors as buffers for MPI: their own memory if MPI can use it, else a copy on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from mpi4py import MPI

Message = list[Any]
"""What mpi4py accepts as a buffer: memory, count (or counts and displacements), datatype."""


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
