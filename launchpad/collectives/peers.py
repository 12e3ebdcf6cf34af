"""From one rank to another, where torch alone doesn't: strided tensors, from any rank, requests that can be asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device, _tensor_to_object

from ..errors import FrontendError
from .layout import Stage


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """torch.distributed.send: send `tensor` to rank `dst`; back when it may be changed again.

    Raises ValueError for a rank that is not there.
    """
    _check("send", dst, group_dst, group)
    dist.send(Stage().read(tensor), dst=dst, group=group, tag=tag, group_dst=group_dst)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """torch.distributed.recv: fill `tensor` and return the sender's global rank; -1 outside `group`.

    Without `src` and `group_src` it takes from any rank, which NCCL can't: FrontendError. Raises
    ValueError for a rank that is not there.
    """
    if src is None and group_src is None:
        _refuse_nccl(tensor.device, group)
    _check("recv", src, group_src, group)
    stage = Stage()
    sender = dist.recv(stage.write(tensor), src=src, group=group, tag=tag, group_src=group_src)
    stage.end(None)
    return int(sender)


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    """torch.distributed.isend: start to send `tensor`, which must not be changed before the request has completed."""
    return _request(dist.isend(tensor, dst, group, tag, group_dst), tensor, group)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """torch.distributed.irecv: start to fill `tensor`, which must not be touched before the request has completed."""
    return _request(dist.irecv(tensor, src, group, tag, group_src), tensor, group)


class P2POp(dist.P2POp):
    """torch's, which takes our `isend` and `irecv` too."""

    def __new__(
        cls,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> Any:
        return super().__new__(cls, _TORCHS.get(op, op), tensor, peer, group, tag, group_peer)

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        super().__init__(_TORCHS.get(op, op), tensor, peer, group, tag, group_peer)


_TORCHS: dict[Callable[..., Any], Callable[..., Any]] = {isend: dist.isend, irecv: dist.irecv}


class Request:
    """A send or a receive under way over gloo, whose own Work says that it is not completed until it is waited for.

    So who asks has a thread wait. gloo also would wait for ever for the same message a second time.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        self._waiter: threading.Thread | None = None
        self._ended = False
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether it has ended; how, `wait` tells."""
        if not self._ended and self._waiter is None:
            self._waiter = threading.Thread(target=self._run, name="gloo request", daemon=True)
            self._waiter.start()
        return self._ended

    def wait(self, *timeout: timedelta) -> bool:
        """Wait until it has ended: True. Raises what torch raises, RuntimeError where `timeout` has passed."""
        if self._waiter is not None:
            self._waiter.join(*(limit.total_seconds() for limit in timeout))
        elif not self._ended:
            self._run(*timeout)
        if not self._ended:
            raise RuntimeError(f"the request has not completed in {timeout[0].total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended and self._error is None

    def exception(self) -> Exception | None:
        """How it has failed, if it has."""
        return self._error

    def _run(self, *timeout: timedelta) -> None:
        try:
            self._work.wait(*timeout)
        except Exception as error:
            self._error = error
        self._ended = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _request(work: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """What stands for torch's Work: itself, but for gloo's, and for none outside the group."""
    if work is None or tensor.device.type != "cpu" or "gloo" not in str(dist.get_backend_config(group)):
        return work
    return Request(work)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """torch.distributed.recv_object_list, which promises to take from any rank without `src`, and does so here."""
    if src is not None or group_src is not None:
        return int(dist.recv_object_list(object_list, src, group, device, group_src, use_batch))
    where = device or torch.device(_get_object_coll_device(group))
    sizes = torch.empty(len(object_list), dtype=torch.long, device=where)
    sender = recv(sizes, group=group)
    if sender < 0:
        return sender
    joined = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=where)
    dist.recv(joined, src=sender, group=group)
    start = 0
    for index, size in enumerate(sizes.tolist()):
        data = joined[start : start + size]
        object_list[index] = _tensor_to_object(data, size, group)  # type: ignore[no-untyped-call]
        start += size
    return sender


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """torch.distributed.monitored_barrier, with gloo and mpi: a barrier where rank 0 names the rank that doesn't come.

    Raises RuntimeError on rank 0 after `timeout`; with `wait_all_ranks` it names all that are missing.
    """
    where: Any = dist.group.WORLD if group is None else group
    if where is not None and dist.get_rank(where) >= 0 and dist.get_backend(where) == "mpi":
        where.monitored_barrier(timeout, wait_all_ranks)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def _check(name: str, peer: int | None, group_peer: int | None, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError for a rank that is not there: gloo would wait for it until the time is up."""
    for rank, size, where in (
        (peer, dist.get_world_size(), "the world"),
        (group_peer, dist.get_world_size(group), "the group"),
    ):
        if rank is not None and not 0 <= rank < max(size, 1):
            raise ValueError(f"{name}: there is no rank {rank} in {where}, whose ranks are 0 to {size - 1}")


def _refuse_nccl(device: torch.device, group: dist.ProcessGroup | None) -> None:
    if device.type == "cuda" and dist.get_rank(group) >= 0 and "nccl" in str(dist.get_backend(group)):
        raise FrontendError(
            "nccl: it can't receive from just any rank; name the sender, recv(tensor, src=RANK), or receive a CPU "
            "tensor through a gloo group, new_group(backend='gloo')"
        )
