"""Lightning's Trainer: it starts no processes of its own, as it finds torchrun's variables."""

import os

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4))
if trainer.is_global_zero:
    environment = type(trainer.strategy.cluster_environment).__name__
    print(f"{trainer.world_size} ranks have done {trainer.global_step} steps in a {environment}")
