"""Start the default process group: find the world, the frontend and the place to meet, then leave it to torch."""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..errors import FrontendError, WorldError
from . import frontends, meeting
from .world import ALONE, World, given

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

    `backend`: "gloo", "nccl" or "mpi", or anything that torch knows; None is nccl for the GPU's tensors and gloo for
    the others' where each rank of the host has a GPU, else gloo. With nccl the rank's GPU becomes the current device.
    `init_method`: "env://" (the default), "tcp://HOST:PORT" or "file:///PATH". `rank` and `world_size` are those that
    the launcher told (`world_of`), where they are not given. With env:// and no MASTER_ADDR, ranks on one host meet on
    a port of rank 0's choice. With "mpi" all of that is MPI's, and what is given must agree.
    `timeout`: for meeting, and then for each operation; torch's own (10 min for nccl, 30 min for others) where None.
    `store`, `pg_options`, `device_id`: as torch takes them. `group_name` has no effect, there as here.

    Raises FrontendError where the frontend can't be had, WorldError where the world can't be told, ValueError where
    the group is there already, and what torch raises.
    """
    global _started
    if dist.is_initialized():
        raise ValueError("trying to initialize the default process group twice! destroy_process_group() comes between")
    machine = frontends.look(os.environ)
    if backend is not None:
        backend = backend.lower()
        refuse(backend, machine)
    url, rank, world_size = _split(init_method, rank, world_size)
    if backend == "mpi":
        _start_mpi(rank, world_size, timeout)
        return
    world = given(rank, world_size, os.environ)
    if world.source == ALONE and url.scheme != "env" and rank < 0:
        raise WorldError(f"{init_method} says where to meet, and nothing says who this is: give rank and world_size")
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
    store.set_timeout(timeout)
    # torch's own name, so that a rank may as well call torch.distributed.init_process_group.
    return PrefixStore("default_pg" if _started == 0 else f"default_pg/{_started}", store)


def _split(init_method: str | None, rank: int, size: int) -> tuple[SplitResult, int, int]:
    """The URL without the rank and the size that it may name, and these."""
    url = urlsplit(init_method or "env://")
    query = dict(parse_qsl(url.query))
    rank, size = int(query.pop("rank", rank)), int(query.pop("world_size", size))
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
