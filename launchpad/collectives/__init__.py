"""torch.distributed's names, for any frontend and under any launcher: gloo, NCCL or MPI.

    from launchpad import collectives as dist

    dist.init_process_group()        # or "gloo", "nccl", "mpi"
    dist.all_reduce(tensor)

All that torch.distributed has is here, so that it, DDP and this module share one group and can be mixed. Ours are:

- `init_process_group`, which finds its world under launchpad, torchrun, Open MPI, MPICH, MVAPICH, Slurm, or alone;
- `recv` and `recv_object_list`, which take from any rank where no sender is named, and return who it was;
- `monitored_barrier`, which is the mpi frontend's too;
- `send` and the collectives on tensors, which are right for strided tensors too (`layout` tells where torch's are not);
- `isend` and `irecv`, whose requests tell whether they are completed, over gloo too;
- `init_process(rank, size, fn)`, the tutorials' way to run a function in a group;
- what early torch had, `early`; algorithms to learn from, `algorithms`;
- `is_available`, which is False rather than an error without torch;
- `world_of`, a launcher's variables read: `world_of(os.environ).local_rank`.

Torch is imported when the first of the other names is used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import FrontendError, WorldError
from .world import World, world_of

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
        new_group,
        scatter_object_list,
        send_object_list,
    )

    from .early import (
        all_gather_multigpu,
        all_reduce_multigpu,
        broadcast_multigpu,
        dist_backend,
        init_master_worker,
        reduce_multigpu,
        reduce_op,
        reduce_scatter_multigpu,
    )
    from .layout import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_to_all,
        all_to_all_single,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
    )
    from .peers import P2POp, irecv, isend, monitored_barrier, recv, recv_object_list, send
    from .start import init_process, init_process_group

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
    "gather_object",
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

# Our functions, by module. Each is torch's under the same name where there is nothing to do beyond it.
_HOMES = {
    ".layout": (
        "all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all all_to_all_single broadcast gather "
        "reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter"
    ),
    ".peers": "P2POp irecv isend monitored_barrier recv recv_object_list send",
    ".start": "init_process init_process_group",
    ".early": (
        "all_gather_multigpu all_reduce_multigpu broadcast_multigpu dist_backend init_master_worker reduce_multigpu "
        "reduce_op reduce_scatter_multigpu _clear_group_cache _register_stream"
    ),
}
# Of ours that torch.distributed has a namesake of.
_MODULES = ("algorithms",)
_OURS = {name: module for module, names in _HOMES.items() for name in names.split()}


def is_available() -> bool:
    """Whether there is a torch that was built with torch.distributed."""
    try:
        _torch_distributed()
    except FrontendError:
        return False
    return True


def __getattr__(name: str) -> Any:
    # Tools ask every module for names such as __path__ and __wrapped__.
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
    """torch.distributed. Raises FrontendError where there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise FrontendError(f"{sys.executable} has no torch, on which all frontends rest: pip install torch") from None
    import torch.distributed

    if not torch.distributed.is_available():
        raise FrontendError("this torch was built without torch.distributed: install one from PyPI or pytorch.org")
    return torch.distributed
