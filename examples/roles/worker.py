"""A worker: pulls the weights, computes a gradient from its own data, pushes it. Workers don't wait for each other."""

from __future__ import annotations

import argparse
import os
from multiprocessing.connection import Client

import torch

TRUTH = torch.tensor([1.0, -2.0, 3.0, 0.5])

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
steps = parser.parse_args().steps

rank = int(os.environ["RANK"])
host, _, port = os.environ["LAUNCHPAD_SERVER_PUSH"].rpartition(":")
generator = torch.Generator().manual_seed(rank)
with Client((host, int(port)), authkey=os.environ["TORCHELASTIC_RUN_ID"].encode()) as server:
    server.send(None)
    for _ in range(steps):
        weights = torch.tensor(server.recv(), requires_grad=True)
        data = torch.randn(16, 4, generator=generator)
        (data @ weights - data @ TRUTH).square().mean().backward()
        assert weights.grad is not None
        server.send(weights.grad.tolist())
    error = (torch.tensor(server.recv()) - TRUTH).abs().max()
print(f"worker {rank}: off by {error:.2f} at most")
