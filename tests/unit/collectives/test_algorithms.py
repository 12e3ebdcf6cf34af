"""launchpad.collectives.algorithms: correct for every group, dtype and shape, and no buffer is touched in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.needs import needs_mpi, needs_torch

pytestmark = needs_torch

# MPI has fewer ranks: what an algorithm sends doesn't depend on the backend, and MPI ranks that share a core take
# turns polling.
GLOO, MPI = 6, 4

watched = pytest.mark.parametrize("watched", [False, True], ids=["plain", "watched"])


@pytest.fixture(scope="module")
def torch_is_imported() -> None:
    """Before the ranks are forked, rather than in each of them."""
    import torch.distributed  # noqa: F401


@pytest.fixture
def mpi_group() -> Iterator[None]:
    from launchpad import collectives as dist

    dist.init_process_group("mpi")
    yield
    dist.destroy_process_group()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Detects buffers that an algorithm touches in flight, from when it is called."""
    import torch.distributed as td

    from tests.programs.algorithm_cases import Watched

    return lambda: monkeypatch.setattr(td, "batch_isend_irecv", Watched(td.batch_isend_irecv))


def check_groups_of(count: int, rank: int, world_size: int, *, watched: bool) -> None:
    """Each dtype and each shape, but only some of the pairs where there are others, or while buffers are watched."""
    import torch

    from launchpad import collectives as dist
    from launchpad.collectives import algorithms
    from tests.programs import algorithm_cases

    ranks = tuple(range(world_size - count, world_size))  # so that ranks in the group differ from those in the world
    group = None if count == world_size else dist.new_group(list(ranks))
    if rank not in ranks:
        algorithms.chunked_ring_all_reduce(torch.ones(1), group)  # returns at once
        return
    parts = 12 if watched or count > 4 else 6 if count > 1 else 3
    algorithm_cases.check_all(ranks, group, rank, count + watched, parts)
    if not watched:
        algorithm_cases.check_same_bits(ranks, group)


@watched
@pytest.mark.parametrize("count", range(1, GLOO + 1))
@pytest.mark.ranks(GLOO)
@pytest.mark.usefixtures("process_group")
def test_groups_over_gloo(count: int, watched: bool, watch: Callable[[], None], rank: int, world_size: int) -> None:
    if watched:
        watch()
    check_groups_of(count, rank, world_size, watched=watched)


@needs_mpi
@watched
@pytest.mark.parametrize("count", range(1, MPI + 1))
@pytest.mark.parallel(MPI)
@pytest.mark.usefixtures("torch_is_imported", "mpi_group")
def test_groups_over_mpi(count: int, watched: bool, watch: Callable[[], None], rank: int, world_size: int) -> None:
    if watched:
        watch()
    check_groups_of(count, rank, world_size, watched=watched)


@pytest.mark.ranks(1, 4)
@pytest.mark.usefixtures("process_group")
def test_gradients_and_conjugates(world_size: int) -> None:
    import torch

    from launchpad.collectives import algorithms

    leaf = torch.ones(3, requires_grad=True)
    algorithms.chunked_ring_all_reduce(leaf)
    assert leaf.tolist() == [world_size] * 3
    conjugate = torch.full((3,), 1 + 2j).conj()
    algorithms.recursive_doubling_all_reduce(conjugate)
    assert conjugate.tolist() == [world_size * (1 - 2j)] * 3


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("process_group")
def test_bad_calls_say_what_is_wrong() -> None:
    import torch

    from launchpad.collectives import algorithms as tried

    one, other = torch.ones(3), torch.ones(2)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: tried.ring_all_reduce(one, other),
            r"ring_all_reduce: tensors must have the same shape and dtype, not \(3,\) torch.float32 and \(2,\) torch",
        ),
        (lambda: tried.chunked_ring_all_reduce(one.to_sparse()), "tensors must be dense, not torch.sparse_coo"),
        (lambda: tried.bruck_all_gather([one], one), "bruck_all_gather: tensor_list has 1 tensors for 3 ranks"),
        (lambda: tried.tree_broadcast(one, 3), r"rank 3 is not in the group, whose ranks are \[0, 1, 2\]"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("process_group")
def test_what_is_touched_in_flight_is_noticed(watch: Callable[[], None]) -> None:
    import torch

    from tests.programs.algorithm_cases import careless, hasty

    watch()
    with pytest.raises(AssertionError, match="a buffer was written to in flight"):
        careless(torch.ones(3), torch.zeros(3))
    received = torch.zeros(3)
    hasty(torch.ones(3), received)
    assert received.tolist() != [2.0] * 3
