"""torch's collectives where its gloo goes wrong without a word: strided tensors, and sums of bools.

Gloo sends and fills a tensor's memory from its first element on, whatever its strides, and whatever its sign, which
some views keep as a flag: torch 2.13 hands it such tensors for all_reduce, broadcast, reduce, scatter and
reduce_scatter, and the results are wrong without a word. NCCL refuses them. So such a tensor has a contiguous stand-in
here, which is copied back when the operation is done. A contiguous one goes to torch as it is.

Signatures, shapes and errors are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

# New names for two functions, from torch 2.13 on, which warns of the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CopyBack:
    """torch's Work, whose results are copied to where they are wanted when it is waited for."""

    def __init__(self, work: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._pairs = pairs

    def wait(self, *timeout: Any) -> bool:
        """Wait until the results are in the caller's tensors; True, or what torch raises."""
        done = bool(self._work.wait(*timeout))
        self.copy()
        return done

    def get_future(self) -> Any:
        """torch's future, done when the results are in the caller's tensors."""
        return self._work.get_future().then(self._copied)

    def _copied(self, future: Any) -> Any:
        value = future.value()
        self.copy()
        return value

    def copy(self) -> None:
        """Put the results where they are wanted, once."""
        for tensor, stand_in in self._pairs:
            tensor.copy_(stand_in)
        self._pairs = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Stage:
    """One operation's stand-ins."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: Any) -> Any:
        """What stands for a tensor that is only read."""
        return _gathered(tensor) if _is_scattered(tensor) else tensor

    def write(self, tensor: Any) -> Any:
        """What stands for a tensor that is filled."""
        if not _is_scattered(tensor):
            return tensor
        stand_in = _gathered(tensor)
        self._pairs.append((tensor, stand_in))
        return stand_in

    def reads(self, tensors: Any) -> Any:
        return [self.read(tensor) for tensor in tensors] if isinstance(tensors, Sequence) else tensors

    def writes(self, tensors: Any) -> Any:
        return [self.write(tensor) for tensor in tensors] if isinstance(tensors, Sequence) else tensors

    def end(self, work: Any) -> Any:
        """What the operation returns to its caller: nothing, or the work that is under way."""
        if not self._pairs:
            return work
        ending = CopyBack(work, self._pairs)
        if work is not None:
            return ending
        ending.copy()
        return None


def _is_scattered(tensor: Any) -> bool:
    """Whether its memory is not its values, one after the other; some views keep a sign as a flag beside it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    return not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def _row(tensor: Any) -> Any:
    """One element, where there is no dimension: torch's gloo refuses a 0-d tensor here, or crashes over it."""
    return tensor.reshape(1) if isinstance(tensor, torch.Tensor) and tensor.dim() == 0 else tensor


def _real(tensor: Any) -> Any:
    """A complex tensor as pairs of its parts: torch sees to that itself in all operations but gather."""
    return torch.view_as_real(tensor) if isinstance(tensor, torch.Tensor) and tensor.is_complex() else tensor


def _root(tensors: Any, rank: int | None, group_rank: int | None) -> int | None:
    """The rank that has the list. Before torch 1.0 it did not have to be named on that rank itself."""
    return dist.get_rank() if tensors and rank is None and group_rank is None else rank


def _sum(op: Any, tensor: Any) -> Any:
    """The operation that sums, of bools "any": gloo would add their bytes, and leave one that is 2, or 256 and so 0."""
    return _MAX if op == _SUM and getattr(tensor, "dtype", None) is torch.bool else op


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Fill `tensor` on all ranks with that of rank `src`."""
    stage = Stage()
    return stage.end(dist.broadcast(stage.write(tensor), src, group, async_op, group_src))


def all_reduce(tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce `tensor` over all ranks, in place on each."""
    stage = Stage()
    return stage.end(dist.all_reduce(stage.write(tensor), _sum(op, tensor), group, async_op))


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Reduce `tensor` over all ranks, in place on rank `dst`; what it holds on the others is not said."""
    stage = Stage()
    return stage.end(dist.reduce(stage.write(tensor), dst, _sum(op, tensor), group, async_op, group_dst))


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Fill `tensor` on rank i with the i-th of rank `src`'s list; without `src`: this rank if it has a list, else 0."""
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
    """Fill the i-th of rank `dst`'s list with rank i's `tensor`; without `dst`: this rank if it has a list, else 0."""
    stage, dst = Stage(), _root(gather_list, dst, group_dst)
    parts = stage.writes(gather_list)
    parts = [_real(part) for part in parts] if isinstance(parts, list) else parts
    return stage.end(dist.gather(_real(stage.read(tensor)), parts, dst, group, async_op, group_dst))


def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill the i-th of each rank's list with rank i's `tensor`."""
    stage = Stage()
    return stage.end(dist.all_gather(stage.writes(tensor_list), stage.read(tensor), group, async_op))


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Fill `output_tensor` with the ranks' inputs, one after the other along the first dimension, or stacked."""
    stage = Stage()
    return stage.end(
        _all_gather_single(_row(stage.write(output_tensor)), _row(stage.read(input_tensor)), group, async_op)
    )


def reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Fill `output` on rank i with the i-th tensors of all lists, reduced."""
    stage = Stage()
    op = _sum(op, output)
    return stage.end(dist.reduce_scatter(stage.write(output), stage.reads(input_list), op, group, async_op))


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Fill `output` on rank i with the i-th part along the first dimension of all inputs, reduced."""
    stage = Stage()
    part, whole = _row(stage.write(output)), _row(stage.read(input))
    return stage.end(_reduce_scatter_single(part, whole, _sum(op, output), group, async_op))


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Send the i-th tensor of the inputs to rank i; fill the i-th of the outputs with what rank i sent."""
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
    """all_to_all of the parts of one tensor along its first dimension: equal parts, or of so many rows."""
    stage = Stage()
    return stage.end(
        dist.all_to_all_single(
            stage.write(output), stage.read(input), output_split_sizes, input_split_sizes, group, async_op
        )
    )


all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor
