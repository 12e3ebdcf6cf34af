"""torch's collectives, corrected where gloo silently gives wrong results: strided tensors and sums of bools.

Gloo reads and writes a tensor's memory from its first element on. It ignores strides, and the flag by which a view is
negated or conjugated lazily. torch 2.13 passes it such tensors for all_reduce, broadcast, reduce, scatter and
reduce_scatter, and the results are silently wrong. NCCL refuses them. Here, such a tensor gets a contiguous stand-in,
which is copied back when the operation is done. Contiguous tensors go to torch as they are.

Signatures, shapes and errors are torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

# torch 2.13 renamed two functions and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather_single = getattr(dist, "gather_single", None)  # new in torch 2.14, whose gloo lacks it


class CopyBack:
    """torch's Work, which copies its results into the caller's tensors when it is waited on."""

    def __init__(self, work: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._pairs = pairs
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        """Whether it is done. If so, the results are in the caller's tensors."""
        done = bool(self._work.is_completed())
        if done:
            self.copy()
        return done

    def synchronize(self) -> None:
        """Wait like torch's Work; then the results are in the caller's tensors."""
        self._work.synchronize()
        self.copy()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are in the caller's tensors. Returns True, or raises what torch raises."""
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        self.copy()
        return done

    def get_future(self) -> Any:
        """torch's future, which completes once the results are in the caller's tensors."""
        return self._work.get_future().then(self._copied)

    def _copied(self, future: Any) -> Any:
        value = future.value()
        self.copy()
        return value

    def copy(self) -> None:
        """Copy the results into the caller's tensors, once."""
        with self._lock:
            for tensor, stand_in in self._pairs:
                tensor.copy_(stand_in)
            self._pairs = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Stage:
    """The contiguous stand-ins of one operation."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: Any) -> Any:
        """The tensor to pass for one that is only read."""
        return _contiguous(tensor) if _needs_copy(tensor) else tensor

    def write(self, tensor: Any) -> Any:
        """The tensor to pass for one that is written to."""
        if not _needs_copy(tensor):
            return tensor
        tensor = tensor.detach()  # the results are no part of any graph
        stand_in = _contiguous(tensor)
        self._pairs.append((tensor, stand_in))
        return stand_in

    def reads(self, tensors: Any) -> Any:
        return [self.read(tensor) for tensor in tensors] if isinstance(tensors, Sequence) else tensors

    def writes(self, tensors: Any) -> Any:
        return [self.write(tensor) for tensor in tensors] if isinstance(tensors, Sequence) else tensors

    def end(self, work: Any) -> Any:
        """What the operation returns to its caller: the work in flight, or None."""
        if not self._pairs:
            return work
        copying = CopyBack(work, self._pairs)
        if work is not None:
            return copying
        copying.copy()
        return None


def _needs_copy(tensor: Any) -> bool:
    """Whether the memory is not the values in order: the tensor is strided, or negated or conjugated lazily."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def _share_memory(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.layout is not torch.strided:
        return False
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _row(tensor: Any) -> Any:
    """A 0-d tensor as one with a single element: torch's gloo refuses 0-d tensors here, or crashes."""
    return tensor.reshape(1) if isinstance(tensor, torch.Tensor) and tensor.dim() == 0 else tensor


def _real(tensor: Any) -> Any:
    """A complex tensor as pairs of real numbers. torch does this itself in every operation but gather."""
    return torch.view_as_real(tensor) if isinstance(tensor, torch.Tensor) and tensor.is_complex() else tensor


def _root(tensors: Any, rank: int | None, group_rank: int | None) -> int | None:
    """The root. Before torch 1.0 the rank that passes the list didn't have to name itself."""
    return dist.get_rank() if tensors and rank is None and group_rank is None else rank


def _is_root(rank: int | None, group_rank: int | None, group: Any) -> bool:
    return dist.get_rank(group) == group_rank if group_rank is not None else dist.get_rank() == rank


def _sum(op: Any, tensor: Any) -> Any:
    """`op`, with SUM of bools as "any": gloo would add their bytes, which may give 2, or 256 and so 0."""
    return _MAX if op == _SUM and getattr(tensor, "dtype", None) is torch.bool else op


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Copy `tensor` from rank `src` to all ranks."""
    stage = Stage()
    passed = stage.read(tensor) if _is_root(src, group_src, group) else stage.write(tensor)
    return stage.end(dist.broadcast(passed, src, group, async_op, group_src))


def all_reduce(tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce `tensor` over all ranks, in place on all of them."""
    stage = Stage()
    return stage.end(dist.all_reduce(stage.write(tensor), _sum(op, tensor), group, async_op))


