"""Nonblocking messages: compute while they are in flight. Run it: launchpad run --nproc 4 examples/p2p_immediate.py

Over MPI: launchpad run --backend mpi --nproc 4 examples/p2p_immediate.py mpi
"""

import sys

import torch

from launchpad import collectives as dist

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size

# All ranks send to the right at once. Blocking sends might deadlock, as every receiver is busy sending.
outgoing, incoming = torch.full((1000,), float(rank)), torch.empty(1000)
requests = [dist.isend(outgoing, dst=right), dist.irecv(incoming, src=left)] if size > 1 else []

# Until the requests complete, `outgoing` must not be written to and `incoming` must not even be read. In the meantime,
# the rank computes something else and polls the requests.
product, matrix = torch.eye(100), torch.rand(100, 100) / 50
while not all(request.is_completed() for request in requests):
    product @= matrix
for request in requests:
    request.wait()  # returns at once, or raises if the message failed

if size > 1:
    assert torch.all(incoming == left)
    print(f"rank {rank} received {int(incoming[0])} from its left neighbour")

# Tags distinguish messages between the same two ranks, so they can be received in any order.
if size > 1 and rank == 0:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    for request in [dist.isend(one, dst=1, tag=1), dist.isend(two, dst=1, tag=2)]:
        request.wait()
elif rank == 1:
    one, two = torch.empty(1), torch.empty(1)
    for request in [dist.irecv(two, src=0, tag=2), dist.irecv(one, src=0, tag=1)]:
        request.wait()
    print(f"rank 1 received {one.item():g} with tag 1 and {two.item():g} with tag 2")

dist.destroy_process_group()
