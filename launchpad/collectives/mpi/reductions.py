"""Translates torch's ReduceOp and dtype to MPI: the operation, the wire type, the steps before and after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from launchpad.collectives.mpi import buffers

INTEGERS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.uint16: MPI.UINT16_T,
    torch.int32: MPI.INT32_T,
    torch.uint32: MPI.UINT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint64: MPI.UINT64_T,
}
INDIVISIBLE = {torch.uint16, torch.uint32, torch.uint64}
"""Torch can't divide these."""

FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
COMPLEX = {torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX}
WIRE = {**INTEGERS, **FLOATS, **COMPLEX, torch.bool: MPI.C_BOOL}

# No MPI sums these, so they are sent in the next wider type and rounded once.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

Operations = dict[ReduceOp.RedOpType, MPI.Op]

ARITHMETIC: Operations = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PREMUL_SUM: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
}
ORDER: Operations = {ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
BITS: Operations = {ReduceOp.BAND: MPI.BAND, ReduceOp.BOR: MPI.BOR, ReduceOp.BXOR: MPI.BXOR}

SCALED: int = ReduceOp.PREMUL_SUM.value

# As in NCCL: a sum of bools says whether any was true.
LOGICAL: Operations = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BXOR: MPI.LXOR,
}


def operations(dtype: torch.dtype) -> Operations:
    """The reductions that are defined for this wire type."""
    if dtype == torch.bool:
        return LOGICAL
    if dtype in INTEGERS:
        lacking = {ReduceOp.PREMUL_SUM} | ({ReduceOp.AVG} if dtype in INDIVISIBLE else set())
        return {op: mpi for op, mpi in {**ARITHMETIC, **ORDER, **BITS}.items() if op not in lacking}
    return {**ARITHMETIC, **ORDER} if dtype in FLOATS else ARITHMETIC


@dataclass(frozen=True)
class Reduction:
    op: MPI.Op
    datatype: MPI.Datatype
    dtype: torch.dtype
    """The wire type."""
    average: bool
    factor: float | torch.Tensor | None = None
    """By which each rank first multiplies its own values (PREMUL_SUM)."""

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's contribution, in memory that MPI can use."""
        if self.factor is not None:
            tensor = tensor.detach() * self.factor
        if tensor.dtype != self.dtype:
            tensor = tensor.detach().to(self.dtype)
        return buffers.loaded(tensor)

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == self.dtype:
            return buffers.room(tensor)
        return torch.empty(tensor.shape, dtype=self.dtype)

    def message(self, host: torch.Tensor, ranks: int = 1) -> buffers.Message:
        return buffers.typed(host, self.datatype, ranks)

    def stored(self, tensor: torch.Tensor, host: torch.Tensor, ranks: int) -> Callable[[], object] | None:
        """A function that stores the result that arrives in `host` in the tensor; None if nothing has to be done."""
        if not self.average:
            return buffers.stored(tensor, host)
        rounding = None if host.is_floating_point() or host.is_complex() else "trunc"
        return lambda: tensor.detach().copy_(host.detach().div_(ranks, rounding_mode=rounding))


@functools.cache
def plain(number: int, dtype: torch.dtype) -> Reduction:
    kind = ReduceOp.RedOpType(number)
    wire = WIDER.get(dtype, dtype)
    if wire not in WIRE:
        raise ValueError(f"mpi can move {dtype} but not reduce it: neither MPI nor torch has arithmetic for it")
    if (op := operations(wire).get(kind)) is None:
        raise ValueError(f"ReduceOp.{kind.name} is not defined for {dtype}")
    return Reduction(op, WIRE[wire], wire, kind == ReduceOp.AVG)


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction for the ReduceOp `op`; typed Any because torch's stub lacks what is used here."""
    number = int(op.op)  # hashes and compares ten times as fast as the enum member
    found = plain(number, dtype)
    return replace(found, factor=op.__getstate__()[1]) if number == SCALED else found
