"""Decides which nodes take part in the next attempt, and which ranks each of them gets. Pure."""

from collections.abc import Collection, Mapping, Sequence

from launchpad.named import NamedTuple


class Seat(NamedTuple):
    """A node that takes part. The ranks are numbered seat by seat."""

    node: int  # its number among all nodes of the job
    ranks: int


class Membership(NamedTuple):
    """On how many nodes a job runs, and what a change of its nodes means."""

    least: int
    most: int
    # Going on with other nodes is no restart that the user must have allowed: there are spares, or a choice of sizes.
    changes: bool = False
    returns: bool = True  # a lost node may come back
    waits: bool = False  # a node that joins later waits for the next restart; otherwise all ranks start again with it

    @property
    def elastic(self) -> bool:
        """Whether the job may have more or fewer nodes."""
        return self.least != self.most


def seated(
    membership: Membership, before: Sequence[Seat], here: Mapping[int, int], doubted: Collection[int] = ()
) -> tuple[Seat, ...]:
    """The seats of the next attempt; none if too few nodes are here.

    `before`: those of the last one. `here`: how many ranks each connected node takes, in the order of their arrival.
    A node that stays keeps its place. Into the place of one that is gone comes a node that had none; a job of a fixed
    size keeps the number of ranks there, and so the numbers of all others. Where nobody comes, the others move up.
    Nodes that are `doubted` come last: any other one that has no place gets theirs.
    """
    if len(here) < membership.least:
        return ()
    seated_before = {seat.node for seat in before}
    spares = sorted((node for node in here if node not in seated_before), key=lambda node: node in doubted)
    seats = []
    for seat in before:
        stays = seat.node in here and (membership.elastic or here[seat.node] >= seat.ranks)
        able = next((node for node in spares if membership.elastic or here[node] >= seat.ranks), None)
        if stays and (seat.node not in doubted or able is None or able in doubted):
            able = seat.node
        elif able is not None:
            spares.remove(able)
            spares += [seat.node] if stays else []
        if able is not None:
            seats.append(Seat(able, here[able] if membership.elastic else seat.ranks))
    for node in spares[: membership.most - len(seats)] if membership.elastic or not before else ():
        seats.append(Seat(node, here[node]))
    return tuple(seats) if len(seats) >= membership.least else ()
