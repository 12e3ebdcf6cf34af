"""Launchers' variables: which rank they make of a process, and the errors if they make no sense."""

from __future__ import annotations

import pytest

from launchpad.collectives.frontends import Devices, default, device_index, names, why_not
from launchpad.collectives.launchers import ALONE, CALLER, World, first_node, given, world_of
from launchpad.errors import FrontendError, WorldError


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=29500"
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_UNIVERSE_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=0"
)
HYDRA = "PMI_RANK=1 PMI_SIZE=3 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3 PMI_FD=9"
MVAPICH = (
    "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2 "
    "PMI_RANK=3 PMI_SIZE=4"
)
SRUN = (
    "SLURM_JOB_ID=16003 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NNODES=2 "
    "SLURM_JOB_NODELIST=gpu[07-08,10],x SLURM_LAUNCH_NODE_IPADDR=10.0.0.1"
)

WORLDS = [
    ("", World(0, 1, 0, 1, ALONE, None)),
    ("WORLD_SIZE=1", World(0, 1, 0, 1, ALONE, None)),
    ("RANK= WORLD_SIZE= PMI_RANK=", World(0, 1, 0, 1, ALONE, None)),
    (TORCHRUN, World(5, 8, 1, 4, "launchpad or torchrun", ("a", 29500))),
    ("RANK=1 WORLD_SIZE=2", World(1, 2, None, None, "launchpad or torchrun", None)),
    (OPEN_MPI, World(2, 4, 0, 2, "Open MPI", None)),
    (OPEN_MPI + " MASTER_ADDR=fe80::1 MASTER_PORT=1", World(2, 4, 0, 2, "Open MPI", ("fe80::1", 1))),
    (OPEN_MPI + " WORLD_SIZE=4 RANK=2", World(2, 4, None, None, "launchpad or torchrun", None)),
    (OPEN_MPI + " WORLD_SIZE=4", World(2, 4, 0, 2, "Open MPI", None)),
    (HYDRA, World(1, 3, 1, 3, "MPICH", None)),
    ("PMI_RANK=1 PMI_SIZE=3", World(1, 3, None, None, "MPICH", None)),
    (MVAPICH, World(3, 4, 1, 2, "MVAPICH", None)),
    # Slurm: 15000 + (16003 * 31 + 0) % 17000
    (SRUN, World(3, 4, 1, None, "Slurm", ("gpu07", 18093))),
    (SRUN + " MASTER_PORT=5", World(3, 4, 1, None, "Slurm", ("gpu07", 5))),
    (SRUN + " MASTER_ADDR=h", World(3, 4, 1, None, "Slurm", ("h", 18093))),
    (SRUN + " SLURM_JOB_NODELIST=", World(3, 4, 1, None, "Slurm", ("10.0.0.1", 18093))),
    (SRUN + " SLURM_NNODES=1", World(3, 4, 1, 4, "Slurm", ("127.0.0.1", 18093))),
    (SRUN + " SLURM_STEP_NUM_TASKS=5", World(3, 5, 1, None, "Slurm", ("gpu07", 18093))),
    ("SLURM_PROCID=0 SLURM_NTASKS=2", World(0, 2, None, None, "Slurm", None)),
    # A batch script, and a shell started by salloc: not an srun step.
    ("SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", World(0, 1, 0, 1, ALONE, None)),
    ("SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_NNODES=2", World(0, 1, 0, 1, ALONE, None)),
    # One launchpad or torchrun per node, started by srun or mpirun.
    (SRUN + " " + TORCHRUN, World(5, 8, 1, 4, "launchpad or torchrun", ("a", 29500))),
    (
        TORCHRUN + " OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2",
        World(5, 8, 1, 4, "launchpad or torchrun", ("a", 29500)),
    ),
    # mpirun in a batch script
    (OPEN_MPI + " SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NTASKS=4", World(2, 4, 0, 2, "Open MPI", None)),
    ("PMI_RANK=3 PMI_SIZE=4 " + SRUN, World(3, 4, None, None, "MPICH", ("gpu07", 18093))),
]


@pytest.mark.parametrize(("environ", "world"), WORLDS, ids=[text[:60] or "nothing" for text, _ in WORLDS])
def test_each_launchers_variables_are_understood(environ: str, world: World) -> None:
    assert world_of(variables(environ)) == world


ERRORS = [
    ("RANK=1", "RANK is set but WORLD_SIZE is not"),
    ("WORLD_SIZE=4", "WORLD_SIZE is set but RANK is not"),
    ("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not"),
    ("PMI_SIZE=2", "PMI_RANK is not"),
    ("RANK=2 WORLD_SIZE=2", "RANK=2 is out of range for WORLD_SIZE=2: ranks are 0 to 1"),
    ("RANK=-1 WORLD_SIZE=2", "RANK=-1 is out of range"),
    ("RANK=a WORLD_SIZE=2", "RANK=a is not a whole number"),
    ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2", "LOCAL_RANK=3"),
    ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3"),
    (TORCHRUN + " " + OPEN_MPI, "say rank 5 of 8, Open MPI's say rank 2 of 4: start the program with one launcher"),
    (OPEN_MPI + " PMI_RANK=0 PMI_SIZE=1", "Open MPI's variables say rank 2 of 4, MPICH's say rank 0 of 1"),
    (OPEN_MPI + " WORLD_SIZE=8", "WORLD_SIZE=8, but Open MPI says rank 2 of 4"),
    (SRUN + " RANK=0", "RANK=0, but Slurm says rank 3 of 4"),
    (SRUN + " SLURM_NTASKS=", "SLURM_NTASKS is not"),
    (OPEN_MPI + " MASTER_ADDR=a", "MASTER_ADDR is set but MASTER_PORT is not"),
    (OPEN_MPI + " MASTER_PORT=1", "MASTER_PORT is set but MASTER_ADDR is not"),
    (OPEN_MPI + " MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT=70000 is not a port"),
]


