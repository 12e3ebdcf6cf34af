"""What MPI programs expect in a rank's environment, and how MPICH is told which ranks share a node. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Seat(NamedTuple):
    """A rank's place in its world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # the node's name where it is another machine; "" for this one


def environ(seat: Seat) -> dict[str, str]:
    """Hydra's variables, by which MPICH starts; and Open MPI's, which scripts read. PMI_FD is the agent's to set."""
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


class Spawned(NamedTuple):
    """One program of an MPI_Comm_spawn or MPI_Comm_spawn_multiple."""

    argv: list[str]
    nproc: int
    cwd: str  # "" for the job's
    python: bool  # a Python program, `argv` being as a rank's of the job's own
    keys: dict[str, str]  # what its world has from the start


def spawned_programs(lines: Sequence[str]) -> list[Spawned]:
    """Read `mcmd=spawn … endcmd`, so often as there are programs. Raises ValueError where it makes no sense."""
    programs = []
    said: dict[str, str] = {}
    for line in lines:
        if line == "endcmd":
            programs.append(_spawned(said))
        elif line == "mcmd=spawn":
            said = {}
        else:
            name, _, value = line.partition("=")
            said[name] = value
    if not programs:
        raise ValueError("a spawn of nothing")
    return programs


def _spawned(said: Mapping[str, str]) -> Spawned:
    count = int(said.get("nprocs", "1"))
    if count < 1 or not said.get("execname"):
        raise ValueError("a spawn of nothing")
    info = _pairs(said, "info", said.get("info_num", "0"))
    name = said["execname"]
    if "path" in info:
        name = f"{info['path']}/{name}"
    args = [said.get(f"arg{place}", "") for place in range(1, int(said.get("argcnt", "0")) + 1)]
    options = [arg for arg in args[:1] if arg == "-u"]
    rest = args[len(options) :]
    python = bool(re.fullmatch(r"python[0-9.]*", name.rpartition("/")[2])) and bool(rest)
    python = python and ((rest[0] == "-m" and len(rest) > 1) or not rest[0].startswith("-"))
    argv = [name, "-u", *rest] if python else [name, *args]
    return Spawned(argv, count, info.get("wdir", ""), python, _pairs(said, "preput", said.get("preput_num", "0")))


def _pairs(said: Mapping[str, str], what: str, count: str) -> dict[str, str]:
    return {said[f"{what}_key_{place}"]: said.get(f"{what}_val_{place}", "") for place in range(int(count))}
