"""Messages that are under way while a rank computes. Run it: launchpad run --nproc 4 examples/p2p_immediate.py

Over MPI: launchpad run --backend mpi --nproc 4 examples/p2p_immediate.py mpi
"""

import sys

import torch

from launchpad import collectives as dist

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size

# All ranks send to the right at once. With blocking sends, each might wait for a receiver that is sending itself.
leaving, coming = torch.full((1000,), float(rank)), torch.empty(1000)
requests = [dist.isend(leaving, dst=right), dist.irecv(coming, src=left)] if size > 1 else []

# Until its request has completed, `leaving` must not be written to, and `coming` not even be read. Meanwhile the rank
# computes something else, and asks now and then whether the messages have come.
product, matrix = torch.eye(100), torch.rand(100, 100) / 50
while not all(request.is_completed() for request in requests):
    product @= matrix
for request in requests:
    request.wait()  # has nothing left to wait for, and raises where a message could not be sent

if size > 1:
    assert torch.all(coming == left)
    print(f"rank {rank} has the {int(coming[0])} of its left neighbour")

# Several messages between the same two ranks are told apart by their tags, in whatever order they are taken.
if size > 1 and rank == 0:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    for request in [dist.isend(one, dst=1, tag=1), dist.isend(two, dst=1, tag=2)]:
        request.wait()
elif rank == 1:
    one, two = torch.empty(1), torch.empty(1)
    for request in [dist.irecv(two, src=0, tag=2), dist.irecv(one, src=0, tag=1)]:
        request.wait()
    print(f"rank 1 has {one.item():g} by tag 1 and {two.item():g} by tag 2")

dist.destroy_process_group()
