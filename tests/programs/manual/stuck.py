import queue

import torch
import torch.distributed as dist

shards = queue.Queue()


def read_batch():
    if dist.get_rank() == 3:
        return shards.get()  # nobody puts anything there
    return torch.ones(4)


dist.init_process_group("gloo")
dist.all_reduce(read_batch())
