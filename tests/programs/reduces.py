"""Sum a tensor over all ranks, in two process groups, one after the other; say the sum and MASTER_ADDR.

"forever": go on with it, after "up RANK".
"""
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
for turn in range(2):
    dist.init_process_group("gloo")
    ranks = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(ranks)
    print(f"rank {dist.get_rank()} turn {turn} sum {int(ranks)} {os.environ['MASTER_ADDR']}", flush=True)
    if "forever" in sys.argv:
        print("up", dist.get_rank(), flush=True)
        while True:
            dist.all_reduce(ranks)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    # Where rank 0 serves the store, the others must not find the old one, in which the addresses of this turn are.
    Path(f"left-{turn}-{rank}").touch()
    while len(list(Path().glob(f"left-{turn}-*"))) < size:
        time.sleep(0.01)
