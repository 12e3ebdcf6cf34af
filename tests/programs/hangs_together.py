"""Ranks of a group that never meet, or are only slow: `hangs_together.py KIND BACKEND [SECONDS]`."""

from __future__ import annotations

import os
import socket
import sys
import time

import torch

from launchpad import collectives as dist


def operation(tensor: torch.Tensor) -> None:
    """Rank 1 enters another one."""
    if dist.get_rank() == 1:
        dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)
    else:
        dist.all_reduce(tensor)


def missing(tensor: torch.Tensor) -> None:
    """Rank 1 never comes."""
    if dist.get_rank() == 1:
        read_batch()
    dist.all_reduce(tensor)


def read_batch() -> None:
    time.sleep(1e6)


def receive(tensor: torch.Tensor) -> None:
    """Nobody sends."""
    dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())


def training(tensor: torch.Tensor) -> None:  # noqa: ARG001
    """Rank 1 stays away from a step of DDP, which calls no Python function for its all_reduce."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for step in range(4):
        if dist.get_rank() == 1 and step == 2:
            read_batch()
        model(torch.ones(2, 3)).sum().backward()


def left(tensor: torch.Tensor) -> None:  # noqa: ARG001
    """Rank 0 returns, and the others wait for what only it could set, and clean up behind that."""
    if dist.get_rank() == 0:
        sys.exit()
    try:
        torch.distributed.distributed_c10d._get_default_store().wait(["ready"])
    finally:
        print("cleaned up")


def healthy(tensor: torch.Tensor) -> None:
    """A long quiet time in which all ranks do nothing but all_reduce."""
    rounds = torch.zeros(1)
    end = time.monotonic() + float(sys.argv[3])
    while rounds.item() == 0:
        dist.all_reduce(tensor)
        rounds.fill_(float(time.monotonic() > end))
        dist.broadcast(rounds, 0)


def await_store() -> None:
    """Wait until the store listens: torch tries to connect ever less often, which on a busy machine is a stall."""
    while True:
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return


def main() -> None:
    if sys.argv[2] == "gloo" and os.environ["RANK"] != "0":
        await_store()
    dist.init_process_group(sys.argv[2])
    tensor = torch.ones(3, 5)
    for _ in range(3):
        dist.all_reduce(tensor)
    print("ready", flush=True)
    globals()[sys.argv[1]](tensor)
    dist.barrier()


if __name__ == "__main__":
    main()
