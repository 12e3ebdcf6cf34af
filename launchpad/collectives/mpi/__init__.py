"""The mpi frontend: torch.distributed's backend "mpi" on stock torch wheels, over mpi4py.

Torch looks for "mpi" nowhere but in its own `ProcessGroupMPI`, before it asks a registered plug-in. Wheels lack that
class, so `install` puts ours in the empty place, with the one method that torch calls: `create(ranks)`.
"""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from launchpad.collectives.mpi.group import Group

__all__ = ["install"]

NEEDS = "the mpi frontend needs mpi4py and an MPI library; `pip install mpi4py mpich` brings both"
MIXED = "backend {}: mpi carries the tensors of every device, so it can't be mixed with another; say backend='mpi'"
STORELESS = (
    "an mpi world has no store, which a group with backend {} needs; "
    "init_process_group('gloo') and new_group(backend='mpi') give both"
)


class Place:
    """What torch takes for its ProcessGroupMPI. Torch tells `create` no time-out, so `install` leaves it here."""

    timeout: timedelta = c10d.default_pg_timeout

    @classmethod
    def create(cls, ranks: list[int]) -> Group:
        try:
            from launchpad.collectives.mpi.group import Group
        except (ImportError, RuntimeError) as error:  # the second: mpi4py is there and finds no MPI library
            raise RuntimeError(f"{NEEDS} ({' '.join(str(error).split())})") from error
        return Group.create(ranks, cls.timeout)


def install() -> None:
    """Make torch.distributed know the backend "mpi"; nothing is loaded or started before a group is made.

    A torch that was built with MPI keeps its own.
    """
    if c10d.is_mpi_available():
        return
    make_group = c10d._new_process_group_helper
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def with_timeout(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        backend = str(given["backend"])
        if "mpi" in backend and backend != "mpi":
            raise ValueError(MIXED.format(backend))
        if c10d.is_initialized() and c10d.get_backend() == "mpi" and backend not in ("mpi", "fake"):
            raise ValueError(STORELESS.format(backend))
        Place.timeout = given.get("timeout") or c10d.default_pg_timeout
        return make_group(*args, **options)

    c10d._new_process_group_helper = with_timeout
    c10d.ProcessGroupMPI = Place  # type: ignore[assignment, misc, unused-ignore]
    c10d._MPI_AVAILABLE = True
