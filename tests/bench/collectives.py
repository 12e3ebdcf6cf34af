"""The mpi frontend beside raw mpi4py and gloo: python tests/bench/collectives.py [--ranks N,N,…] [--runs R]

One world for each number of ranks, by MPICH's mpiexec; in it the peers take turns with every operation and size, each
with some calls in a row, every call after a barrier. A figure is the median over all calls and ranks. A DDP step is
forward, backward and update of a small network whose gradients (1 MiB) are summed in several buckets.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SIZES = {"4 B": 4, "1 KiB": 1 << 10, "16 KiB": 1 << 14, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
BLOCK, WARM = 50, 10
"""A peer's calls in a row, and those before them that don't count."""

PEERS = ["raw mpi4py", "mpi frontend", "gloo"]
ROOT = Path(__file__).parents[2]


def row(name: str, calls: list[Callable[[], object] | None], turns: int, unit: float = 1e-6) -> None:
    """Print the row of a table: each peer's median over all ranks, in the unit."""
    from mpi4py import MPI

    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(math.ceil(turns / BLOCK)):
        for call, seconds in zip(calls, taken, strict=True):
            for turn in range(WARM + BLOCK if call else 0):
                MPI.COMM_WORLD.Barrier()
                begin = time.perf_counter()
                call()
                if turn >= WARM:
                    seconds.append(time.perf_counter() - begin)
    everyone = MPI.COMM_WORLD.allgather(taken)
    figures = []
    for peer in range(len(calls)):
        seconds = [second for rank in everyone for second in rank[peer]]
        figures.append(statistics.median(seconds) / unit if seconds else float("nan"))
    raw, ours, gloo = figures
    if MPI.COMM_WORLD.rank == 0:
        cells = ["-" if figure != figure else f"{figure:.1f}" for figure in figures]
        added = "-" if raw != raw else f"{ours - raw:+.1f}, {ours / raw:.2f}x"
        print(f"| {name} | {' | '.join(cells)} | {added} | {gloo / ours:.1f}x |", flush=True)


def measure(runs: int, file: str) -> None:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from launchpad.collectives.mpi import install

    world = MPI.COMM_WORLD
    install()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=world.rank, world_size=world.size)
    mpi, gloo = dist.new_group(backend="mpi"), dist.group.WORLD
    for name, size in SIZES.items():
        turns = runs if size < 1 << 20 else runs // 10
        tensor = torch.ones(size // 4)
        whole = torch.ones(size // 4 * world.size)
        array, array_whole = tensor.numpy(), whole.numpy()
        peers: dict[str, list[Callable[[], object] | None]] = {
            "all_reduce": [
                lambda array=array: world.Allreduce(MPI.IN_PLACE, array),
                *(lambda t=tensor, g=g: dist.all_reduce(t, dist.ReduceOp.MAX, group=g) for g in (mpi, gloo)),
            ],
            "broadcast": [
                lambda array=array: world.Bcast(array),
                *(lambda t=tensor, g=g: dist.broadcast(t, 0, group=g) for g in (mpi, gloo)),
            ],
            "all_gather_into_tensor": [
                lambda a=array, w=array_whole: world.Allgather(a, w),
                *(lambda t=tensor, w=whole, g=g: dist.all_gather_into_tensor(w, t, group=g) for g in (mpi, gloo)),
            ],
        }
        for operation, calls in peers.items():
            row(f"{operation} {name}", calls, turns)
    barriers = [world.Barrier, *(lambda g=g: dist.barrier(group=g) for g in (mpi, gloo))]
    row("barrier", barriers, runs)
    row("DDP step", [None, step(mpi), step(gloo)], runs // 4)
    dist.destroy_process_group(mpi)


def step(group: object) -> Callable[[], object]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    net = DistributedDataParallel(nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    inputs = torch.randn(64, 256)

    def once() -> None:
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    return once


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="how many, separated by commas")
    parser.add_argument("--runs", type=int, default=200, help="calls of each, a tenth of it for what is large")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.runs, options.one)
        return
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for ranks in options.ranks.split(","):
        print(f"\n{ranks} ranks on {os.cpu_count()} processors, µs\n")
        print(f"| | {' | '.join(PEERS)} | over raw | gloo / frontend |\n|---|---|---|---|---|---|", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            argv = [str(Path(sys.prefix, "bin", "mpiexec")), "-n", ranks, sys.executable, "-W", "ignore", __file__]
            subprocess.run([*argv, "--one", f"{folder}/store", "--runs", str(options.runs)], env=environ, check=True)


if __name__ == "__main__":
    main()
