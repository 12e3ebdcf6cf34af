"""Which frontends (gloo, nccl, mpi) can be had here, which one is taken where none is named, and which GPU is whose."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import FrontendError
from .world import World


class Machine(NamedTuple):
    """What there is in this process's torch and on its host, as far as frontends need it."""

    gloo: bool
    nccl: bool  # torch was built with it
    cuda: bool  # torch was built with it
    gpus: int  # that this process sees
    own_gpus: bool  # each rank sees only GPUs that no other rank of the host sees
    mpi4py: bool
    python: str


# By these Slurm gives each task GPUs of its own.
_OWN_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")


def look(environ: Mapping[str, str]) -> Machine:
    """The facts, without starting CUDA in this process."""
    import torch
    import torch.distributed as dist

    return Machine(
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        cuda=torch.version.cuda is not None or torch.version.hip is not None,
        gpus=torch.cuda.device_count(),
        own_gpus=any(name in environ for name in _OWN_GPUS),
        mpi4py=importlib.util.find_spec("mpi4py") is not None,
        python=sys.executable,
    )


def why_not(frontend: str, machine: Machine) -> str:
    """Why a frontend can't be had, and what to install, in a sentence; "" where it can, and of a name we don't know."""
    match frontend:
        case "gloo" if not machine.gloo:
            return "gloo: this torch was built without it; install torch from PyPI or pytorch.org, where it always is"
        case "nccl" if not machine.cuda:
            return (
                "nccl: this torch is built for the CPU only; install a CUDA build of it (pytorch.org/get-started tells "
                "the command), or take backend='gloo'"
            )
        case "nccl" if not machine.nccl:
            return "nccl: this torch was built without NCCL; install the build of pytorch.org, or take backend='gloo'"
        case "nccl" if not machine.gpus:
            return (
                "nccl: there is no GPU that this process sees; run where there is one, check the driver (nvidia-smi) "
                "and CUDA_VISIBLE_DEVICES, or take backend='gloo'"
            )
        case "mpi" if not machine.mpi4py:
            return f"mpi: {machine.python} has no mpi4py; pip install mpi4py mpich"
    return ""


def default(world: World, machine: Machine) -> str:
    """What None stands for: nccl for a GPU's tensors, where each rank of the host has a GPU, and gloo for others."""
    enough = machine.own_gpus or (world.local_size or 1) <= machine.gpus
    if enough and not why_not("nccl", machine):
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def names(backend: str) -> set[str]:
    """The frontends in torch's way to name one, or one for each device: "cpu:gloo,cuda:nccl"."""
    return {part.strip().rpartition(":")[2] for part in backend.split(",")}


def device_index(world: World, machine: Machine) -> int:
    """Which of the GPUs that it sees a rank is to take.

    Raises FrontendError where there are fewer GPUs than ranks on this host.
    """
    if world.local_rank is None:
        return world.rank % machine.gpus  # as torch guesses, too
    if world.local_rank < machine.gpus:
        return world.local_rank
    if machine.own_gpus:
        return world.local_rank % machine.gpus
    ranks = f"{world.local_size} ranks" if world.local_size else f"{world.local_rank + 1} ranks or more"
    raise FrontendError(
        f"nccl: {ranks} on this host, but {machine.gpus} GPU{'s' * (machine.gpus > 1)}, and NCCL needs one for each "
        f"(local rank {world.local_rank} has none): start {machine.gpus} on each host, or take backend='gloo'"
    )
