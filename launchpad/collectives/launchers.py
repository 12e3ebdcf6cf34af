"""Finds this process's rank and world size in the variables that its launcher set. Pure.

launchpad and torchrun    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
Open MPI                  OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
MVAPICH                   MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
MPICH, Hydra, Intel MPI   PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
Slurm                     SLURM_PROCID SLURM_NTASKS SLURM_LOCALID, in a step that srun started

The first launcher found wins; the others must not contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from launchpad.errors import WorldError


class World(NamedTuple):
    """A rank's place in its world."""

    rank: int  # 0 … size - 1
    size: int
    local_rank: int | None  # among the ranks of this host; None if unknown
    local_size: int | None
    source: str  # who set it: "launchpad or torchrun", "Open MPI", … or ALONE
    master: tuple[str, int] | None  # rank 0's address and port, for the rendezvous; None if unknown

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

BY_MPI = frozenset(names.source for names in _MPI)  # the values of World.source for MPI launchers

_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")

# Below Linux's ephemeral ports. All ranks of a Slurm step derive the same one.
_SLURM_PORTS = range(15000, 32000)


def world_of(environ: Mapping[str, str]) -> World:
    """The world according to this environment; rank 0 of 1 if no launcher set anything.

    Raises WorldError if variables are half set, make no sense, or contradict each other.
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
        # One torchrun or launchpad per node, started by mpirun or srun.
        if mpi and (environ.get("GROUP_RANK"), environ.get("GROUP_WORLD_SIZE")) != (str(mpi[0].rank), str(mpi[0].size)):
            _agree(place, mpi[0])
    elif theirs:
        # A wrapper script often sets WORLD_SIZE for torch and leaves the ranks to mpirun or srun.
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
    """The world that a program passes itself, as in init_process_group(rank=, world_size=); -1 if it doesn't.

    The launcher fills in the rest. Raises WorldError if that is not enough.
    """
    try:
        launched = world_of(environ)
    except WorldError:
        # torch has always accepted the rank from a variable and the size from the caller, or the reverse.
        rank = _number(_TORCH.rank, environ) if rank < 0 <= size and environ.get(_TORCH.rank) else rank
        size = _number(_TORCH.size, environ) if size < 0 <= rank and environ.get(_TORCH.size) else size
        if rank < 0 or size < 0:
            raise
        launched = None
    if launched and rank in (-1, launched.rank) and size in (-1, launched.size):
        return launched
    if rank < 0 or size < 0:
        assert launched is not None
        passed, missing = (f"world_size={size}", "rank") if rank < 0 else (f"rank={rank}", "world_size")
        found = f"{launched.source} says rank {launched.rank} of {launched.size}"
        if launched.source == ALONE:
            found = f"no launcher set the {missing}"
        raise WorldError(f"{passed} was passed, but {found}: pass both rank and world_size, or neither")
    if not rank < size:
        raise WorldError(f"rank={rank} is out of range for world_size={size}: ranks are 0 to {size - 1}")
    # The launcher's local ranks belong to another world.
    place = World(rank, size, None, None, CALLER, None)
    return place._replace(master=_master(place, None, environ))


def _read(names: _Names, environ: Mapping[str, str]) -> World | None:
    """The world according to one launcher's variables; None if they aren't set."""
    present = [name for name in (names.rank, names.size) if name in environ]
    if not present:
        return None
    if len(present) == 1:
        (missing,) = {names.rank, names.size} - set(present)
        raise WorldError(f"{present[0]} is set but {missing} is not ({names.source}): set both or neither")
    rank, size = _number(names.rank, environ), _number(names.size, environ)
    if not 0 <= rank < size:
        raise WorldError(f"{names.rank}={rank} is out of range for {names.size}={size}: ranks are 0 to {size - 1}")
    local_rank = _number(names.local_rank, environ) if names.local_rank in environ else None
    local_size = _number(names.local_size, environ) if names.local_size in environ else None
    if local_rank is not None and local_size is not None and not 0 <= local_rank < local_size <= size:
        raise WorldError(
            f"{names.local_rank}={local_rank} and {names.local_size}={local_size} don't fit a world of {size}: the "
            "local rank must be less than the local size, and the local size at most the world size"
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
            f"{one.source}'s variables say rank {one.rank} of {one.size}, {other.source}'s say rank {other.rank} of "
            f"{other.size}: start the program with one launcher, or unset the other's variables"
        )


def _slurm(environ: Mapping[str, str]) -> World | None:
    """The world according to srun. A batch script has SLURM_PROCID and SLURM_NTASKS too, but isn't a step."""
    if "SLURM_PROCID" not in environ or ("SLURM_JOB_ID" in environ and not _first(environ, *_STEP)):
        return None
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in environ), None)
    if size is None:
        raise WorldError("SLURM_PROCID is set but SLURM_NTASKS is not (Slurm): start the program with srun")
    place = _read(_Names("Slurm", "SLURM_PROCID", size, "SLURM_LOCALID", ""), environ)
    if place and _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == "1":
        return place._replace(local_size=place.size)
    return place


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name].strip() for name in names if name in environ), "")


def _master(place: World, slurm: World | None, environ: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = _first(environ, "MASTER_ADDR"), _first(environ, "MASTER_PORT")
    if port and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise WorldError(f"MASTER_PORT={port} is not a port: set a number below 65536")
    if host and port:
        return host, int(port)
    if slurm and slurm[:2] == place[:2]:
        step = f"{_first(environ, 'SLURM_JOB_ID') or 0}.{_first(environ, *_STEP) or 0}"
        host = host or _slurm_host(slurm, environ)
        return (host, int(port) if port else _slurm_port(step)) if host else None
    if place.size > 1 and (host or port):
        present, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise WorldError(f"{present} is set but {missing} is not: set both, to rank 0's address and a free port there")
    return None


def _slurm_host(place: World, environ: Mapping[str, str]) -> str:
    """The host of task 0: the step's first node. The node where srun was typed may not be in it, so it comes last."""
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
    """The first host of a Slurm node list, `a[09-11]b[1,2],c` → `a09b1`; "" if the list is empty or malformed."""
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
