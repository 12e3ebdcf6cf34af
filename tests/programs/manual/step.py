import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sizes = [[4, 4], [4, 4], [4, 0], [4, 4]]  # of each rank's batches
for size in sizes[dist.get_rank()]:
    loss = torch.tensor(1.25 / size)
    dist.all_reduce(loss)
