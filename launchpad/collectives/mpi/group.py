"""Torch's operations as nonblocking MPI operations, which MPI matches across ranks by the order of their calls."""

# Torch's stubs declare convenience overloads that torch itself never calls.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import time
from datetime import timedelta

import torch
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import DistBackendError

from launchpad.collectives.mpi import buffers
from launchpad.collectives.mpi.base import TAGS, Base
from launchpad.collectives.mpi.buffers import check_pieces, check_whole, one, splits
from launchpad.collectives.mpi.reductions import reduction
from launchpad.collectives.mpi.work import Bundle, Receive, Work

ALL_TO_ALL = AllToAllOptions()
ALLGATHER = AllgatherOptions()
ALLREDUCE_COALESCED = AllreduceCoalescedOptions()
ALLREDUCE = AllreduceOptions()
BARRIER = BarrierOptions()
BROADCAST = BroadcastOptions()
GATHER = GatherOptions()
REDUCE = ReduceOptions()
REDUCE_SCATTER = ReduceScatterOptions()
SCATTER = ScatterOptions()

MONITOR = TAGS - 1
"""The tag of monitored_barrier's messages."""

MISSING = "monitored_barrier on rank {rank} of group {name}: rank {ranks} did not arrive within {seconds:g} s"


class MpiGroup(Base):
    """Torch's operations over MPI."""

    # One tensor on each rank.

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions = BROADCAST) -> Work:
        tensor, root = one("broadcast", tensors), opts.rootRank
        self._check_rank("broadcast", root)
        host = buffers.loaded(tensor) if self._rank == root else buffers.room(tensor)
        request = self._live().Ibcast(buffers.raw(host), root)
        arrived = None if self._rank == root else buffers.stored(tensor, host)
        return Work(self, "broadcast", opts, request, tensors, host, arrived)

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions = ALLREDUCE) -> Work:
        tensor = one("all_reduce", tensors)
        how = reduction(opts.reduceOp, tensor.dtype)
        host = how.load(tensor)
        request = self._live().Iallreduce(MPI.IN_PLACE, how.message(host), how.op)
        return Work(self, "all_reduce", opts, request, tensors, host, how.stored(tensor, host, self._size))

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions = REDUCE) -> Work:
        tensor, root = one("reduce", tensors), opts.rootRank
        self._check_rank("reduce", root)
        how = reduction(opts.reduceOp, tensor.dtype)
        host = how.load(tensor)
        if self._rank != root:
            return Work(
                self, "reduce", opts, self._live().Ireduce(how.message(host), None, how.op, root), tensors, host
            )
        request = self._live().Ireduce(MPI.IN_PLACE, how.message(host), how.op, root)
        return Work(self, "reduce", opts, request, tensors, host, how.stored(tensor, host, self._size))

    def barrier(self, opts: BarrierOptions = BARRIER) -> Work:
        return Work(self, "barrier", opts, self._live().Ibarrier(), [], None)

    # From all ranks to all ranks.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = ALLGATHER) -> Work:
        check_whole("all_gather_into_tensor", output, input, self._size)
        host = buffers.room(output)
        if host is not output or buffers.overlap(host, input):
            # FSDP's input is a slice of its output.
            host.detach().view(-1)[self._rank * input.numel() :][: input.numel()].copy_(input.detach().reshape(-1))
            source, sent = host, MPI.IN_PLACE
        else:
            source = buffers.loaded(input)
            sent = buffers.raw(source)
        request = self._live().Iallgather(sent, buffers.raw(host, self._size))
        return Work(
            self, "all_gather_into_tensor", opts, request, [output], (source, host), buffers.stored(output, host)
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions = ALLGATHER) -> Work:
        pieces, own = one("all_gather", outputs), one("all_gather", inputs)
        check_pieces("all_gather", pieces, own, self._rank, self._size)
        source, host = buffers.loaded(own), buffers.flat_room(pieces)
        request = self._live().Iallgatherv(buffers.raw(source), buffers.parts(host, map(Tensor.numel, pieces)))
        return Work(self, "all_gather", opts, request, outputs, (source, host), lambda: buffers.store_all(pieces, host))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: ReduceScatterOptions = REDUCE_SCATTER) -> Work:
        check_whole("reduce_scatter_tensor", input, output, self._size)
        how = reduction(opts.reduceOp, input.dtype)
        source, host = how.load(input), how.room(output)
        if buffers.overlap(source, host):
            host = torch.empty_like(host)
        request = self._live().Ireduce_scatter_block(how.message(source, self._size), how.message(host), how.op)
        return Work(
            self,
            "reduce_scatter_tensor",
            opts,
            request,
            [output],
            (source, host),
            how.stored(output, host, self._size),
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ReduceScatterOptions = REDUCE_SCATTER
    ) -> Work:
        own, pieces = one("reduce_scatter", outputs), one("reduce_scatter", inputs)
        check_pieces("reduce_scatter", pieces, own, self._rank, self._size)
        how = reduction(opts.reduceOp, own.dtype)
        source, host = how.load(buffers.flat(pieces)), how.room(own)
        counts = [piece.numel() for piece in pieces]
        request = self._live().Ireduce_scatter(how.message(source), how.message(host), counts, how.op)
        return Work(self, "reduce_scatter", opts, request, outputs, (source, host), how.stored(own, host, self._size))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, rows_out: list[int], rows_in: list[int], opts: AllToAllOptions = ALL_TO_ALL
    ) -> Work:
        sent = splits("all_to_all_single", input, rows_in, self._size)
        received = splits("all_to_all_single", output, rows_out, self._size)
        source, host = buffers.loaded(input), buffers.room(output)
        if buffers.overlap(source, host):
            source = source.clone()
        # Always with counts: MPI can't match a rank that passes counts with one that doesn't.
        request = self._live().Ialltoallv(buffers.parts(source, sent), buffers.parts(host, received))
        return Work(self, "all_to_all_single", opts, request, [output], (source, host), buffers.stored(output, host))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: AllToAllOptions = ALL_TO_ALL) -> Work:
        check_pieces("all_to_all", outputs, None, self._rank, self._size)
        check_pieces("all_to_all", inputs, None, self._rank, self._size)
        source, host = buffers.flat(inputs), buffers.flat_room(outputs)
        request = self._live().Ialltoallv(
            buffers.parts(source, map(Tensor.numel, inputs)), buffers.parts(host, map(Tensor.numel, outputs))
        )
        return Work(
            self, "all_to_all", opts, request, outputs, (source, host), lambda: buffers.store_all(outputs, host)
        )

    # Between one rank and all others.

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions = GATHER) -> Work:
        own, root = one("gather", inputs), opts.rootRank
        self._check_rank("gather", root)
        source = buffers.loaded(own)
        if self._rank != root:
            return Work(self, "gather", opts, self._live().Igatherv(buffers.raw(source), None, root), [], source)
        pieces = one("gather", outputs)
        check_pieces("gather", pieces, own, self._rank, self._size)
        host = buffers.flat_room(pieces)
        received = buffers.parts(host, map(Tensor.numel, pieces))
        request = self._live().Igatherv(buffers.raw(source), received, root)
        return Work(self, "gather", opts, request, outputs, (source, host), lambda: buffers.store_all(pieces, host))

    def gather_single(self, output: Tensor, input: Tensor, opts: GatherOptions = GATHER) -> Work:
        root = opts.rootRank
        self._check_rank("gather_single", root)
        source = buffers.loaded(input)
        if self._rank != root:
            return Work(self, "gather_single", opts, self._live().Igather(buffers.raw(source), None, root), [], source)
        check_whole("gather_single", output, input, self._size)
        host = buffers.room(output)
        request = self._live().Igather(buffers.raw(source), buffers.raw(host, self._size), root)
        return Work(self, "gather_single", opts, request, [output], (source, host), buffers.stored(output, host))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ScatterOptions = SCATTER) -> Work:
        own, root = one("scatter", outputs), opts.rootRank
        self._check_rank("scatter", root)
        source, sent, host = None, None, buffers.room(own)
        if self._rank == root:
            pieces = one("scatter", inputs)
            check_pieces("scatter", pieces, own, self._rank, self._size)
            source = buffers.flat(pieces)
            sent = buffers.parts(source, map(Tensor.numel, pieces))
        request = self._live().Iscatterv(sent, buffers.raw(host), root)
        return Work(self, "scatter", opts, request, outputs, (source, host), buffers.stored(own, host))

    # Several operations at once, for FSDP and functional collectives.

    def allreduce_coalesced(self, tensors: list[Tensor], opts: AllreduceCoalescedOptions = ALLREDUCE_COALESCED) -> Work:
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return Bundle(self, "all_reduce_coalesced", opts, works, tensors)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions = ALLGATHER
    ) -> Work:
        works = [self.allgather([pieces], [own], opts) for pieces, own in zip(outputs, inputs, strict=True)]
        return Bundle(self, "all_gather_coalesced", opts, works, outputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions = ALLGATHER
    ) -> Work:
        works = [self.all_gather_single(output, own, opts) for output, own in zip(outputs, inputs, strict=True)]
        return Bundle(self, "all_gather_into_tensor_coalesced", opts, works, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions = REDUCE_SCATTER
    ) -> Work:
        works = [self.reduce_scatter_single(own, whole, opts) for own, whole in zip(outputs, inputs, strict=True)]
        return Bundle(self, "reduce_scatter_tensor_coalesced", opts, works, outputs)

    # Point-to-point.

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        self._check_rank("send", rank)
        host = buffers.loaded(one("send", tensors))
        request = self._live().Isend(buffers.raw(host), rank, tag)
        return Work(self, f"send to rank {rank}", None, request, tensors, host)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        self._check_rank("recv", rank)
        return self._receive(f"recv from rank {rank}", one("recv", tensors), rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self._receive("recv from any rank", one("recv", tensors), MPI.ANY_SOURCE, tag)

    def _receive(self, what: str, tensor: Tensor, rank: int, tag: int) -> Work:
        host = buffers.room(tensor)
        return Receive(self, what, self._live().Irecv(buffers.raw(host), rank, tag), host, tensor)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names the missing ranks. torch's own monitored_barrier supports gloo only."""
        seconds = self.timeout if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        nothing = torch.empty(0)
        others = range(1, self._size) if self._rank == 0 else [0]
        missing = []
        if self._rank != 0:
            self.send([nothing], 0, MONITOR).wait(timedelta(seconds=seconds))
        for work, rank in [(self.recv([nothing], rank, MONITOR), rank) for rank in others]:
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except DistBackendError:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            ranks = ", ".join(map(str, missing))
            raise DistBackendError(MISSING.format(rank=self._rank, name=self.label, ranks=ranks, seconds=seconds))
        if self._rank == 0:
            for rank in others:
                self.send([nothing], rank, MONITOR).wait(timedelta(seconds=seconds))

    # These methods' names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
