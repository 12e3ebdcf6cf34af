"""Rank 0 holds memory and sleeps, 1 computes, the others wait for both in an all_reduce; until the file `go` is there."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

GO = sys.argv[1]

dist.init_process_group("gloo")
rank = dist.get_rank()
held = b"x" * (300 << 20) if rank == 0 else b""
print("ready", rank, flush=True)
if rank == 0:
    while not os.path.exists(GO):
        time.sleep(0.02)
if rank == 1:
    while not os.path.exists(GO):
        pass
dist.all_reduce(torch.ones(4))
print("done", flush=True)
dist.destroy_process_group()
