"""What tutorials and programs written for torch 0.1 to 1.x still call, and torch has dropped or is dropping.

The rest of it is in its place: `gather(tensor, dst=, gather_list=)` and `scatter(tensor, src=, scatter_list=)` in
`layout`, requests that tell whether they are completed in `peers`, meeting without a rank in `start`.

The `*_multigpu` functions took a list of tensors on each rank, one for each of its GPUs, and were NCCL's. Here the
tensors may be on any devices, or all on one, over any frontend: they are reduced within the rank first, then
across ranks. All ranks give lists of one length, of tensors of one shape and dtype. As in torch: with `async_op` the
result is there after `wait()` of what is returned; ranks outside the group do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import layout
from .layout import CopyBack

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_SUM = dist.ReduceOp.SUM


class _ReduceOps:
    """`reduce_op`, torch's name of `ReduceOp` before 1.0: SUM, PRODUCT, MAX, MIN, and those that came later."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(dist.ReduceOp, name):
            raise AttributeError(f"there is no reduction {name!r}: ReduceOp has SUM, PRODUCT, MAX, MIN and others")
        _note(f"reduce_op.{name} is the name of before torch 1.0; it is ReduceOp.{name}")
        return getattr(dist.ReduceOp, name)


reduce_op = _ReduceOps()


class dist_backend:
    """The frontends' names, as `init_process_group` takes them and `get_backend` returns them; before 1.0 numbers."""

    UNDEFINED = "undefined"
    TCP = "tcp"
    MPI = "mpi"
    GLOO = "gloo"
    NCCL = "nccl"


def instead_of_tcp() -> str:
    """The frontend that took the place of "tcp", the first that torch had; says so."""
    _note('backend="tcp" went with torch 1.0; gloo is taken, which carries the same operations over TCP')
    return dist_backend.GLOO


def init_master_worker(*_args: Any, **_options: Any) -> NoReturn:
    """Always NotImplementedError: what has taken the place of the master-worker mode of torch 0.1 to 0.4."""
    raise NotImplementedError(
        "init_master_worker: torch 1.0 dropped the mode in which one master worked with tensors on its workers. "
        "torch.distributed.rpc calls functions on other ranks and holds their tensors by remote references; "
        "init_process_group starts the ranks as equals, with collectives"
    )


def _clear_group_cache(group: Any = None) -> None:  # noqa: ARG001 - torch's signature
    """Nothing: it freed NCCL's communicators of a group, which `destroy_process_group(group)` does today."""
    _note("_clear_group_cache does nothing: groups cache nothing; destroy_process_group(group) frees one")


def _register_stream(stream: Any) -> None:  # noqa: ARG001 - torch's signature
    """Nothing: operations on a GPU's tensors take the current stream today. RuntimeError before a group is started."""
    if not dist.is_initialized():
        raise RuntimeError("_register_stream: no group has been started; init_process_group() comes first")
    _note("_register_stream does nothing: an operation runs in order with the current stream, torch.cuda.stream")


def broadcast_multigpu(
    tensor_list: Sequence[torch.Tensor], src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> Any:
    """Fill all tensors of all ranks with `tensor_list[src_tensor]` of rank `src`."""
    if dist.get_rank(group) < 0:
        return None
    _alike("broadcast_multigpu", tensor_list)
    first = tensor_list[src_tensor]
    work = layout.broadcast(first, src, group, async_op)
    return _end(work, [(tensor, first) for tensor in tensor_list if tensor is not first], async_op)


def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce all tensors of all ranks, in place on each: to one value in all of them."""
    if dist.get_rank(group) < 0:
        return None
    _alike("all_reduce_multigpu", tensor_list)
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
    """Reduce all tensors of all ranks into `tensor_list[dst_tensor]` of rank `dst`; all others stay as they are."""
    if dist.get_rank(group) < 0:
        return None
    _alike("reduce_multigpu", tensor_list)
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
    """Fill each rank's output_tensor_lists[i][rank * len(input_tensor_list) + j] with that rank's input_tensor_list[j].

    There is an output list for each input, of all ranks' inputs. (The documentation of torch 1.x has
    `rank * world_size + j`, which holds where there are as many inputs as ranks.)
    """
    if dist.get_rank(group) < 0:
        return None
    count, size = len(input_tensor_list), dist.get_world_size(group)
    _alike("all_gather_multigpu", input_tensor_list)
    _lists("all_gather_multigpu", output_tensor_lists, count, size, input_tensor_list[0])
    own = _stacked(input_tensor_list)
    everybodys = [torch.empty_like(own) for _ in range(size)]
    work = layout.all_gather(everybodys, own, group, async_op)
    parts = [part for stack in everybodys for part in stack]
    pairs = [pair for outputs in output_tensor_lists for pair in zip(outputs, parts, strict=True)]
    return _end(work, pairs, async_op)


def reduce_scatter_multigpu(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_lists: Sequence[Sequence[torch.Tensor]],
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Fill a rank's output_tensor_list[j] with all input_tensor_lists[i][rank * len(output_tensor_list) + j], reduced.

    All: of each i, on each rank. There is an input list for each output, with a tensor for each output of all ranks.
    """
    if dist.get_rank(group) < 0:
        return None
    count, size = len(output_tensor_list), dist.get_world_size(group)
    _alike("reduce_scatter_multigpu", output_tensor_list)
    _lists("reduce_scatter_multigpu", input_tensor_lists, count, size, output_tensor_list[0])
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
    """A rank's own tensors reduced to one, in memory of its own, where the first of them is."""
    combine = next((function for known, function in _BY_OP.items() if known == op), None)
    if combine is None:
        raise ValueError(f"{name}: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR, not {op}")
    if op == dist.ReduceOp.AVG and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise ValueError(f"{name}: an average of {tensors[0].dtype} would be rounded on each rank: take SUM, divide")
    result = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        result = combine(result, tensor.detach().to(result.device))
    return result / len(tensors) if op == dist.ReduceOp.AVG else result


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.detach().to(tensors[0].device) for tensor in tensors])


def _alike(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless these are tensors of one shape and dtype."""
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        found = " and ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "an empty list"
        raise ValueError(f"{name}: a list of tensors of one shape and dtype is needed, not {found}")


def _lists(name: str, lists: Sequence[Sequence[torch.Tensor]], count: int, size: int, like: torch.Tensor) -> None:
    """Raise ValueError unless there are so many lists, of a tensor for each of all ranks' tensors."""
    if len(lists) != count or any(len(tensors) != count * size for tensors in lists):
        raise ValueError(
            f"{name}: with {count} tensors on each of {size} ranks there are to be {count} lists of {count * size} "
            f"tensors, not {len(lists)} of {', '.join(str(len(tensors)) for tensors in lists) or 'none'}"
        )
    for tensors in lists:
        _alike(name, [like, *tensors])


def _end(work: Any, pairs: Pairs, async_op: bool) -> Any:
    """Copy the results to where they are wanted: now, or when the work that is returned is waited for."""
    ending = CopyBack(work, [(tensor.detach(), result) for tensor, result in pairs])
    if async_op:
        return ending
    ending.copy()
    return None


def _note(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=3)
