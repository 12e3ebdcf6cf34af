"""A hand-written ring all-reduce and the library's algorithms, compared with the built-in all-reduce.

Run it: launchpad run --nproc 4 examples/ring_all_reduce.py
Over MPI: launchpad run --backend mpi --nproc 4 examples/ring_all_reduce.py mpi
"""

import os
import sys

import torch

from launchpad import collectives as dist
from launchpad.collectives.algorithms import chunked_ring_all_reduce, recursive_doubling_all_reduce, ring_all_reduce


def my_ring(send: torch.Tensor, recv: torch.Tensor) -> None:
    """Fill `recv` with the sum of all ranks' `send`: forward to the right what came from the left.

    `algorithms.ring_all_reduce` does the same, and also supports groups, strided tensors and 0-d tensors.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    recv.copy_(send)
    outgoing, incoming = send.clone(), torch.empty_like(send)
    for _ in range(size - 1):
        request = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        recv += incoming
        request.wait()  # `outgoing` becomes the next `incoming`, and must not be written to before the send is done
        outgoing, incoming = incoming, outgoing


def run(rank: int, size: int) -> None:
    mine = torch.arange(100_000.0) % 100 + rank
    expected = mine.clone()
    dist.all_reduce(expected)
    results = {}
    for function in (my_ring, ring_all_reduce):
        results[function.__name__] = torch.empty_like(mine)
        function(mine, results[function.__name__])
    for function in (chunked_ring_all_reduce, recursive_doubling_all_reduce):
        results[function.__name__] = mine.clone()
        function(results[function.__name__])
    for name, result in results.items():
        assert torch.equal(result, expected), name
        if rank == 0:
            print(f"{name}: same sum as all_reduce over {size} ranks")


if __name__ == "__main__":
    world = dist.world_of(os.environ)
    dist.init_process(world.rank, world.size, run, backend=sys.argv[1] if sys.argv[1:] else "gloo")
