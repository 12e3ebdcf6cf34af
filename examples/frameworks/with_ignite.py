"""PyTorch-Ignite: its Parallel joins the ranks that are there, and an engine averages over them."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Average


def train(_local_rank: int) -> None:
    engine = Engine(lambda _, batch: batch.mean().item() + idist.get_rank())
    Average(device=idist.device()).attach(engine, "mean")

    @engine.on(Events.COMPLETED)
    @idist.one_rank_only()
    def show() -> None:
        print(f"the mean over {idist.get_world_size()} ranks is {engine.state.metrics['mean']:g}")

    engine.run(torch.ones(4, 2))


with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
    parallel.run(train)
