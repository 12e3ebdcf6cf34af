"""What MPI programs expect in a rank's environment, and how MPICH is told which ranks share a node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Seat(NamedTuple):
    """A rank's place in its world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    host: str  # the node's name where it is another machine; "" for this one


def environ(seat: Seat) -> dict[str, str]:
    """Hydra's variables, by which MPICH starts; and Open MPI's, which many scripts read. PMI_FD is the agent's to set."""
    found = {
        "PMI_RANK": str(seat.rank),
        "PMI_SIZE": str(seat.size),
        "MPI_LOCALRANKID": str(seat.local_rank),
        "MPI_LOCALNRANKS": str(seat.local_size),
        "OMPI_COMM_WORLD_SIZE": str(seat.size),
        "OMPI_COMM_WORLD_RANK": str(seat.rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(seat.local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(seat.local_rank),
        "OMPI_COMM_WORLD_NODE_RANK": str(seat.local_rank),  # among those of its node, and of all jobs of one mpirun
        "OMPI_UNIVERSE_SIZE": str(seat.size),
    }
    return found | ({"PMI_HOSTNAME": seat.host} if seat.host else {})


def process_mapping(counts: Sequence[int]) -> str:
    """PMI_process_mapping for so many ranks on each node: (vector,(first node,nodes,ranks on each),…)."""
    blocks: list[list[int]] = []
    for node, count in enumerate(counts):
        if blocks and blocks[-1][2] == count:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, count])
    return f"(vector,{','.join(f'({first},{nodes},{each})' for first, nodes, each in blocks)})"
