"""Sum a tensor over all ranks, in two process groups, one after the other; say the sum and MASTER_ADDR.

"forever": go on with it, after "up RANK".
"""
import os, sys
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
    # Gloo closes its connections at once: a rank that is still reading from them would fail.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done {dist.get_rank()}", "")
    store.wait([f"done {rank}" for rank in range(dist.get_world_size())])
    dist.destroy_process_group()
