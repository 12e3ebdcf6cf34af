"""Sum a tensor over all ranks with gloo. Run it: launchpad run --nproc 4 examples/all_reduce.py"""

import torch
import torch.distributed as dist

# Rank, world size and address come from the environment, which launchpad sets.
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

tensor = torch.full((3,), float(rank))
dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

expected = world * (world - 1) / 2
assert tensor.tolist() == [expected] * 3, tensor
print(f"rank {rank} of {world}: the sum of all ranks is {tensor.tolist()}")

dist.destroy_process_group()
