"""Functions that programs written for torch 0.1 to 1.x still call, and that torch has dropped or is dropping.

The rest of that API lives elsewhere: `gather(tensor, dst=, gather_list=)` and `scatter(tensor, src=, scatter_list=)` in
`layout`, requests that report completion in `peers`, rendezvous without a rank in `start`.

In torch, the `*_multigpu` functions took a list of tensors on each rank, one per GPU, and required NCCL. Here the
tensors may be on any devices, or all on the same one, over any frontend: they are reduced within the rank first, then
across ranks. All ranks pass lists of the same length, of tensors of the same shape and dtype. As in torch, with
`async_op` the result is available after `wait()` on the returned work, and ranks outside the group do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launchpad.collectives import layout
from launchpad.collectives.layout import CopyBack

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_SUM = dist.ReduceOp.SUM


class _ReduceOps:
    """`reduce_op`, the name of `ReduceOp` before torch 1.0: SUM, PRODUCT, MAX, MIN and later additions."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(dist.ReduceOp, name):
            raise AttributeError(f"there is no reduction {name!r}: ReduceOp has SUM, PRODUCT, MAX, MIN and others")
        _warn(f"reduce_op.{name} is the name from before torch 1.0: use ReduceOp.{name}")
        return getattr(dist.ReduceOp, name)


reduce_op = _ReduceOps()


class dist_backend:
    """The backends' names, as `init_process_group` takes and `get_backend` returns them; numbers before torch 1.0."""

    UNDEFINED = "undefined"
    TCP = "tcp"
    MPI = "mpi"
    GLOO = "gloo"
    NCCL = "nccl"


def replace_tcp() -> str:
    """The backend that replaced "tcp", torch's first one; warns about it."""
    _warn('backend="tcp" was removed in torch 1.0; using gloo, which does the same operations over TCP')
    return dist_backend.GLOO


def init_master_worker(*_args: Any, **_options: Any) -> NoReturn:
    """Raise NotImplementedError, naming what replaced the master-worker mode of torch 0.1 to 0.4."""
    raise NotImplementedError(
        "init_master_worker: torch 1.0 removed the mode in which a master operated on its workers' tensors. "
        "Use torch.distributed.rpc to call functions on other ranks and hold remote references to their tensors, "
        "or init_process_group for ranks that are peers, with collectives"
    )


def _clear_group_cache(group: Any = None) -> None:  # noqa: ARG001 - torch's signature
    """A no-op. It freed a group's NCCL communicators, as `destroy_process_group(group)` does today."""
    _warn("_clear_group_cache is a no-op: groups have no cache; destroy_process_group(group) frees a group")


def _register_stream(stream: Any) -> None:  # noqa: ARG001 - torch's signature
    """A no-op: operations on GPU tensors use the current stream today. RuntimeError if there is no group yet."""
    if not dist.is_initialized():
        raise RuntimeError("_register_stream: there is no process group yet: call init_process_group() first")
    _warn("_register_stream is a no-op: operations run in order on the current stream (torch.cuda.stream)")


