"""Which rank of how many this process is: read from the variables that its launcher set. Pure.

launchpad and torchrun    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
Open MPI                  OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
MVAPICH                   MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
MPICH, Hydra, Intel MPI   PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
Slurm                     SLURM_PROCID SLURM_NTASKS SLURM_LOCALID, in a step that srun started

The first of these that is there counts; the others have to agree, as far as they can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import WorldError


class World(NamedTuple):
    """A rank's place."""

    rank: int  # 0 … size - 1
    size: int
    local_rank: int | None  # among the ranks of this host; None: not told
    local_size: int | None
    source: str  # who told: "launchpad or torchrun", "Open MPI", … or ALONE
    master: tuple[str, int] | None  # where the ranks meet: rank 0's address and port; None: not told

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.size == 1 or self.local_size == self.size


ALONE = "no launcher"
CALLER = "the caller"


class _Names(NamedTuple):
    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCH = _Names("launchpad or torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = tuple(
    _Names(source, *names.split())
    for source, names in (
        (
            "Open MPI",
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("MVAPICH", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
        ("MPICH", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
    )
)

BY_MPI = frozenset(names.source for names in _MPI)  # World.source, where an MPI launcher told

_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")

# Of the ports that Linux does not hand out by itself; the ranks of a Slurm step all come to the same one.
_SLURM_PORTS = range(15000, 32000)


def world_of(environ: Mapping[str, str]) -> World:
    """The place of the process that has this environment; rank 0 of 1 where no launcher told anything.

    Raises WorldError where variables are half set, make no sense, or contradict each other.
    """
    environ = {name: value for name, value in environ.items() if value.strip()}
    mpi = [place for names in _MPI if (place := _read(names, environ))]
    slurm = _slurm(environ)
    for one in mpi[1:]:
        _agree(mpi[0], one)
    theirs = mpi[0] if mpi else slurm
    if _TORCH.rank in environ and _TORCH.size in environ:
        place = _read(_TORCH, environ)
        assert place is not None
        # torchrun, or launchpad, started once per node by mpirun, or by srun.
        if mpi and (environ.get("GROUP_RANK"), environ.get("GROUP_WORLD_SIZE")) != (str(mpi[0].rank), str(mpi[0].size)):
            _agree(place, mpi[0])
    elif theirs:
        # A script around the program often sets WORLD_SIZE for torch and leaves the ranks to mpirun or srun.
        for name, value in ((_TORCH.rank, theirs.rank), (_TORCH.size, theirs.size)):
            if name in environ and _number(name, environ) != value:
                raise WorldError(
                    f"{name}={environ[name]}, but {theirs.source} says rank {theirs.rank} of {theirs.size}: unset it"
                )
        place = theirs
    elif _TORCH.rank in environ or environ.get(_TORCH.size, "1").strip() != "1":
        _read(_TORCH, environ)  # raises
        raise AssertionError("unreachable")
    else:
        place = World(0, 1, 0, 1, ALONE, None)
    return place._replace(master=_master(place, slurm, environ))


def given(rank: int, size: int, environ: Mapping[str, str]) -> World:
    """The place that a program itself names, as in init_process_group(rank=, world_size=); -1: it doesn't.

    What it leaves out the launcher tells. Raises WorldError where that is not enough.
    """
    try:
        told = world_of(environ)
    except WorldError:
        # One of the two by a variable and the other given, as torch has always taken them.
        rank = _number(_TORCH.rank, environ) if rank < 0 <= size and environ.get(_TORCH.rank) else rank
        size = _number(_TORCH.size, environ) if size < 0 <= rank and environ.get(_TORCH.size) else size
        if rank < 0 or size < 0:
            raise
        told = None
    if told and rank in (-1, told.rank) and size in (-1, told.size):
        return told
    if rank < 0 or size < 0:
        assert told is not None
        asked = f"world_size={size}" if rank < 0 else f"rank={rank}"
        raise WorldError(
            f"{asked} is given, but there is {told.source} that says rank {told.rank} of {told.size}: give both rank "
            "and world_size, or neither"
        )
    if not rank < size:
        raise WorldError(f"rank={rank} is none of the ranks 0 to {size - 1} that world_size={size} makes")
    # The launcher's local ranks would be those of another world.
    place = World(rank, size, None, None, CALLER, None)
    return place._replace(master=_master(place, None, environ))


def _read(names: _Names, environ: Mapping[str, str]) -> World | None:
    """What one launcher says; None where it says nothing."""
    there = [name for name in (names.rank, names.size) if name in environ]
    if not there:
        return None
    if len(there) == 1:
        (missing,) = {names.rank, names.size} - set(there)
        raise WorldError(f"{there[0]} is set, and {missing} is not ({names.source}): set both, or neither")
    rank, size = _number(names.rank, environ), _number(names.size, environ)
    if not 0 <= rank < size:
        raise WorldError(f"{names.rank}={rank} is none of the ranks 0 to {size - 1} that {names.size}={size} makes")
    local_rank = _number(names.local_rank, environ) if names.local_rank in environ else None
    local_size = _number(names.local_size, environ) if names.local_size in environ else None
    if local_rank is not None and local_size is not None and not 0 <= local_rank < local_size <= size:
        raise WorldError(
            f"{names.local_rank}={local_rank} and {names.local_size}={local_size} can't be of a world of {size}: there "
            "have to be more ranks on the host than the local rank, and no more than in the world"
        )
    return World(rank, size, local_rank, local_size, names.source, None)


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise WorldError(f"{name}={text} is not a whole number")
    return int(text)


def _agree(one: World, other: World) -> None:
    if one[:2] != other[:2]:
        raise WorldError(
            f"{one.source}'s variables say rank {one.rank} of {one.size}, {other.source}'s rank {other.rank} of "
            f"{other.size}: start the program with one launcher, or unset the variables of the other"
        )


def _slurm(environ: Mapping[str, str]) -> World | None:
    """What srun says. A batch script, which is no step, has SLURM_PROCID and SLURM_NTASKS too, and runs once."""
    if "SLURM_PROCID" not in environ or ("SLURM_JOB_ID" in environ and not _first(environ, *_STEP)):
        return None
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in environ), None)
    if size is None:
        raise WorldError("SLURM_PROCID is set, and SLURM_NTASKS is not (Slurm): start the program with srun")
    place = _read(_Names("Slurm", "SLURM_PROCID", size, "SLURM_LOCALID", ""), environ)
    if place and _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == "1":
        return place._replace(local_size=place.size)
    return place


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name].strip() for name in names if name in environ), "")


