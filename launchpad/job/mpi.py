"""The environment that MPI programs expect, PMI's process mapping, and spawn requests. Pure."""

import re
from collections.abc import Mapping, Sequence

from launchpad.named import NamedTuple

# A line of PMI-1 with the value has at most 1024 bytes in MPICH.
_LONGEST_MAPPING = 960

# How much the command lines and variables of all ranks of a spawn may be: they go to the node in one frame, escaped.
LARGEST_SPAWN = 8 << 20

# The fields of a request to spawn. MPICH does not escape newlines in their values.
_FIELD = re.compile(
    r"(nprocs|execname|totspawns|spawnssofar|argcnt|arg\d+|(info|preput)_num|(info|preput)_(key|val)_\d+)="
)


class MpiSeat(NamedTuple):
    """A rank's place in its world."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # the node's name if it is another machine; "" for this one


def environ(seat: MpiSeat) -> dict[str, str]:
    """Hydra's variables, which MPICH starts from, and Open MPI's, which scripts read. The agent sets PMI_FD."""
    found = {
        "PMI_RANK": str(seat.rank),
        "PMI_SIZE": str(seat.size),
        "MPI_LOCALRANKID": str(seat.local_rank),
        "MPI_LOCALNRANKS": str(seat.local_size),
        "OMPI_COMM_WORLD_SIZE": str(seat.size),
        "OMPI_COMM_WORLD_RANK": str(seat.rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(seat.local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(seat.local_rank),
        "OMPI_COMM_WORLD_NODE_RANK": str(seat.local_rank),  # Open MPI counts the ranks of all jobs of one mpirun
        "OMPI_UNIVERSE_SIZE": str(seat.size),
    }
    return found | ({"PMI_HOSTNAME": seat.host} if seat.host else {})


def process_mapping(counts: Sequence[int]) -> str:
    """PMI_process_mapping for these numbers of ranks per node: (vector,(first node,nodes,ranks on each),…).

    "" if it would be too long for a value of PMI-1: MPICH then compares the names of hosts.
    """
    blocks: list[list[int]] = []
    for node, count in enumerate(counts):
        if blocks and blocks[-1][2] == count:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, count])
    found = f"(vector,{','.join(f'({first},{nodes},{each})' for first, nodes, each in blocks)})"
    return found if len(found) < _LONGEST_MAPPING else ""


class Spawned(NamedTuple):
    """One program of an MPI_Comm_spawn or MPI_Comm_spawn_multiple."""

    argv: list[str]
    nproc: int
    cwd: str  # "" for the job's
    python: bool  # a Python program; `argv` then looks like that of the job's own ranks
    keys: dict[str, str]  # the initial keys of its world
    environ: dict[str, str]  # for its ranks


def spawned_programs(lines: Sequence[str]) -> list[Spawned]:
    """Parse `mcmd=spawn … endcmd`, once per program. Raises ValueError if the request is malformed."""
    programs = []
    fields: dict[str, str] = {}
    name = ""
    for line in lines:
        if line == "endcmd":
            programs.append(_spawned(fields))
        elif line == "mcmd=spawn":
            fields, name = {}, ""
        elif _FIELD.match(line) or not name:
            name, _, fields[name] = line.partition("=")
        else:
            fields[name] += f"\n{line}"
    if not programs:
        raise ValueError("a spawn of nothing")
    return programs


def _spawned(fields: Mapping[str, str]) -> Spawned:
    count = int(fields.get("nprocs", "1"))
    if count < 1 or not fields.get("execname"):
        raise ValueError("a spawn of nothing")
    info = _pairs(fields, "info", fields.get("info_num", "0"))
    name = fields["execname"]
    if "path" in info:
        name = f"{info['path']}/{name}"
    count_of_args = int(fields.get("argcnt", "0"))
    if count_of_args > len(fields):
        raise ValueError("a spawn with fewer arguments than it says")
    args = [fields.get(f"arg{index}", "") for index in range(1, count_of_args + 1)]
    argv, python = python_argv([name, *args])
    keys = _pairs(fields, "preput", fields.get("preput_num", "0"))
    return Spawned(argv, count, info.get("wdir", ""), python, keys, {})


def check_spawn(programs: Sequence[Spawned], environ: Mapping[str, str], most: int) -> None:
    """Raise ValueError if so many ranks can't be started, or not so. `environ`: what they get besides their own."""
    size = sum(program.nproc for program in programs)
    if size > most:
        raise ValueError(f"no room for {size} more ranks: at most {most}")
    total = 0
    for program in programs:
        texts = [*program.argv, program.cwd, *program.environ, *program.environ.values()]
        if any("\0" in text for text in texts) or any(not name or "=" in name for name in program.environ):
            raise ValueError("a spawn with a NUL byte, or with a variable without a name")
        total += program.nproc * sum(map(len, (*texts, *environ, *environ.values())))
    if total > LARGEST_SPAWN:
        raise ValueError(f"no room for {size} more ranks: their arguments and variables take {total >> 20} MiB")


def python_argv(argv: Sequence[str]) -> tuple[list[str], bool]:
    """A command line, and whether it is a Python program's, which then looks like that of the job's own ranks."""
    name, *args = argv
    rest = args[1:] if args[:1] == ["-u"] else args
    python = bool(re.fullmatch(r"python[0-9.]*", name.rpartition("/")[2])) and bool(rest)
    python = python and ((rest[0] == "-m" and len(rest) > 1) or not rest[0].startswith("-"))
    return ([name, "-u", *rest] if python else [*argv]), python


def _pairs(fields: Mapping[str, str], prefix: str, count: str) -> dict[str, str]:
    return {fields[f"{prefix}_key_{at}"]: fields.get(f"{prefix}_val_{at}", "") for at in range(int(count))}
