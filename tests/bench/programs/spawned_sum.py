"""The same with torch.multiprocessing.spawn: ARGV[1] ranks."""
import os, sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]))
