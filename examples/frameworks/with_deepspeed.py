"""DeepSpeed: init_distributed finds torchrun's variables."""

import deepspeed
import torch

deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False)
rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
total = torch.tensor([rank + 1.0])
deepspeed.comm.all_reduce(total)
if rank == 0:
    print(f"the sum over {size} ranks is {total.item():g}")
torch.distributed.destroy_process_group()
