"""Lightning Fabric: it starts no processes of its own, as it finds torchrun's variables."""

import os

import torch
from lightning.fabric import Fabric

fabric = Fabric(
    devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp"
)
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(4, 4, device=fabric.device)).square().mean())
    optimizer.step()
total = fabric.all_reduce(torch.tensor(fabric.global_rank + 1.0), reduce_op="sum")
environment = type(fabric.strategy.cluster_environment).__name__
if fabric.is_global_zero:
    print(f"the sum over {fabric.world_size} ranks in a {environment} is {total.item():g}")
