"""Run every example as its first lines say, and check its output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import launchpad as package
from tests.support.command import DEADLINE, Launchpad
from tests.support.needs import needs_mpi, needs_torch

EXAMPLES = Path(__file__).parents[3] / "examples"

HYDRA = Path(sys.prefix, "bin", "mpiexec")
OPEN_MPI = shutil.which("mpirun.openmpi")

needs_digits = pytest.mark.skipif(not find_spec("sklearn"), reason="scikit-learn is not installed")

pytestmark = pytest.mark.usefixtures("from_image")

FRONTENDS = [pytest.param("gloo", marks=needs_torch), pytest.param("mpi", marks=[needs_torch, needs_mpi])]


def lines(launchpad: Launchpad, size: int, backend: str, name: str, *words: str) -> list[str]:
    """The lines that an example prints on `size` ranks, sorted, without rank prefixes; stderr must be empty."""
    words = words or ((backend,) if backend == "mpi" else ())
    # On a busy machine a rank is late, and the others are told so.
    done = launchpad.run("run", "--no-advice", "--nproc", size, "--backend", backend, EXAMPLES / name, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(line.partition("] ")[2] for line in done.stdout.splitlines())


def test_every_example_is_tested_here() -> None:
    tests = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests] == []


def test_hello(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 4, EXAMPLES / "hello.py")
    assert (done.returncode, done.stderr) == (0, "")
    found = sorted(done.stdout.splitlines())
    assert [line.partition(", process")[0] for line in found] == [f"[{r}] hello from rank {r} of 4" for r in range(4)]


@needs_torch
def test_all_reduce(launchpad: Launchpad) -> None:
    found = lines(launchpad, 4, "gloo", "all_reduce.py")
    assert found == [f"rank {r} of 4: the sum of all ranks is [6.0, 6.0, 6.0]" for r in range(4)]


@needs_torch
def test_all_reduce_many_times_at_once(launchpad: Launchpad) -> None:
    """Jobs that start at the same time get different ports: none fails with "address already in use"."""
    jobs = [launchpad.start("run", "--nproc", 2, EXAMPLES / "all_reduce.py") for _ in range(4)]
    for job in jobs:
        out, err = job.communicate(timeout=180)
        assert job.returncode == 0, err
        assert out.count(b"the sum of all ranks is [1.0, 1.0, 1.0]") == 2


@pytest.mark.parametrize("backend", FRONTENDS)
def test_messages(backend: str, launchpad: Launchpad) -> None:
    assert lines(launchpad, 4, backend, "p2p_blocking.py") == [
        *("rank 0 has 0", "rank 0 has the squares [1, 4, 9]", "rank 1 has 1", "rank 2 has 3", "rank 3 has 6")
    ]
    assert lines(launchpad, 4, backend, "p2p_immediate.py") == sorted(
        [f"rank {r} received {(r - 1) % 4} from its left neighbour" for r in range(4)]
        + ["rank 1 received 1 with tag 1 and 2 with tag 2"]
    )


def on_each_rank(name: str, values: list[object]) -> list[str]:
    return [f"{name}: rank {rank} has {value}" for rank, value in enumerate(values)]


@pytest.mark.parametrize("backend", FRONTENDS)
def test_collectives(backend: str, launchpad: Launchpad) -> None:
    assert lines(launchpad, 3, backend, "collectives.py") == sorted(
        [
            *on_each_rank("broadcast", [[7, 8]] * 3),
            *on_each_rank("scatter", [[0], [10], [20]]),
            *on_each_rank("gather", [[1, 11, 21]]),
            *on_each_rank("all_gather", [[2, 12, 22]] * 3),
            *on_each_rank("reduce", [[3, 3]]),
            *on_each_rank("all_reduce", [[1, 2]] * 3),
        ]
    )


@needs_mpi
def test_collectives_by_mpi4py(launchpad: Launchpad) -> None:
    assert lines(launchpad, 3, "mpi", "collectives_mpi4py.py") == sorted(
        [
            *on_each_rank("bcast", [{"lr": 0.1}] * 3),
            *on_each_rank("scatter", ["for 0", "for 1", "for 2"]),
            *on_each_rank("gather", [[0, 1, 4]]),
            *on_each_rank("allgather", [["a", "b", "c"]] * 3),
            *on_each_rank("reduce", [3]),
            *on_each_rank("allreduce", [2] * 3),
            *on_each_rank("Bcast", [[0.0, 1.0]] * 3),
            *on_each_rank("Scatter", [[0.0], [10.0], [20.0]]),
            *on_each_rank("Gather", [[1.0, 11.0, 21.0]]),
            *on_each_rank("Allgather", [[2.0, 12.0, 22.0]] * 3),
            *on_each_rank("Reduce", [[3.0, 3.0]]),
            *on_each_rank("Allreduce", [[1.0, 2.0]] * 3),
        ]
    )


@pytest.mark.parametrize("backend", FRONTENDS)
def test_groups(backend: str, launchpad: Launchpad) -> None:
    assert lines(launchpad, 3, backend, "groups.py") == sorted(
        [
            "rank 0, number 0 in group [0, 2]: the group's sum is 2",
            "rank 1, number 0 in group [1]: the group's sum is 1",
            "rank 2, number 1 in group [0, 2]: the group's sum is 2",
            *(f"rank {rank}: the world's sum is 3" for rank in range(3)),
        ]
    )


@pytest.mark.parametrize("backend", FRONTENDS)
def test_ring_all_reduce(backend: str, launchpad: Launchpad) -> None:
    names = "chunked_ring_all_reduce my_ring recursive_doubling_all_reduce ring_all_reduce"
    found = lines(launchpad, 3, backend, "ring_all_reduce.py")
    assert found == [f"{name}: same sum as all_reduce over 3 ranks" for name in names.split()]


@needs_digits
@pytest.mark.parametrize("backend", FRONTENDS)
def test_sgd_matches_a_single_process(backend: str, launchpad: Launchpad) -> None:
    """No batch divides evenly by three ranks."""
    assert lines(launchpad, 3, backend, "sgd.py") == [
        "test accuracy 96.7% with 3 ranks",
        "the parameters match those of a single process, up to rounding",
    ]


@needs_digits
@pytest.mark.parametrize("backend", FRONTENDS)
def test_ddp(backend: str, launchpad: Launchpad) -> None:
    (found,) = lines(launchpad, 2, backend, "ddp.py")
    match = re.fullmatch(r"test accuracy (\d\d\.\d)% on 359 digits with 2 ranks", found)
    assert match, found
    assert float(match[1]) > 92


@pytest.mark.parametrize("backend", FRONTENDS)
def test_the_rank_comes_from_the_frontends_variables(backend: str, launchpad: Launchpad) -> None:
    name, frontend = {"gloo": ("RANK", "torch"), "mpi": ("PMI_RANK", "mpi")}[backend]
    assert lines(launchpad, 2, backend, "frontend.py", "--frontend", frontend) == [
        f"rank {rank} of 2 by {name}, over {backend}: the sum of all ranks is 1" for rank in range(2)
    ]


@needs_torch
@needs_mpi
@pytest.mark.parametrize("mpi", ["mpich", *(["open mpi"] if OPEN_MPI else [])])
def test_the_rank_comes_from_mpiruns_variables(mpi: str, launchpad: Launchpad) -> None:
    by_mpi = {
        "mpich": ("PMI_RANK", [HYDRA], {}),
        "open mpi": (
            "OMPI_COMM_WORLD_RANK",
            [OPEN_MPI, "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"],
            {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"},
        ),
    }
    name, mpirun, environ = by_mpi[mpi]
    done = subprocess.run(
        [*map(str, mpirun), "-n", "2", sys.executable, str(EXAMPLES / "frontend.py"), "--frontend", "mpi"],
        env=launchpad.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])} | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    # Open MPI interleaves lines that are printed at the same time.
    for rank in range(2):
        assert f"rank {rank} of 2 by {name}, over mpi: the sum of all ranks is 1" in done.stdout


@needs_torch
def test_a_missing_launcher_is_named(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 1, EXAMPLES / "frontend.py", "--frontend", "mpi")
    assert done.returncode == 2
    assert "no launcher has set PMI_RANK or OMPI_COMM_WORLD_RANK: start it as --help says" in done.stderr


@needs_torch
def test_a_parameter_server(launchpad: Launchpad) -> None:
    config = EXAMPLES / "roles" / "parameter_server.toml"
    shutil.copytree(EXAMPLES, launchpad.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    done = launchpad.run("run", "--no-advice", "--config", config, "--job", "ps")
    assert done.returncode == 0, done.stderr
    found = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert [line.partition(":")[0] for line in found] == ["worker 0", "worker 1", "worker 2"]
    # One that ends early may have met a gradient that another had computed from old weights.
    assert min(float(line.split()[4]) for line in found) < 0.1, found


@needs_torch
@pytest.mark.skipif(not find_spec("torchft"), reason="this framework is not installed: torchft")
def test_torchft(launchpad: Launchpad) -> None:
    """A replica group is killed, and the others go on."""
    shutil.copytree(EXAMPLES, launchpad.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    config = EXAMPLES.parent / "configs" / "torchft.toml"
    launchpad.environ["PATH"] = f"{sys.prefix}/bin:{launchpad.environ['PATH']}"
    kill = ("--inject", "kill:2@15s")
    done = launchpad.run("run", "--no-advice", "--config", config, "--job", "torchft", *kill)
    assert done.returncode == 0, done.stderr
    assert all(f"[train.{group}    0] step 20:" in done.stdout for group in range(3))
