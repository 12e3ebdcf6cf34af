"""The tensor collectives, and what each leaves on which rank. Run it: launchpad run --nproc 4 examples/collectives.py

Over MPI: launchpad run --backend mpi --nproc 4 examples/collectives.py mpi
"""

import sys

import torch

from launchpad import collectives as dist

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def show(name: str, tensor: torch.Tensor, only: int | None = None) -> None:
    """Print what each rank has, or what the `only` rank has."""
    if only in (None, rank):
        print(f"{name}: rank {rank} has {tensor.int().tolist()}")


# Copy one rank's tensor to all ranks.
tensor = torch.tensor([7.0, 8.0]) if rank == 0 else torch.zeros(2)
dist.broadcast(tensor, src=0)
show("broadcast", tensor)

# Send each rank one tensor of rank 0's list. The other ranks pass no list.
part = torch.empty(1)
dist.scatter(part, [torch.tensor([10.0 * to]) for to in range(size)] if rank == 0 else None, src=0)
show("scatter", part)

# The reverse: collect each rank's tensor in one rank's list.
parts = [torch.empty(1) for _ in range(size)]
dist.gather(part + 1, parts if rank == 0 else None, dst=0)
show("gather", torch.cat(parts), only=0)

# … or in every rank's list.
dist.all_gather(parts, part + 2)
show("all_gather", torch.cat(parts))

# Sum all ranks' tensors on one rank. The other ranks' tensors are undefined afterwards.
tensor = torch.tensor([1.0, float(rank)])
dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
show("reduce", tensor, only=0)

# Reduce on all ranks. There are SUM, PRODUCT, MIN, MAX and others.
tensor = torch.tensor([1.0, float(rank)])
dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
show("all_reduce", tensor)

dist.destroy_process_group()
