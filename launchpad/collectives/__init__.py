"""torch.distributed under its own names, over any frontend (gloo, NCCL or MPI) and under any launcher.

    from launchpad import collectives as dist

    dist.init_process_group()        # or "gloo", "nccl", "mpi"
    dist.all_reduce(tensor)

Everything in torch.distributed is here too, so it, DDP and this module share one group and can be mixed. Ours are:

- `init_process_group`, which finds its world under launchpad, torchrun, Open MPI, MPICH, MVAPICH, Slurm, or alone;
- `recv` and `recv_object_list`, which receive from any rank if no sender is named, and return the sender's rank;
- `monitored_barrier`, which works over the mpi frontend too;
- `send` and the tensor collectives, which are correct for strided tensors (`layout` says where torch's are not);
- `isend` and `irecv`, which take strided tensors, and whose requests report completion over gloo too;
- `new_group`, which makes groups of the mpi frontend in a world of gloo, too;
- `init_process(rank, size, fn)`, the tutorials' way to run a function in a group;
- the API of early torch, in `early`; textbook algorithms to learn from, in `algorithms`;
- `is_available`, which returns False instead of raising if there is no torch;
- `world_of`, which parses a launcher's variables: `world_of(os.environ).local_rank`.

`World`, `world_of` and the error classes don't need torch; using any other name imports it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launchpad.collectives.launchers import World, world_of
from launchpad.errors import FrontendError, WorldError

if TYPE_CHECKING:
    from torch.distributed import (
        Backend,
        ProcessGroup,
        ReduceOp,
        Work,
        all_gather_object,
        barrier,
        batch_isend_irecv,
        broadcast_object_list,
        destroy_process_group,
        gather_object,
        get_backend,
        get_rank,
        get_world_size,
        group,
        is_initialized,
        scatter_object_list,
    )

    from launchpad.collectives.early import (
        all_gather_multigpu,
        all_reduce_multigpu,
        broadcast_multigpu,
        dist_backend,
        init_master_worker,
        reduce_multigpu,
        reduce_op,
        reduce_scatter_multigpu,
    )
    from launchpad.collectives.layout import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        broadcast,
        gather,
        gather_into_tensor,
        gather_single,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
    )
    from launchpad.collectives.peers import (
        P2POp,
        irecv,
        isend,
        monitored_barrier,
        recv,
        recv_object_list,
        send,
        send_object_list,
    )
    from launchpad.collectives.start import init_process, init_process_group, new_group

__all__ = [
    "Backend",
    "FrontendError",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "World",
    "WorldError",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_multigpu",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_multigpu",
    "broadcast_object_list",
    "destroy_process_group",
    "dist_backend",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_rank",
    "get_world_size",
    "group",
    "init_master_worker",
    "init_process",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_multigpu",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "world_of",
]

# Our own functions, by module. Every other name is torch's.
_HOMES = {
    ".layout": (
        "all_gather all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced all_to_all "
        "all_to_all_single broadcast gather gather_into_tensor gather_single reduce reduce_scatter "
        "reduce_scatter_single reduce_scatter_tensor scatter"
    ),
    ".peers": "P2POp irecv isend monitored_barrier recv recv_object_list send send_object_list",
    ".start": "init_process init_process_group new_group",
    ".early": (
        "all_gather_multigpu all_reduce_multigpu broadcast_multigpu dist_backend init_master_worker reduce_multigpu "
        "reduce_op reduce_scatter_multigpu _clear_group_cache _register_stream"
    ),
}
# Our modules that share a name with something in torch.distributed.
_MODULES = ("algorithms",)
_OURS = {name: module for module, names in _HOMES.items() for name in names.split()}


def is_available() -> bool:
    """Whether torch is installed and was built with torch.distributed."""
    try:
        _torch_distributed()
    except FrontendError:
        return False
    return True


def __getattr__(name: str) -> Any:
    # Tools look up names such as __path__ and __wrapped__ on every module.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch = _torch_distributed()
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    home = importlib.import_module(_OURS[name], __name__) if name in _OURS else torch
    try:
        return getattr(home, name)
    except AttributeError:
        raise AttributeError(f"neither {__name__} nor torch.distributed has {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})


def _torch_distributed() -> ModuleType:
    """torch.distributed. Raises FrontendError if there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise FrontendError(f"{sys.executable} has no torch, which every frontend needs: pip install torch") from None
    import torch.distributed

    if not torch.distributed.is_available():
        raise FrontendError("this torch was built without torch.distributed: install it from PyPI or pytorch.org")
    return torch.distributed
