"""Which GPUs of its host each world of a job sees: those of different worlds are disjoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launchpad.errors import UsageError
from launchpad.named import NamedTuple


class Wish(NamedTuple):
    """The ranks of a world on one host."""

    role: str
    host: str
    ranks: int
    gpus: int | None  # for each of them; None: not given, so they see all


def share_gpus(wishes: Sequence[Wish], devices: Mapping[str, Sequence[str]], where: str) -> list[list[str] | None]:
    """The GPUs of each, in order; None: all that there are. `devices`: of each host. Raises UsageError."""
    left = {host: list(names) for host, names in devices.items()}
    found: list[list[str] | None] = []
    for wish in wishes:
        if wish.gpus is None:
            found.append(None)
            continue
        free, count = left[wish.host], wish.gpus * wish.ranks
        if count > len(free):
            total = len(devices[wish.host])
            has = f"{wish.host} has {total}" + (f", of which {len(free)} are left" if len(free) < total else "")
            raise UsageError(f"{where}.{wish.role}, gpus: it needs {count}, and {has}; ask for fewer")
        found.append(free[:count])
        del free[:count]
    return found
