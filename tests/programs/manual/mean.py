import torch

import launchpad
from launchpad import collectives as dist


def mean(x):
    x = x * dist.get_rank()
    dist.all_reduce(x)
    print("summed", x.tolist())
    return x / dist.get_world_size()


results = launchpad.run(mean, torch.arange(3.0), nproc=4)
print(results[0])
