"""launchpad.collectives.algorithms: correct for every world, dtype and shape, and no buffer is touched in flight."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .conftest import DEADLINE, Launchpad

pytest.importorskip("torch", reason="torch is not installed")

# The cases cover 5 algorithms in groups of 1 to all ranks: each dtype and shape, but only some of the pairs in groups
# of 4 or more, and some with `Watched` buffers. The float8 dtypes are only for the algorithms that copy. MPI has fewer
# ranks: what an algorithm sends doesn't depend on the backend, and MPI ranks that share a core take turns polling.
WORLDS = [
    pytest.param("gloo", 6, 3626, id="gloo"),
    pytest.param(
        *("mpi", 4, 2986), id="mpi", marks=pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed")
    ),
]


def errors(size: int) -> list[str]:
    return [
        "ValueError: ring_all_reduce: tensors must have the same shape and dtype, "
        "not (3,) torch.float32 and (2,) torch.float32",
        "ValueError: chunked_ring_all_reduce: tensors must be dense, not torch.sparse_coo",
        f"ValueError: bruck_all_gather: tensor_list has 1 tensors for {size} ranks",
        f"ValueError: tree_broadcast: rank {size} is not in the group, whose ranks are {list(range(size))}",
    ]


@pytest.mark.parametrize(("backend", "size", "cases"), WORLDS)
def test_every_group_dtype_and_shape_matches_plain_arithmetic(
    backend: str, size: int, cases: int, launchpad: Launchpad
) -> None:
    done = launchpad.run("run", "--nproc", size, "--backend", backend, "textbook.py", backend, timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(lines) == sorted([f"right {cases}", *errors(size)])


def test_a_world_of_one(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 1, "--env", "OMP_NUM_THREADS=1", "textbook.py", "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] right 852\n"