def all_reduce_coalesced(tensors: list[torch.Tensor], op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce each of `tensors` over all ranks, in place on all of them."""
    stage = Stage()
    op = _sum(op, tensors[0]) if isinstance(tensors, Sequence) and tensors else op
    return stage.end(dist.all_reduce_coalesced(stage.writes(tensors), op, group, async_op))


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Reduce `tensor` over all ranks, in place on rank `dst`; its contents on the others are undefined."""
    stage = Stage()
    passed = stage.write(tensor) if _is_root(dst, group_dst, group) else stage.read(tensor)
    return stage.end(dist.reduce(passed, dst, _sum(op, tensor), group, async_op, group_dst))


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Fill `tensor` on rank i with item i of rank `src`'s list. `src` defaults to the rank with a list, else rank 0."""
    stage, src = Stage(), _root(scatter_list, src, group_src)
    return stage.end(dist.scatter(stage.write(tensor), stage.reads(scatter_list), src, group, async_op, group_src))


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Fill item i of rank `dst`'s list with rank i's `tensor`. `dst` defaults to this rank if it has a list, else 0."""
    stage, dst = Stage(), _root(gather_list, dst, group_dst)
    parts = stage.writes(gather_list)
    parts = [_real(part) for part in parts] if isinstance(parts, list) else parts
    return stage.end(dist.gather(_real(stage.read(tensor)), parts, dst, group, async_op, group_dst))


def gather_single(
    tensor: torch.Tensor,
    gather_tensor: torch.Tensor | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Fill `gather_tensor` on rank `dst`, by default 0, with all ranks' tensors, one after the other or stacked."""
    stage, sent = Stage(), _row(_real(tensor))
    dst = 0 if dst is None and group_dst is None else dst
    whole = stage.write(_real(gather_tensor)) if _is_root(dst, group_dst, group) else None
    if _gather_single is not None and tensor.device.type != "cpu":
        return stage.end(_gather_single(stage.read(sent), whole, dst, group, async_op, group_dst))
    parts = None if whole is None else list(whole.view(dist.get_world_size(group), *sent.shape))
    return stage.end(dist.gather(stage.read(sent), parts, dst, group, async_op, group_dst))


def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill item i of each rank's list with rank i's `tensor`."""
    stage = Stage()
    return stage.end(dist.all_gather(stage.writes(tensor_list), stage.read(tensor), group, async_op))


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Fill `output_tensor` with all ranks' inputs, concatenated along the first dimension or stacked."""
    stage = Stage()
    return stage.end(
        _all_gather_single(_row(stage.write(output_tensor)), _row(stage.read(input_tensor)), group, async_op)
    )


def reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Fill `output` on rank i with the reduction of item i of all ranks' lists."""
    stage = Stage()
    op = _sum(op, output)
    return stage.end(dist.reduce_scatter(stage.write(output), stage.reads(input_list), op, group, async_op))


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Fill `output` on rank i with the reduction of part i, along the first dimension, of all ranks' inputs."""
    stage = Stage()
    part, whole = _row(stage.write(output)), _row(stage.read(input))
    return stage.end(_reduce_scatter_single(part, whole, _sum(op, output), group, async_op))


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Send input i to rank i; fill output i with what rank i sent."""
    stage = Stage()
    return stage.end(dist.all_to_all(stage.writes(output_tensor_list), stage.reads(input_tensor_list), group, async_op))


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """all_to_all of the parts of one tensor along its first dimension: equal parts, or parts of the given rows."""
    stage = Stage()
    if _share_memory(output, input):  # gloo would overwrite the input before it has sent all of it
        input = input.clone()
    filled, sent = _row(stage.write(output)), _row(stage.read(input))
    return stage.end(dist.all_to_all_single(filled, sent, output_split_sizes, input_split_sizes, group, async_op))


all_gather_single = all_gather_into_tensor
gather_into_tensor = gather_single
reduce_scatter_single = reduce_scatter_tensor
