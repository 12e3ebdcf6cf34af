"""Where the ranks of a job of several worlds are: each for itself, as ranks wait for those of their own only. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from launchpad.diagnosis.stack_summary import full, held, merged
from launchpad.protocol.events import RanksHeld, StacksTaken

Roles = Sequence[Sequence[Any]]  # [name, [rank, …]] each


def by_role(taken: StacksTaken, roles: Roles) -> Iterator[tuple[str, int, StacksTaken]]:
    """Each role's name, its first rank in the job, and its stacks, with the numbers that its ranks have in it.

    Then those of ranks that were spawned, which have only one in the job.
    """
    spawned = set(taken.ranks).difference(*(ranks for _, ranks in roles))
    here = [(name, ranks) for name, ranks in roles if not set(taken.ranks).isdisjoint(ranks)]
    for name, ranks in here or (() if spawned else roles):
        first = ranks[0]
        yield (
            name,
            first,
            taken._replace(
                dumps=[one._replace(rank=one.rank - first) for one in taken.dumps if one.rank in ranks],
                ranks=[rank - first for rank in taken.ranks if rank in ranks],
                starting=[rank - first for rank in taken.starting if rank in ranks],
            ),
        )
    if spawned:
        yield (
            "spawned",
            0,
            taken._replace(
                dumps=[one for one in taken.dumps if one.rank in spawned],
                ranks=sorted(spawned),
                starting=[rank for rank in taken.starting if rank in spawned],
            ),
        )


def merged_by_role(taken: StacksTaken, cwd: str, roles: Roles) -> str:
    """The summary, a paragraph for each role."""
    lines: list[str] = []
    for name, _, own in by_role(taken, roles):
        head, _, rest = merged(own, cwd, {}).partition("\n")
        lines += [*([] if lines else [head]), f"  {name}:", textwrap.indent(rest, "  ")]
    return "\n".join(lines)


def full_by_role(taken: StacksTaken, cwd: str, roles: Roles) -> str:
    """All stacks."""
    parts = [(name, full(own, cwd, {})) for name, _, own in by_role(taken, roles)]
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts if text)


def held_by_role(taken: StacksTaken, cwd: str, roles: Roles) -> RanksHeld:
    """Which ranks the others of their role wait for, and where all are. A role of one rank holds up none of its own."""
    found = [(name, first, own, held(own, cwd, {})) for name, first, own in by_role(taken, roles) if own.dumps]
    lines = [f"{name}: {line}" for name, _, _, one in found for line in one.lines]
    blamed = next(((first, one) for _, first, own, one in found if one.ranks and len(own.dumps) > 1), None)
    if blamed is None:
        return RanksHeld(taken.time, taken.why, [], lines, None)
    first, one = blamed
    return RanksHeld(taken.time, taken.why, [first + rank for rank in one.ranks], lines, one.raising)
