"""Replica groups of torchft: each is a world of its own. Those that are there average what they learn; one that is back
gets its weights from another. Needs `pip install torchft`; configs/torchft.toml starts it with its lighthouse."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

own = os.environ
os.environ.setdefault("TORCHFT_LIGHTHOUSE", f"http://{own['LAUNCHPAD_LIGHTHOUSE_RPC']}")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seconds", type=float, default=0.05, help="what a step takes besides")
options = parser.parse_args()

group, groups = int(own["REPLICA_GROUP_ID"]), int(own["NUM_REPLICA_GROUPS"])
dist.init_process_group("gloo")  # of this group alone; its store is the Manager's too
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(dist.get_rank() + dist.get_world_size() * group)


def state() -> dict[str, Any]:
    """What a group that joins gets from another one."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(found: dict[str, Any]) -> None:
    """Take it."""
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=1,
    timeout=timedelta(seconds=10),
    quorum_timeout=timedelta(seconds=30),
    connect_timeout=timedelta(seconds=10),
    replica_id=f"train_{group}",
)
try:
    while manager.current_step() < options.steps:
        manager.start_quorum()
        data = torch.rand(16, 8, generator=generator)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(options.seconds)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)  # within the group
            parameter.grad /= dist.get_world_size()
            manager.allreduce(parameter.grad).wait()  # among the groups that are there
        if manager.should_commit():
            optimizer.step()
            if dist.get_rank() == 0:
                there = manager.num_participants()
                print(f"step {manager.current_step()}: loss {loss:.3f}, {there} of {groups} groups", flush=True)
finally:
    manager.shutdown()
dist.destroy_process_group()
