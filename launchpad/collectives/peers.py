"""Point-to-point operations beyond torch's: strided tensors, receives from any rank, requests that can be polled."""

from __future__ import annotations

import io
import math
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launchpad.collectives.layout import Stage
from launchpad.errors import FrontendError


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """torch.distributed.send: send `tensor` to rank `dst`; returns when the tensor may be modified again.

    Raises ValueError for a rank that doesn't exist.
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

    Without `src` and `group_src` it receives from any rank; NCCL can't do that: FrontendError. Raises ValueError for a
    rank that doesn't exist.
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
    """torch.distributed.isend: start to send `tensor`, which must not be modified until the request completes.

    Raises ValueError for a rank that doesn't exist.
    """
    _check("isend", dst, group_dst, group)
    return _request(dist.isend(Stage().read(tensor), dst, group, tag, group_dst), tensor, group)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """torch.distributed.irecv: start to fill `tensor`, which must not be touched until the request completes.

    Raises ValueError for a rank that doesn't exist.
    """
    _check("irecv", src, group_src, group)
    stage = Stage()
    return _request(stage.end(dist.irecv(stage.write(tensor), src, group, tag, group_src)), tensor, group)


class P2POp(dist.P2POp):
    """torch's P2POp, which accepts our `isend` and `irecv` too. Raises ValueError for a rank that doesn't exist."""

    def __new__(
        cls,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> Any:
        return super().__new__(cls, _TORCH_OPS.get(op, op), tensor, peer, group, tag, group_peer)

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        _check("P2POp", peer, group_peer, group)
        super().__init__(_TORCH_OPS.get(op, op), tensor, peer, group, tag, group_peer)


_TORCH_OPS: dict[Callable[..., Any], Callable[..., Any]] = {isend: dist.isend, irecv: dist.irecv}


class Request:
    """A gloo send or receive in flight. gloo's own Work doesn't report completion until it is waited on.

    So polling it starts a thread that waits. A second wait on gloo's Work would hang, so there is only ever one,
    whichever threads call this.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._begun = False  # somebody waits on gloo's Work, or has
        self._done = threading.Event()
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether it is done; `wait` raises the error, if any."""
        if self._begin():
            threading.Thread(target=self._run, name="gloo request", daemon=True).start()
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done and return True. Raises what torch raises, or RuntimeError after `timeout`."""
        if self._begin():
            self._run(*([] if timeout is None else [timeout]))
        elif not self._done.wait(None if timeout is None else timeout.total_seconds()):
            seconds = math.inf if timeout is None else timeout.total_seconds()
            raise RuntimeError(f"the request did not complete within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_success(self) -> bool:
        """Whether it has succeeded."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Its error, if it has failed."""
        return self._error

    def _begin(self) -> bool:
        """Whether the caller is the one to wait on gloo's Work."""
        with self._lock:
            first, self._begun = not self._begun, True
            return first

    def _run(self, *timeout: timedelta) -> None:
        try:
            self._work.wait(*timeout)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _request(work: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """torch's Work, or a Request in place of gloo's; None outside the group."""
    if work is None or tensor.device.type != "cpu" or "gloo" not in str(dist.get_backend_config(group)):
        return work
    return Request(work)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    **options: Any,
) -> None:
    """torch.distributed.send_object_list. Raises ValueError for a rank that doesn't exist.

    `options`: those of a newer torch, such as `weights_only`.
    """
    _check("send_object_list", dst, group_dst, group)
    options |= {"use_batch": True} if use_batch else {}  # which older ones don't know
    dist.send_object_list(object_list, dst, group, device, group_dst, **options)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    **options: Any,
) -> int:
    """torch.distributed.recv_object_list, but without `src` it really receives from any rank, as torch documents.

    `options`: those of a newer torch, such as `weights_only`. Raises ValueError for a rank that doesn't exist.
    """
    _check("recv_object_list", src, group_src, group)
    if src is not None or group_src is not None:
        options |= {"use_batch": True} if use_batch else {}
        return int(dist.recv_object_list(object_list, src, group, device, group_src, **options))
    weights_only = bool(options.pop("weights_only", False))
    if options:
        raise TypeError(f"recv_object_list: unexpected options from any rank: {', '.join(options)}")
    device = device or torch.device("cpu")  # NCCL, which needs another, can't receive from any rank
    sizes = torch.empty(len(object_list), dtype=torch.long, device=device)
    sender = recv(sizes, group=group)
    if sender < 0:
        return sender
    joined = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=device)
    dist.recv(joined, src=sender, group=group)
    start = 0
    for index, size in enumerate(sizes.tolist()):
        data = joined[start : start + size].cpu().numpy().tobytes()
        object_list[index] = torch.load(io.BytesIO(data), weights_only=True) if weights_only else pickle.loads(data)
        start += size
    return sender


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """torch.distributed.monitored_barrier for gloo and mpi: a barrier in which rank 0 names the rank that is missing.

    Raises RuntimeError on rank 0 after `timeout`; with `wait_all_ranks` it names all missing ranks.
    """
    actual: Any = dist.group.WORLD if group is None else group
    if actual is not None and dist.get_rank(actual) >= 0 and dist.get_backend(actual) == "mpi":
        actual.monitored_barrier(timeout, wait_all_ranks)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def _check(name: str, peer: int | None, group_peer: int | None, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError for a rank that doesn't exist: gloo would wait for it until the timeout, or crash."""
    if dist.get_rank(group) < 0:  # outside the group nothing happens
        return
    for rank, size, scope in (
        (peer, dist.get_world_size(), "the world"),
        (group_peer, dist.get_world_size(group), "the group"),
    ):
        if rank is not None and not 0 <= rank < max(size, 1):
            raise ValueError(f"{name}: there is no rank {rank} in {scope}, whose ranks are 0 to {size - 1}")


def _refuse_nccl(device: torch.device, group: dist.ProcessGroup | None) -> None:
    if device.type == "cuda" and dist.get_rank(group) >= 0 and "nccl" in str(dist.get_backend(group)):
        raise FrontendError(
            "nccl: can't receive from any rank; name the sender, recv(tensor, src=RANK), or receive a CPU tensor "
            "over a gloo group, new_group(backend='gloo')"
        )
