"""One world of several programs, as mpirun's `:` separates them: which ranks of a node run which. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from launchpad.errors import UsageError
from launchpad.job.spec import Program, Share, Target
from launchpad.protocol.commands import Probe


def on_node(programs: Iterable[Program], node: int) -> list[tuple[Program, int]]:
    """The programs that run on a node, with how many ranks each, in the order of these."""
    return [(one, share.ranks) for one in programs for share in one.shares if share.node == node]


def of_local_rank(programs: Iterable[Program], node: int, local_rank: int) -> Program:
    """The program that a rank of this node runs."""
    for one, count in on_node(programs, node):
        if local_rank < count:
            return one
        local_rank -= count
    raise IndexError(f"node {node} has no such rank")


def image_of(programs: Iterable[Program], node: int, preload: tuple[str, ...]) -> tuple[Target, tuple[str, ...]]:
    """The program whose ranks are forked on this node, or else its first, and the modules that are imported for it."""
    here = [one for one, _ in on_node(programs, node)]
    forked = next((one for one in here if one.forks), None)
    return (forked or here[0]).target, preload if forked else ()


def check_order(programs: Sequence[Iterable[Share]], names: Sequence[str]) -> None:
    """Raise UsageError unless each node's ranks follow one another. `names`: the nodes'."""
    last, seen = -1, set()
    for number, shares in enumerate(programs, start=1):
        for share in shares:
            if share.node != last and share.node in seen:
                raise UsageError(
                    f"program {number} has ranks on {names[share.node]}, and so has one before it, with ranks of other "
                    "hosts between them; give each host's programs next to each other, like -H a:1 x : -H a:2 y : "
                    "-H b:1 x : -H b:2 y"
                )
            seen.add(share.node)
            last = share.node


def probes_for(programs: Sequence[Program], probes: Sequence[Probe]) -> list[list[Probe]]:
    """The probes of each node for the programs that run there: for the first of each, the second, and so on."""
    here = [[one for one, _ in on_node(programs, node)] for node in range(len(probes))]

    def of(turn: int) -> list[Probe]:
        ones = [found[min(turn, len(found) - 1)] for found in here]
        columns = zip(probes, ones, strict=True)
        return [probe._replace(cwd=one.cwd or probe.cwd, needs=list(one.target.needs)) for probe, one in columns]

    return [of(turn) for turn in range(max(map(len, here)))]


def labels(programs: Iterable[Sequence[Any]]) -> dict[int, str]:
    """By rank, the label of its program, of [label, [rank, …]] each; none if all are the same."""
    found = {rank: label for label, ranks in programs for rank in ranks}
    return found if len(set(found.values())) > 1 else {}
