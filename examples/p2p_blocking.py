"""Blocking messages between ranks. Run it: launchpad run --nproc 4 examples/p2p_blocking.py

Over MPI: launchpad run --backend mpi --nproc 4 examples/p2p_blocking.py mpi
"""

import sys

import torch

from launchpad import collectives as dist

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()

# A token travels from rank 0 to the last rank; each rank adds its own number to it.
# `recv` returns when the message is in the tensor, `send` when the tensor may be modified again.
token = torch.zeros(1)
if rank > 0:
    dist.recv(token, src=rank - 1)
token += rank
if rank < size - 1:
    dist.send(token, dst=rank + 1)
print(f"rank {rank} has {token.item():g}")
assert token.item() == sum(range(rank + 1))

# Rank 0 receives an answer from each other rank, in any order: without `src`, `recv` returns the sender.
if rank == 0:
    answers = {dist.recv(token): token.item() for _ in range(1, size)}
    assert answers == {other: float(other**2) for other in range(1, size)}
    print("rank 0 has the squares", [int(answers[other]) for other in range(1, size)])
else:
    dist.send(torch.tensor([float(rank**2)]), dst=0)

dist.destroy_process_group()
