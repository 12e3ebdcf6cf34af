"""Starts the default process group: finds the world, the frontend and the rendezvous, and lets torch do the rest."""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launchpad.collectives import bootstrap, frontends
from launchpad.collectives.early import dist_backend, replace_tcp
from launchpad.collectives.launchers import ALONE, CALLER, World, given, world_of
from launchpad.errors import FrontendError, WorldError

# The rendezvous address of the tutorials' processes.
_TUTORIAL = "tcp://127.0.0.1:29500"

# How many groups this process has started so far.
_started = 0


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
    **options: Any,
) -> None:
    """torch.distributed.init_process_group, which needs no arguments under any launcher.

    `backend`: "gloo", "nccl", "mpi", or anything else torch knows. None means what `launchpad run --backend` set, or
    else gloo, plus nccl for GPU tensors if each rank on the host has a GPU. With nccl, the rank's GPU becomes the
    current device.
    `init_method`: "env://" (the default), "tcp://HOST:PORT" or "file:///PATH". `rank` and `world_size` default to what
    the launcher set (`world_of`). Without a launcher, tcp:// and file:// need only `world_size`, and assign ranks in
    order of arrival; with tcp://, rank 0 is the process that can listen there. With env:// and no MASTER_ADDR, ranks on
    one host find each other through a free port that rank 0 picks. With "mpi", all of this comes from MPI, and any
    argument must agree with it.
    `timeout`: for the rendezvous and for each operation. None means torch's default, 10 min for nccl and 30 min for
    others.
    `store`, `pg_options`, `device_id`: as in torch, and so are `options` that a newer torch has, such as
    `enable_reconfigure`. `group_name` has no effect, as in torch.

    Raises FrontendError if the frontend isn't available, WorldError if the world can't be determined, ValueError if
    the group exists already, and whatever torch raises.
    """
    global _started
    if dist.is_initialized():
        raise ValueError(
            "trying to initialize the default process group twice! call destroy_process_group() in between"
        )
    machine = frontends.look(os.environ)
    backend = backend or os.environ.get("LAUNCHPAD_BACKEND")
    if backend is not None:
        backend = backend.lower()
        backend = replace_tcp() if backend == dist_backend.TCP else backend
        refuse(backend, machine)
    url, rank, world_size = _split(init_method, rank, world_size)
    if backend == "mpi":
        _start_mpi(rank, world_size, timeout, options)
        return
    if store is None and rank < 0 < world_size and url.scheme in ("tcp", "file") and _is_alone():
        store, rank = bootstrap.take_rank(url, world_size, timeout or dist.default_pg_timeout, _prefix())
        store = _prefixed(store, timeout or dist.default_pg_timeout)
    world = given(rank, world_size, os.environ)
    if world.source == ALONE and url.scheme != "env" and rank < 0:
        raise WorldError(f"{init_method} needs the number of ranks: pass world_size")
    backend = backend or frontends.default(world, machine)
    store = store or _store(url, world, timeout or dist.default_pg_timeout)
    if "nccl" in frontends.names(backend):
        device_id = _bind(world, machine, store, device_id)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        group_name=group_name,
        pg_options=pg_options,
        device_id=device_id,
        **options,
    )
    _started += 1


def init_process(rank: int, size: int, fn: Callable[[int, int], Any], backend: str = "gloo") -> Any:
    """Join a group of `size` ranks as `rank`, call `fn(rank, size)`, leave the group, and return `fn`'s result.

    It is used as in the tutorials: multiprocessing.Process(target=init_process, args=(rank, size, run)). If no launcher
    started the ranks, and MASTER_ADDR and MASTER_PORT are not set, they use the tutorials' address, 127.0.0.1:29500.
    Raises what `init_process_group` and `fn` raise. If `fn` raises, the group is left in place, as other ranks may be
    in the middle of an operation.
    """
    world = given(rank, size, os.environ)
    local = world.source == CALLER and world.master is None
    init_process_group(backend, _TUTORIAL if local else None, rank=rank, world_size=size)
    result = fn(rank, size)
    dist.destroy_process_group()
    return result


