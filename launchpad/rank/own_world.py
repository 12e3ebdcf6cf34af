"""Leaves a mark for the agent if this rank, one of several, has called MPI_Init in a world of its own."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Who has one of these was started by a process manager of MPI, which knows how large its world is.
_MANAGED = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def spec_of_mpi(path: Any, target: Any, ours: object) -> Any:
    """The spec of mpi4py.MPI from the other finders than `ours`. The mark is left once the module is loaded."""
    for finder in sys.meta_path:
        spec = finder.find_spec("mpi4py.MPI", path, target) if finder is not ours else None
        if spec is not None:
            _watch(spec.loader)
            return spec
    return None


def _watch(loader: Any) -> None:
    load = loader.exec_module

    def load_and_mark(module: Any) -> None:
        load(module)
        mark(module)

    loader.exec_module = load_and_mark


def mark(module: Any) -> None:
    """`module`: mpi4py.MPI. Nothing that goes wrong here concerns the program."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    try:
        if path.endswith(".error.json") and module.Is_initialized() and _is_alone(module, _MANAGED):
            with open(path.removesuffix(".error.json") + ".own_world", "x"):
                pass
    except Exception:
        pass


def _is_alone(module: Any, managed: Sequence[str]) -> bool:
    return module.COMM_WORLD.Get_size() == 1 and not any(name in os.environ for name in managed)
