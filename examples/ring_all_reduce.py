"""An all-reduce of our own, out of messages to the right, against the built-in one.

Run it: launchpad run --nproc 4 examples/ring_all_reduce.py
Over MPI: launchpad run --backend mpi --nproc 4 examples/ring_all_reduce.py mpi
"""

import os
import sys

import torch

from launchpad import collectives as dist
from launchpad.collectives.algorithms import chunked_ring_all_reduce, recursive_doubling_all_reduce, ring_all_reduce


def my_ring(send: torch.Tensor, recv: torch.Tensor) -> None:
    """Fill `recv` with the sum of all ranks' `send`: what came from the left goes on to the right.

    `algorithms.ring_all_reduce` is this for groups, strided tensors and tensors without a dimension too.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    recv.copy_(send)
    leaving, coming = send.clone(), torch.empty_like(send)
    for _ in range(size - 1):
        request = dist.isend(leaving, right)
        dist.recv(coming, left)
        recv += coming
        request.wait()  # not before this may `leaving` be written to: it is the next one's `coming`
        leaving, coming = coming, leaving


def run(rank: int, size: int) -> None:
    mine = torch.arange(100_000.0) % 100 + rank
    wanted = mine.clone()
    dist.all_reduce(wanted)
    results = {}
    for function in (my_ring, ring_all_reduce):
        results[function.__name__] = torch.empty_like(mine)
        function(mine, results[function.__name__])
    for function in (chunked_ring_all_reduce, recursive_doubling_all_reduce):
        results[function.__name__] = mine.clone()
        function(results[function.__name__])
    for name, result in results.items():
        assert torch.equal(result, wanted), name
        if rank == 0:
            print(f"{name}: over {size} ranks the same sum as all_reduce")


if __name__ == "__main__":
    world = dist.world_of(os.environ)
    dist.init_process(world.rank, world.size, run, backend=sys.argv[1] if sys.argv[1:] else "gloo")
