"""Start the default process group: find the world, the frontend and the place to meet, then leave it to torch."""

from __future__ import annotations

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

from ..errors import FrontendError, WorldError
from . import frontends, meeting
from .early import dist_backend, instead_of_tcp
from .world import ALONE, CALLER, World, given, world_of

# Where the processes of the tutorials meet.
_TUTORIAL = "tcp://127.0.0.1:29500"

# The groups that were started in this process, one after the other.
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
) -> None:
    """torch.distributed.init_process_group, which needs to be told nothing under any launcher.

    `backend`: "gloo", "nccl" or "mpi", or anything that torch knows; None is what `launchpad run --backend` said, else
    nccl for the GPU's tensors and gloo for the others' where each rank of the host has a GPU, else gloo. With nccl the
    rank's GPU becomes the current device.
    `init_method`: "env://" (the default), "tcp://HOST:PORT" or "file:///PATH". `rank` and `world_size` are those that
    the launcher told (`world_of`), where they are not given. Without a launcher, tcp:// and file:// need `world_size`
    only, and hand out the ranks as the processes come; with tcp:// the one that can listen there is rank 0. With env://
    and no MASTER_ADDR, ranks on one host meet on a port of rank 0's choice. With "mpi" all of that is MPI's, and what
    is given must agree.
    `timeout`: for meeting, and then for each operation; torch's own (10 min for nccl, 30 min for others) where None.
    `store`, `pg_options`, `device_id`: as torch takes them. `group_name` has no effect, there as here.

    Raises FrontendError where the frontend can't be had, WorldError where the world can't be told, ValueError where
    the group is there already, and what torch raises.
    """
    global _started
    if dist.is_initialized():
        raise ValueError("trying to initialize the default process group twice! destroy_process_group() comes between")
    machine = frontends.look(os.environ)
    backend = backend or os.environ.get("LAUNCHPAD_BACKEND")
    if backend is not None:
        backend = backend.lower()
        backend = instead_of_tcp() if backend == dist_backend.TCP else backend
        refuse(backend, machine)
    url, rank, world_size = _split(init_method, rank, world_size)
    if backend == "mpi":
        _start_mpi(rank, world_size, timeout)
        return
    if store is None and rank < 0 < world_size and url.scheme in ("tcp", "file") and _is_alone():
        store, rank = meeting.take_rank(url, world_size, timeout or dist.default_pg_timeout, _prefix())
        store = _named(store, timeout or dist.default_pg_timeout)
    world = given(rank, world_size, os.environ)
    if world.source == ALONE and url.scheme != "env" and rank < 0:
        raise WorldError(f"{init_method} says where to meet, and nothing says of how many: give world_size")
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
    )
    _started += 1


def init_process(rank: int, size: int, fn: Callable[[int, int], Any], backend: str = "gloo") -> Any:
    """Join a group of `size` ranks as `rank`, call `fn(rank, size)`, leave the group; what `fn` returned.

    As the tutorials' processes do: multiprocessing.Process(target=init_process, args=(rank, size, run)). Where no
    launcher started the ranks, and MASTER_ADDR and MASTER_PORT are not set, they meet at the tutorials' own address,
    127.0.0.1:29500.
    Raises what `init_process_group` and `fn` raise; after the latter the group is still there, as the other ranks may
    be in the middle of an operation.
    """
    world = given(rank, size, os.environ)
    here = world.source == CALLER and world.master is None
    init_process_group(backend, _TUTORIAL if here else None, rank=rank, world_size=size)
    result = fn(rank, size)
    dist.destroy_process_group()
    return result


def refuse(backend: str, machine: frontends.Machine) -> None:
    """Raise FrontendError where a frontend of `backend` can't be had."""
    for name in sorted(frontends.names(backend)):
        if why := frontends.why_not(name, machine):
            raise FrontendError(why)


def _store(url: SplitResult, world: World, timeout: timedelta) -> Store:
    """Where the ranks meet, as the URL says; below a name that an earlier group's keys don't have."""
    if url.scheme == "env" and world.master is None:
        store = meeting.meet(world, timeout)
    else:
        if url.scheme == "env":
            host, port = world.master or ("", 0)
            url = urlsplit(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        store, _, _ = next(iter(rendezvous(url.geturl(), world.rank, world.size, timeout=timeout)))
    return _named(store, timeout)


def _named(store: Store, timeout: timedelta) -> Store:
    store.set_timeout(timeout)
    return PrefixStore(_prefix(), store)


def _prefix() -> str:
    """torch's own name, so that a rank may as well call torch.distributed.init_process_group."""
    return "default_pg" if _started == 0 else f"default_pg/{_started}"


def _is_alone() -> bool:
    """Whether nothing in the environment tells a rank."""
    try:
        return world_of(os.environ).source == ALONE
    except WorldError:
        return False


def _split(init_method: str | None, rank: int, size: int) -> tuple[SplitResult, int, int]:
    """The URL without the rank and the size that it may name, and these."""
    url = urlsplit(init_method or "env://")
    query = dict(parse_qsl(url.query))
    rank, size = int(query.pop("rank", rank)), int(query.pop("world_size", size))
    if url.scheme == "tcp" and meeting.is_multicast(url.hostname or ""):
        raise WorldError(
            f"{init_method}: ranks met by multicast before torch 1.0; name the address of one of the hosts"
        )
    return url._replace(query=urlencode(query)), rank, size


def _bind(world: World, machine: frontends.Machine, store: Store, device_id: torch.device | int | None) -> torch.device:
    """Make the rank's GPU the current one, before NCCL picks one by itself: the one asked for, or by the local rank."""
    if device_id is not None:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    else:
        chosen = torch.cuda.current_device()  # other than 0: the program has called set_device
        device = torch.device("cuda", chosen or frontends.device_index(world, machine))
    torch.cuda.set_device(device)
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    claim(store, f"{socket.gethostname()} GPU {device.index} ({identity})", world.rank)
    return device


def claim(store: Store, gpu: str, rank: int) -> None:
    """Note in the store that a GPU is a rank's. Raises FrontendError where another rank has it."""
    holder = int(store.compare_set(f"launchpad/{gpu}", "", str(rank)))
    if holder != rank:
        raise FrontendError(
            f"nccl: ranks {holder} and {rank} both take {gpu}, and NCCL needs one for each: start fewer ranks, give "
            "each its own by torch.cuda.set_device(LOCAL_RANK), or take backend='gloo'"
        )


def _start_mpi(rank: int, size: int, timeout: timedelta | None) -> None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library that it could load
        raise FrontendError(f"mpi: mpi4py can't be imported ({error}); pip install mpi4py mpich") from None
    world = given(rank, size, os.environ)
    found = (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    if world.source != ALONE and found != world[:2]:
        library = " ".join(MPI.Get_library_version().split(",")[0].split("\n")[0].split())
        raise WorldError(
            f"{world.source} says rank {world.rank} of {world.size}, but MPI ({library}) says rank {found[0]} of "
            f"{found[1]}: start with `launchpad run --backend mpi`, or with the mpirun of that MPI"
        )
    install = importlib.import_module(".mpi", __package__).install
    install()
    dist.init_process_group("mpi", timeout=timeout)
