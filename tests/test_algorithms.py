"""launchpad.collectives.algorithms: right for every world, dtype and shape, and no buffer is touched in flight."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .conftest import DEADLINE, Launchpad

pytest.importorskip("torch", reason="torch is not installed")

# Cases are of 5 algorithms in groups of 1 rank to all: each dtype and shape, a part of the pairs from 4 ranks on, and a
# part under watch. The two float8 are for the algorithms that copy only. MPI has fewer ranks: what an algorithm sends
# does not depend on the backend, and ranks of MPI that share a processor poll in turns.
WORLDS = [
    pytest.param("gloo", 8, 4058, id="gloo"),
    pytest.param(
        *("mpi", 5, 3412), id="mpi", marks=pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed")
    ),
]


def errors(size: int) -> list[str]:
    return [
        "ValueError: ring_all_reduce: tensors of one shape and dtype are needed, "
        "not (3,) torch.float32 and (2,) torch.float32",
        "ValueError: chunked_ring_all_reduce: dense tensors only, not torch.sparse_coo",
        f"ValueError: bruck_all_gather: 1 tensors in the list, for {size} ranks",
        f"ValueError: tree_broadcast: there is no rank {size} in the group, whose ranks are {list(range(size))}",
    ]


@pytest.mark.parametrize(("backend", "size", "cases"), WORLDS)
def test_every_group_dtype_and_shape_is_what_arithmetic_says(
    backend: str, size: int, cases: int, launchpad: Launchpad
) -> None:
    done = launchpad.run("run", "--nproc", size, "--backend", backend, "textbook.py", backend, timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(lines) == sorted([f"right {cases}", *errors(size)])


def test_a_world_of_one_sums_itself(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 1, "textbook.py", "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] right 852\n"
