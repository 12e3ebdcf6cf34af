"""Lets `jax.distributed.initialize()` find the coordinator, the number of processes and this one's id.

JAX takes only the address from a variable. All three come from a class that is derived from its ClusterEnv: the first
of these classes is asked that says that the process is in its environment. Ours comes before those for Slurm and Open
MPI, as launchpad may have been started in one of their jobs, which has other processes.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def install(clusters: Any) -> None:
    """Register the class with `jax._src.clusters`. A JAX that works differently is left alone."""
    try:
        known = clusters.ClusterEnv._cluster_types
        ours = _derived(clusters.ClusterEnv)
        known[:] = [ours, *(one for one in known if one is not ours)]
    except Exception:  # it must not keep the program from importing JAX
        pass


def _derived(base: Any) -> Any:
    class LaunchpadCluster(base):  # type: ignore[misc]
        """The methods take what any version of JAX passes: a time limit, another port."""

        name = "launchpad"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(name in os.environ for name in _VARIABLES)

        @classmethod
        def get_coordinator_address(cls, *_: object, override_coordinator_port: object = None, **__: object) -> str:
            host, port = os.environ["MASTER_ADDR"], override_coordinator_port or os.environ["MASTER_PORT"]
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            """The GPU of a rank that would share several with others of its host; None: all that it sees."""
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            shares = os.environ["LOCAL_WORLD_SIZE"] != "1" and (seen is None or "," in seen)
            return int(os.environ["LOCAL_RANK"]) if shares else None

    return LaunchpadCluster
