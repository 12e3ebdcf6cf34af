"""Collectives among some of the ranks. Run it: launchpad run --nproc 4 examples/groups.py

Over MPI: launchpad run --backend mpi --nproc 4 examples/groups.py mpi
"""

import sys

import torch

from launchpad import collectives as dist

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()

# All ranks create all groups in the same order, even those that they aren't in.
even_ranks, odd_ranks = list(range(0, size, 2)), list(range(1, size, 2))
even = dist.new_group(even_ranks)
odd = dist.new_group(odd_ranks) if odd_ranks else None
mine, ranks = (odd, odd_ranks) if rank % 2 else (even, even_ranks)

# The two groups sum at the same time, independently of each other.
tensor = torch.tensor([float(rank)])
dist.all_reduce(tensor, group=mine)
print(f"rank {rank}, number {dist.get_rank(mine)} in group {ranks}: the group's sum is {tensor.item():g}")
assert tensor.item() == sum(ranks)

# Ranks in arguments such as `src` are the world's, even in a group.
dist.broadcast(tensor, src=ranks[-1], group=mine)

# A sum of sums: first between the groups' first ranks, then from each of them to its group.
leaders = dist.new_group([0, 1] if odd_ranks else [0])
if rank in (0, 1):
    dist.all_reduce(tensor, group=leaders)
dist.broadcast(tensor, src=ranks[0], group=mine)
print(f"rank {rank}: the world's sum is {tensor.item():g}")
assert tensor.item() == sum(range(size))

dist.destroy_process_group()
