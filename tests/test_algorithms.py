"""launchpad.collectives.algorithms: right for every world, dtype and shape, and no buffer is touched in flight."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .conftest import DEADLINE, Launchpad

pytest.importorskip("torch", reason="torch is not installed")

# Of 5 algorithms in groups of 1 to 8 ranks: each dtype and shape, a third of them from 4 on, and a third under watch.
# The two float8 are for the algorithms that copy only.
CASES = 4692
ERRORS = [
    "ValueError: ring_all_reduce: tensors of one shape and dtype are needed, "
    "not (3,) torch.float32 and (2,) torch.float32",
    "ValueError: chunked_ring_all_reduce: dense tensors only, not torch.sparse_coo",
    "ValueError: bruck_all_gather: 1 tensors in the list, for 8 ranks",
    "ValueError: tree_broadcast: there is no rank 8 in the group, whose ranks are [0, 1, 2, 3, 4, 5, 6, 7]",
]
MPI = pytest.param("mpi", marks=pytest.mark.skipif(not find_spec("mpi4py"), reason="mpi4py is not installed"))


@pytest.mark.parametrize("backend", ["gloo", MPI])
def test_every_group_dtype_and_shape_is_what_arithmetic_says(backend: str, launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 8, "--backend", backend, "textbook.py", backend, timeout=5 * DEADLINE)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(lines) == sorted([f"right {CASES}", *ERRORS])


def test_a_world_of_one_sums_itself(launchpad: Launchpad) -> None:
    done = launchpad.run("run", "--nproc", 1, "textbook.py", "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] right 852\n"