def _master(place: World, slurm: World | None, environ: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = _first(environ, "MASTER_ADDR"), _first(environ, "MASTER_PORT")
    if port and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise WorldError(f"MASTER_PORT={port} is not a port: a number below 65536")
    if host and port:
        return host, int(port)
    if slurm and slurm[:2] == place[:2]:
        step = f"{_first(environ, 'SLURM_JOB_ID') or 0}.{_first(environ, *_STEP) or 0}"
        host = host or _slurm_host(slurm, environ)
        return (host, int(port) if port else _slurm_port(step)) if host else None
    if place.size > 1 and (host or port):
        there, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise WorldError(f"{there} is set, and {missing} is not: set both, to rank 0's address and a free port there")
    return None


def _slurm_host(place: World, environ: Mapping[str, str]) -> str:
    """Task 0 is on the first node of the step. The node that srun was typed on may be another, so it comes last."""
    if place.one_host:
        return "127.0.0.1"
    nodes = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return first_node(nodes) or _first(environ, "SLURM_LAUNCH_NODE_IPADDR")


def _slurm_port(step: str) -> int:
    job, _, number = step.partition(".")
    digits = int(job) if job.isdigit() else 0
    digits = digits * 31 + (int(number) if number.isdigit() else 0)
    return _SLURM_PORTS[digits % len(_SLURM_PORTS)]


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list, "" of an empty or a broken one: `a[09-11]b[1,2],c` → `a09b1`."""
    name, rest = "", nodes.strip()
    while rest and rest[0] != ",":
        if rest[0] != "[":
            name, rest = name + rest[0], rest[1:]
            continue
        inner, closed, rest = rest[1:].partition("]")
        number = inner.split(",")[0].split("-")[0]
        if not closed or not number.isdigit():
            return ""
        name += number
    return name
