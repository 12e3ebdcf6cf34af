"""What tests have ranks call: ranks import this module, and nothing that takes long."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path

NUMBER = 5

held: list[int] = []
kept: object = None


class Stubborn(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def by_reference() -> tuple[int, str]:
    print("printed by a rank")
    print("and on stderr", file=sys.stderr)
    return NUMBER, __name__


def raises(rank: int, size: int) -> int:
    if rank == 1:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, f"rank {rank} of {size}")
    threading.Event().wait()
    return rank


def fails_until(attempt: int) -> str:
    """Rank 1 fails in each attempt up to that one, after rank 0 has returned."""
    now = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and int(now) < attempt:
        raise ValueError(f"attempt {now}")
    return now * (9 - int(now))  # what comes later is shorter


def wait_for_ever() -> None:
    threading.Event().wait()


def waits_for_rank_1(rank: int, _: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        print("reading shard 7", file=sys.stderr)
        wait_for_ever()
    dist.all_reduce(torch.ones(4))


def leaves_too_early(rank: int, _: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))
    if rank != 1:
        dist.all_reduce(torch.ones(4))


def leaves_the_others(how: str, folder: str) -> None:
    """Rank 1 leaves the group, and fails once ranks 0 and 2 have raised; these exit only when they are stopped."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    raised = [Path(folder, str(other)) for other in (0, 2)]
    dist.all_reduce(torch.ones(4))  # all are connected
    if rank == 1:
        dist.destroy_process_group()
        while not all(file.exists() for file in raised):
            time.sleep(0.01)
        if how == "raises":
            raise ValueError("bad batch")
        print("out of quota", flush=True)
        os._exit(3)
    atexit.register(wait_for_ever)
    atexit.register(Path(folder, str(rank)).touch)  # runs before the one above
    dist.all_reduce(torch.ones(4))


def spawns(program: str) -> str:
    from mpi4py import MPI

    spawned = MPI.COMM_SELF.Spawn(sys.executable, ["-c", f"from mpi4py import MPI; {program}"], maxprocs=2)
    spawned.Barrier()
    spawned.Disconnect()
    return "done"


def hold(number: int) -> int:
    held.append(number)
    return len(held)


def rank() -> int:
    return int(os.environ["RANK"])


def raise_on(number: int) -> int:
    if rank() == number:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, f"rank {number}")
    return rank()


def exit_on(number: int, code: int) -> None:
    if rank() == number:
        os._exit(code)
    threading.Event().wait()


def meet_unless(number: int) -> None:
    import torch.distributed as dist

    if rank() == number:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "before the barrier")
    dist.barrier()


def collect() -> int:
    """By sends and receives, of which rank 0 does more than the others. Returns how many have come."""
    import torch
    import torch.distributed as dist

    if rank():
        dist.send(torch.ones(1), dst=0)
        return 0
    for source in range(1, dist.get_world_size()):
        dist.recv(torch.empty(1), src=source)
    return dist.get_world_size() - 1


def barrier_of(number: int) -> None:
    import torch.distributed as dist

    if rank() == number:
        dist.barrier()


def wait_in(folder: str) -> None:
    """Wait for ever, and say so."""
    (Path(folder) / f"{rank()} waits").touch()
    threading.Event().wait()


def until(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def keep(x: object) -> tuple[int, float]:
    global kept
    import torch
    import torch.distributed as dist

    kept = x
    total = torch.ones(1)
    dist.all_reduce(total)
    print("kept")
    return dist.get_rank(), total.item()


def kept_unless(number: int) -> object:
    raise_on(number)
    return kept
