"""Which frontends (gloo, nccl, mpi) are available here, which one is the default, and which GPU a rank uses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import NamedTuple

from launchpad.collectives.launchers import World
from launchpad.errors import FrontendError


class Devices(NamedTuple):
    """What this process's torch and host offer the frontends."""

    gloo: bool
    nccl: bool  # torch was built with it
    cuda: bool  # torch was built with it
    gpus: int  # visible to this process
    own_gpus: bool  # each rank on the host sees only its own GPUs
    mpi4py: bool
    python: str


# With any of these set, Slurm gives each task its own GPUs.
_OWN_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")


def look(environ: Mapping[str, str]) -> Devices:
    """Look up the facts, without initialising CUDA in this process."""
    import torch
    import torch.distributed as dist

    return Devices(
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        cuda=torch.version.cuda is not None or torch.version.hip is not None,
        gpus=torch.cuda.device_count(),
        own_gpus=any(name in environ for name in _OWN_GPUS),
        mpi4py=importlib.util.find_spec("mpi4py") is not None,
        python=sys.executable,
    )


def why_not(frontend: str, machine: Devices) -> str:
    """Why a frontend isn't available and how to get it, in one sentence; "" if it is, or if we don't know the name."""
    match frontend:
        case "gloo" if not machine.gloo:
            return "gloo: this torch was built without gloo; install torch from PyPI or pytorch.org, which include it"
        case "nccl" if not machine.cuda:
            return (
                "nccl: this torch was built for CPU only; install a CUDA build (see pytorch.org/get-started), "
                "or use backend='gloo'"
            )
        case "nccl" if not machine.nccl:
            return "nccl: this torch was built without NCCL; install it from pytorch.org, or use backend='gloo'"
        case "nccl" if not machine.gpus:
            return (
                "nccl: this process sees no GPU; run on a machine with one, check the driver (nvidia-smi) and "
                "CUDA_VISIBLE_DEVICES, or use backend='gloo'"
            )
        case "mpi" if not machine.mpi4py:
            return f"mpi: {machine.python} has no mpi4py; pip install mpi4py mpich"
    return ""


def default(world: World, machine: Devices) -> str:
    """The backend if none is named: gloo, plus nccl for GPU tensors if each rank on the host has a GPU."""
    enough = machine.own_gpus or (world.local_size or 1) <= machine.gpus
    if enough and not why_not("nccl", machine):
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def names(backend: str) -> set[str]:
    """The frontends in a torch backend string, which names one ("gloo") or one per device ("cpu:gloo,cuda:nccl")."""
    return {part.strip().rpartition(":")[2] for part in backend.split(",")}


def device_index(world: World, machine: Devices) -> int:
    """The index of the GPU that a rank should use, among those visible to it.

    Raises FrontendError if there are fewer GPUs than ranks on this host.
    """
    if world.local_rank is None:
        return world.rank % machine.gpus  # torch's guess too
    if world.local_rank < machine.gpus:
        return world.local_rank
    if machine.own_gpus:
        return world.local_rank % machine.gpus
    ranks = f"{world.local_size} ranks" if world.local_size else f"at least {world.local_rank + 1} ranks"
    raise FrontendError(
        f"nccl: {ranks} on this host, but {machine.gpus} GPU{'s' * (machine.gpus > 1)}, and NCCL needs one per rank "
        f"(local rank {world.local_rank} has none): start {machine.gpus} per host, or use backend='gloo'"
    )