def refuse(backend: str, machine: frontends.Devices) -> None:
    """Raise FrontendError if a frontend of `backend` isn't available."""
    for name in sorted(frontends.names(backend)):
        if reason := frontends.why_not(name, machine):
            raise FrontendError(reason)


def _store(url: SplitResult, world: World, timeout: timedelta) -> Store:
    """The store at the URL, under a prefix that keeps its keys apart from an earlier group's."""
    if url.scheme == "env" and world.master is None:
        store = bootstrap.bootstrap_store(world, timeout)
    else:
        if url.scheme == "env":
            host, port = world.master or ("", 0)
            url = urlsplit(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        store, _, _ = next(iter(rendezvous(url.geturl(), world.rank, world.size, timeout=timeout)))
    return _prefixed(store, timeout)


def _prefixed(store: Store, timeout: timedelta) -> Store:
    store.set_timeout(timeout)
    return PrefixStore(_prefix(), store)


def _prefix() -> str:
    """torch's own prefix, so that some ranks may call torch.distributed.init_process_group instead."""
    return "default_pg" if _started == 0 else f"default_pg/{_started}"


def _is_alone() -> bool:
    """Whether nothing in the environment sets a rank."""
    try:
        return world_of(os.environ).source == ALONE
    except WorldError:
        return False


def _split(init_method: str | None, rank: int, size: int) -> tuple[SplitResult, int, int]:
    """The URL without the rank and size that its query may give, and the rank and size."""
    url = urlsplit(init_method or "env://")
    query = dict(parse_qsl(url.query))
    rank, size = int(query.pop("rank", rank)), int(query.pop("world_size", size))
    if url.scheme == "tcp" and bootstrap.is_multicast(url.hostname or ""):
        raise WorldError(f"{init_method}: torch 1.0 removed multicast; use the address of one of the hosts")
    return url._replace(query=urlencode(query)), rank, size


def _bind(world: World, machine: frontends.Devices, store: Store, device_id: torch.device | int | None) -> torch.device:
    """Make the rank's GPU current before NCCL picks one itself: the caller's choice, or the one for the local rank."""
    if device_id is not None:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    else:
        chosen = torch.cuda.current_device()  # not 0 if the program has called set_device
        device = torch.device("cuda", chosen or frontends.device_index(world, machine))
    torch.cuda.set_device(device)
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    claim(store, f"{socket.gethostname()} GPU {device.index} ({identity})", world.rank)
    return device


def claim(store: Store, gpu: str, rank: int) -> None:
    """Claim a GPU for a rank in the store. Raises FrontendError if another rank has it."""
    owner = int(store.compare_set(f"launchpad/{gpu}", "", str(rank)))
    if owner != rank:
        raise FrontendError(
            f"nccl: ranks {owner} and {rank} both use {gpu}, and NCCL needs one GPU per rank: start fewer ranks, give "
            "each its own with torch.cuda.set_device(LOCAL_RANK), or use backend='gloo'"
        )


@functools.wraps(dist.new_group)
def new_group(*args: Any, **options: Any) -> Any:
    """torch.distributed.new_group, also with backend "mpi" in a world of another backend."""
    backend = args[2] if len(args) > 2 else options.get("backend")
    if str(backend).lower() == "mpi":
        importlib.import_module(".mpi", __package__).install()
    return dist.new_group(*args, **options)


def _start_mpi(rank: int, size: int, timeout: timedelta | None, options: dict[str, Any]) -> None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it found no MPI library to load
        raise FrontendError(f"mpi: can't import mpi4py ({error}); pip install mpi4py mpich") from None
    world = given(rank, size, os.environ)
    found = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    if world.source != ALONE and found != world[:2]:
        library = " ".join(MPI.Get_library_version().split(",")[0].split("\n")[0].split())
        raise WorldError(
            f"{world.source} says rank {world.rank} of {world.size}, but MPI ({library}) says rank {found[0]} of "
            f"{found[1]}: start the program with `launchpad run --backend mpi`, or with that MPI's mpirun"
        )
    install = importlib.import_module(".mpi", __package__).install
    install()
    dist.init_process_group("mpi", timeout=timeout, **options)
