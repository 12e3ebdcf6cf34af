import torch
import torch.distributed as dist


def run(rank, size):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    print(f"rank {rank} of {size}: {x.item()}")
