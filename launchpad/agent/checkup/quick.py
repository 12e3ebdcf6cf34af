"""What a host tells of itself in a moment, by subject: for launchpad doctor, and for --health doctor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import gpus, host

Look = Callable[[dict[str, Any]], Any]  # of a request, which has the ranks' variables

LOOKS: Mapping[str, Look] = {
    "limits": lambda _: host.limits(),
    "tmp": lambda request: host.folder(host.expanded("tmp", request)),
    "shm": lambda _: host.folder("/dev/shm"),
    "memory": lambda _: host.memory(),
    "gpus": lambda _: gpus.look(),
}


def seen(look: Look, request: dict[str, Any]) -> tuple[list[Any], str]:
    """The facts, and why there are none: other subjects are not concerned."""
    try:
        return list(look(request)), ""
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