def broadcast_multigpu(
    tensor_list: Sequence[torch.Tensor], src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> Any:
    """Copy rank `src`'s `tensor_list[src_tensor]` into all tensors of all ranks."""
    if dist.get_rank(group) < 0:
        return None
    _check_alike("broadcast_multigpu", tensor_list)
    first = tensor_list[src_tensor]
    work = layout.broadcast(first, src, group, async_op)
    return _end(work, [(tensor, first) for tensor in tensor_list if tensor is not first], async_op)


def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce all tensors of all ranks, in place: each of them holds the result."""
    if dist.get_rank(group) < 0:
        return None
    _check_alike("all_reduce_multigpu", tensor_list)
    result = _reduced("all_reduce_multigpu", tensor_list, op)
    work = layout.all_reduce(result, op, group, async_op)
    return _end(work, [(tensor, result) for tensor in tensor_list], async_op)


def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor],
    dst: int,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Any:
    """Reduce all tensors of all ranks into rank `dst`'s `tensor_list[dst_tensor]`; all others are unchanged."""
    if dist.get_rank(group) < 0:
        return None
    _check_alike("reduce_multigpu", tensor_list)
    result = _reduced("reduce_multigpu", tensor_list, op)
    work = layout.reduce(result, dst, op, group, async_op)
    pairs = [(tensor_list[dst_tensor], result)] if dist.get_rank() == dst else []
    return _end(work, pairs, async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Copy each rank's input_tensor_list[j] to output_tensor_lists[i][rank * len(input_tensor_list) + j] everywhere.

    There is one output list per input, and each receives all ranks' inputs. (The documentation of torch 1.x says
    `rank * world_size + j`, which is only right if there are as many inputs as ranks.)
    """
    if dist.get_rank(group) < 0:
        return None
    count, size = len(input_tensor_list), dist.get_world_size(group)
    _check_alike("all_gather_multigpu", input_tensor_list)
    _check_lists("all_gather_multigpu", output_tensor_lists, count, size, input_tensor_list[0])
    own = _stacked(input_tensor_list)
    stacks = [torch.empty_like(own) for _ in range(size)]
    work = layout.all_gather(stacks, own, group, async_op)
    parts = [part for stack in stacks for part in stack]
    pairs = [pair for outputs in output_tensor_lists for pair in zip(outputs, parts, strict=True)]
    return _end(work, pairs, async_op)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_lists: Sequence[Sequence[torch.Tensor]],
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce input_tensor_lists[i][rank * len(output_tensor_list) + j] into that rank's output_tensor_list[j].

    The reduction is over every i on every rank. There is one input list per output; each has one tensor for each output
    of every rank.
    """
    if dist.get_rank(group) < 0:
        return None
    count, size = len(output_tensor_list), dist.get_world_size(group)
    _check_alike("reduce_scatter_multigpu", output_tensor_list)
    _check_lists("reduce_scatter_multigpu", input_tensor_lists, count, size, output_tensor_list[0])
    mine = [_reduced("reduce_scatter_multigpu", several, op) for several in zip(*input_tensor_lists, strict=True)]
    stacks = [_stacked(mine[start : start + count]) for start in range(0, len(mine), count)]
    result = torch.empty_like(stacks[0])
    work = layout.reduce_scatter(result, stacks, op, group, async_op)
    return _end(work, list(zip(output_tensor_list, result, strict=True)), async_op)


_BY_OP: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _reduced(name: str, tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """A rank's own tensors reduced to a new one, on the first one's device."""
    combine = next((function for known, function in _BY_OP.items() if known == op), None)
    if combine is None:
        raise ValueError(f"{name}: op must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, not {op}")
    if op == dist.ReduceOp.AVG and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise ValueError(f"{name}: AVG of {tensors[0].dtype} would round on each rank: use SUM and divide")
    result = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        result = combine(result, tensor.detach().to(result.device))
    return result / len(tensors) if op == dist.ReduceOp.AVG else result


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.detach().to(tensors[0].device) for tensor in tensors])


def _check_alike(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless these are tensors of the same shape and dtype."""
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        found = " and ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "an empty list"
        raise ValueError(f"{name}: the tensors in a list must have the same shape and dtype, not {found}")


def _check_lists(name: str, lists: Sequence[Sequence[torch.Tensor]], count: int, size: int, like: torch.Tensor) -> None:
    """Raise ValueError unless there are `count` lists, each with a tensor for every tensor of every rank."""
    if len(lists) != count or any(len(tensors) != count * size for tensors in lists):
        raise ValueError(
            f"{name}: {count} tensors on each of {size} ranks need {count} lists of {count * size} tensors, "
            f"not {len(lists)} of {', '.join(str(len(tensors)) for tensors in lists) or 'none'}"
        )
    for tensors in lists:
        _check_alike(name, [like, *tensors])


def _end(work: Any, pairs: Pairs, async_op: bool) -> Any:
    """Copy the results into the caller's tensors: now, or when the returned work is waited on."""
    copying = CopyBack(work, [(tensor.detach(), result) for tensor, result in pairs])
    if async_op:
        return copying
    copying.copy()
    return None


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=3)