@pytest.mark.parametrize(("environ", "text"), ERRORS, ids=[text for _, text in ERRORS])
def test_half_set_and_contradictory_variables_are_named(environ: str, text: str) -> None:
    with pytest.raises(WorldError, match=text.replace("(", r"\(")) as caught:
        world_of(variables(environ))
    assert isinstance(caught.value, ValueError)


def test_what_the_program_passes_wins() -> None:
    torchrun = variables(TORCHRUN)
    assert given(-1, -1, torchrun) == given(5, -1, torchrun) == given(5, 8, torchrun) == world_of(torchrun)
    assert given(2, 3, torchrun) == World(2, 3, None, None, CALLER, ("a", 29500))
    assert given(1, 2, {}) == World(1, 2, None, None, CALLER, None)
    assert given(1, 2, variables("RANK=1")) == World(1, 2, None, None, CALLER, None)
    # One from a variable, the other from the program.
    assert given(1, -1, variables("WORLD_SIZE=4")) == World(1, 4, None, None, CALLER, None)
    assert given(-1, 4, variables("RANK=1")) == World(1, 4, None, None, CALLER, None)
    for rank, size, environ in (
        *((2, -1, torchrun), (-1, 3, torchrun), (-1, 2, {}), (2, 2, {}), (0, -1, {"RANK": "1"})),
        *((4, -1, {"WORLD_SIZE": "4"}), (-1, -1, {"RANK": "1"})),
    ):
        with pytest.raises(WorldError):
            given(rank, size, environ)
    with pytest.raises(WorldError, match="rank=2 was passed, but launchpad or torchrun says rank 5 of 8: pass both"):
        given(2, -1, torchrun)
    with pytest.raises(WorldError, match="world_size=2 was passed, but no launcher set the rank: pass both"):
        given(-1, 2, {})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        *(
            ("a", "a"),
            ("a,b", "a"),
            ("gpu[007-009,12]", "gpu007"),
            ("n[3,5]-ib,x", "n3-ib"),
            ("r[1-2]n[01-04]", "r1n01"),
        ),
        *(("", ""), ("n[", ""), ("n[a-b]", ""), ("a-b.c,d", "a-b.c")),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


GPUS = Devices(gloo=True, nccl=True, cuda=True, gpus=2, own_gpus=False, mpi4py=True, python="/p/python")


def place(rank: int, size: int, local_rank: int | None, local_size: int | None) -> World:
    return World(rank, size, local_rank, local_size, "x", None)


def test_an_unavailable_frontend_says_why_and_what_to_do() -> None:
    assert not any(why_not(name, GPUS) for name in ("gloo", "nccl", "mpi", "another"))
    assert "built for CPU only" in why_not("nccl", GPUS._replace(cuda=False, nccl=False))
    assert "without NCCL" in why_not("nccl", GPUS._replace(nccl=False))
    assert "CUDA_VISIBLE_DEVICES" in why_not("nccl", GPUS._replace(gpus=0))
    assert "/p/python has no mpi4py; pip install mpi4py mpich" in why_not("mpi", GPUS._replace(mpi4py=False))
    assert "built without gloo" in why_not("gloo", GPUS._replace(gloo=False))
    assert names("cpu:gloo,cuda:nccl") == {"gloo", "nccl"}
    assert names("gloo") == {"gloo"}


def test_nccl_is_the_default_if_each_rank_has_a_gpu() -> None:
    both = "cpu:gloo,cuda:nccl"
    assert default(place(0, 4, 0, 2), GPUS) == both
    assert default(place(0, 4, 0, 4), GPUS) == "gloo"
    assert default(place(0, 4, 0, 4), GPUS._replace(own_gpus=True, gpus=1)) == both
    assert default(place(0, 4, 0, 2), GPUS._replace(gpus=0)) == "gloo"
    assert default(place(0, 4, 0, 2), GPUS._replace(nccl=False)) == "gloo"


def test_the_local_rank_determines_the_gpu() -> None:
    assert device_index(place(5, 8, 1, 2), GPUS) == 1
    assert device_index(place(5, 8, None, None), GPUS) == 1
    assert device_index(place(5, 8, 3, 4), GPUS._replace(own_gpus=True, gpus=1)) == 0
    with pytest.raises(FrontendError, match=r"4 ranks on this host, but 2 GPUs.*local rank 2 has none"):
        device_index(place(2, 4, 2, 4), GPUS)
    with pytest.raises(FrontendError, match="but 1 GPU,"):
        device_index(place(2, 4, 2, None), GPUS._replace(gpus=1))
