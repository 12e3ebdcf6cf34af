"""Makes the default process group for the fixture `process_group`, in a rank."""

from __future__ import annotations

from typing import Any

from launchpad import collectives as dist


def begin() -> Any:
    """The default group, over the frontend that LAUNCHPAD_BACKEND names. Raises what init_process_group raises."""
    dist.init_process_group()
    return dist.group.WORLD


def end() -> None:
    """Leave the group, unless the test has."""
    if dist.is_initialized():
        dist.destroy_process_group()
