"""The process groups of this rank, as torch keeps them."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def in_steps(ranks: list[int]) -> list[list[int]]:
    """Ranks in order as [first, last, step] each: there may be a hundred thousand."""
    found: list[list[int]] = []
    for rank in ranks:
        last = found[-1] if found else None
        if last is not None and (last[0] == last[1] or rank - last[1] == last[2]):
            last[1:] = rank, rank - last[1]
        else:
            found.append([rank, rank, 1])
    return found


def known() -> list[tuple[Any, str, list[int]]]:
    """(group, name, its members' ranks) each; none in a torch that keeps them elsewhere.

    torch also keeps members of the groups that this rank is not in: all under one number, without a name.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    members = getattr(world, "pg_group_ranks", {})
    names = list(getattr(world, "pg_names", {}).items())
    return [(group, str(name), sorted(map(int, members.get(group, ())))) for group, name in names]
