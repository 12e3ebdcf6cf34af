"""The mpi frontend: torch.distributed's backend "mpi" on stock torch wheels, over mpi4py.

For "mpi", torch only ever uses its own `ProcessGroupMPI`; it never consults registered plug-ins. Wheels lack that
class, so `install` fills the gap with ours, which has the one method that torch calls: `create(ranks)`.
"""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from launchpad.errors import FrontendError

if TYPE_CHECKING:
    from launchpad.collectives.mpi.group import MpiGroup

__all__ = ["install"]

NEEDS = "the mpi frontend needs mpi4py and an MPI library; `pip install mpi4py mpich` installs both"
UNKNOWN_TORCH = "the mpi frontend can't be used with torch {}: {}; use backend='gloo', or another release of torch"
FIXED = "backend mpi: the ranks of an MPI world can't be reconfigured; leave out enable_reconfigure"
MIXED = "backend {}: mpi handles tensors of every device and can't be combined with another; use backend='mpi'"
STORELESS = (
    "an mpi world has no store, which a group with backend {} needs; "
    "to have both, use init_process_group('gloo') and new_group(backend='mpi')"
)


class MpiBackend:
    """Stands in for torch's ProcessGroupMPI. Torch passes `create` no timeout, so `install` leaves it here."""

    timeout: timedelta = c10d.default_pg_timeout

    @classmethod
    def create(cls, ranks: list[int]) -> MpiGroup:
        try:
            from launchpad.collectives.mpi.group import MpiGroup
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
            if str(getattr(error, "name", "")).startswith("torch"):
                raise RuntimeError(UNKNOWN_TORCH.format(torch.__version__, error)) from error
            raise RuntimeError(f"{NEEDS} ({' '.join(str(error).split())})") from error
        return MpiGroup.create(ranks, cls.timeout)


def install() -> None:
    """Give torch.distributed the backend "mpi". Nothing is loaded or started until a group is created.

    A torch that was built with MPI keeps its own backend.
    """
    if c10d.is_mpi_available():
        return
    make_group: Any = getattr(c10d, "_new_process_group_helper", None)
    signature = inspect.signature(make_group or (lambda: None))
    if not {"backend", "timeout"} <= signature.parameters.keys():
        what = "torch.distributed.distributed_c10d._new_process_group_helper is missing or takes other arguments"
        raise FrontendError(UNKNOWN_TORCH.format(torch.__version__, what))

    @functools.wraps(make_group)
    def with_timeout(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        backend = str(given["backend"])
        if "mpi" in backend and backend != "mpi":
            raise ValueError(MIXED.format(backend))
        if c10d.is_initialized() and c10d.get_backend() == "mpi" and backend not in ("mpi", "fake"):
            raise ValueError(STORELESS.format(backend))
        if given.get("enable_reconfigure"):
            raise ValueError(FIXED)
        MpiBackend.timeout = given.get("timeout") or c10d.default_pg_timeout
        return make_group(*args, **options)

    c10d._new_process_group_helper = with_timeout
    c10d.ProcessGroupMPI = MpiBackend  # type: ignore[assignment, misc, unused-ignore]
    c10d._MPI_AVAILABLE = True
