"""Hugging Face Accelerate: two steps of a model whose gradients are averaged over the ranks."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
seen = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
accelerator.print(f"ranks {seen.tolist()} have trained")
accelerator.end_training()
