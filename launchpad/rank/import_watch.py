"""Hooks into libraries that the program may import later, or never."""

from __future__ import annotations

import sys

from . import stack_server

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ImportWatch:
    """A module finder that tries a package's hook at each import from it, until it is installed."""

    def __init__(self, hooks: dict[str, Callable[[], bool]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Find nothing, except mpi4py.MPI: it is loaded as by others, and then looked at."""
        if name == "mpi4py.MPI":
            from . import own_world

            return own_world.spec_of_mpi(path, target, self)
        package = name.partition(".")[0]
        hook = self._hooks.get(package)
        if hook is not None and hook():
            self._hooks.pop(package, None)
            if package == "torch":
                from . import milestones

                milestones.reach("torch")
        return None


def watch() -> None:
    """Install the hooks of what is imported already, and the others when their time comes."""
    hooks = {"torch": stack_server.install, "jax": _install_jax_cluster, "multiprocessing": _prepare_multiprocessing}
    sys.meta_path.insert(0, ImportWatch({package: hook for package, hook in hooks.items() if not hook()}))


def _install_jax_cluster() -> bool:
    clusters = sys.modules.get("jax._src.clusters")
    if not hasattr(clusters, "ClusterEnv"):
        return False
    from . import jax_cluster  # few programs need it

    jax_cluster.install(clusters)
    return True


def _prepare_multiprocessing() -> bool:
    if "multiprocessing.process" not in sys.modules:
        return False
    from . import killed_child, scratch

    scratch.install()
    return killed_child.install()
