import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() != 2:  # rank 2 has no batch left
    dist.all_reduce(torch.ones(4))
