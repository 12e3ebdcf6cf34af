"""Makes the default process group for the fixture `process_group`, in a rank."""

from __future__ import annotations

import os
from typing import Any

from launchpad import collectives as dist


def begin() -> Any:
    """The default group, over the frontend that LAUNCHPAD_BACKEND names. Raises what init_process_group raises."""
    # Gloo only waits for the own connections: a rank whose test is short would hang up on those that still connect.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    dist.init_process_group()
    return dist.group.WORLD


def end() -> None:
    """Leave the group, unless the test has."""
    if dist.is_initialized():
        dist.destroy_process_group()
