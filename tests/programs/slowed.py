"""A job in which something slows one rank down, or nothing: slowed.py CASE SECONDS [SECONDS OF A STEP].

Every case has a function below.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import launchpad.collectives as dist

STEP = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02

Work = Callable[[int], None]

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def spin(seconds: float) -> None:
    """Use CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rest(seconds: float) -> Work:
    return lambda _: time.sleep(seconds)


# Nobody is slow.


def even() -> Work:
    return rest(STEP)


def noisy() -> Work:
    generator = random.Random(RANK)
    return lambda _: time.sleep(STEP * generator.lognormvariate(0, 0.3))


def rotating() -> Work:
    return lambda step: time.sleep(STEP * (2 if step // 10 % SIZE == RANK else 1))


def saving() -> Work:
    """Rank 0 saves now and then."""
    return lambda step: time.sleep(STEP + (0.06 if RANK == 0 and step % 100 == 99 else 0))


# One rank is slow.


def double() -> Work:
    return rest(STEP * (2 if RANK == 1 else 1))


def computing() -> Work:
    def work(_: int) -> None:
        time.sleep(STEP)
        spin(0.015 if RANK == 2 else 0)

    return work


def loading() -> Work:
    """A thread makes rank 3's batches, too slowly."""
    batches: queue.Queue[int] = queue.Queue(2)

    def load() -> None:
        while True:
            time.sleep(STEP * (2.5 if RANK == 3 else 0.5))
            batches.put(0)

    threading.Thread(target=load, daemon=True).start()

    def work(_: int) -> None:
        batches.get()
        time.sleep(STEP)

    return work


def throttled() -> Work:
    """Rank 1 may use a tenth of a core. The caller has made the cgroup."""
    if RANK == 1:
        Path(os.environ["CGROUP"], "cgroup.procs").write_text(str(os.getpid()))

    def work(_: int) -> None:
        time.sleep(STEP)
        spin(0.005)

    return work


def faulting() -> Work:
    """Rank 2's data is read from its disk again and again."""
    path = f"data{RANK}"
    with open(path, "wb") as file:
        file.write(bytes(4 << 20))
        os.fsync(file.fileno())
    file_data = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(file_data, 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)

    def work(_: int) -> None:
        time.sleep(STEP)
        end = time.monotonic() + STEP
        while RANK == 2 and time.monotonic() < end:
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file_data, 0, 0, os.POSIX_FADV_DONTNEED)
            for place in range(0, 1 << 20, 1 << 16):
                mapped[place]

    return work


def crowded() -> Work:
    """Rank 0 shares its core with eight other programs."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if RANK == 0 else cores[-1]})
    for _ in range(8 if RANK == 0 else 0):
        if os.fork() == 0:
            os.setsid()
            spin(float(sys.argv[2]))
            os._exit(0)

    def work(_: int) -> None:
        time.sleep(STEP)
        spin(0.006)

    return work


def stopped() -> Work:
    """Rank 2 is stopped for 100 ms every half second."""
    if RANK == 2:
        pid = os.getpid()
        if os.fork() == 0:
            while os.getppid() == pid:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.1)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.4)
            os._exit(0)
    return rest(STEP)


def collecting() -> Work:
    """Rank 3's garbage collections take long."""
    held = [[] for _ in range(1_500_000 if RANK == 3 else 0)]

    def work(step: int) -> None:
        time.sleep(STEP)
        if step % 10 == 0 and held:
            gc.collect()

    return work


def checkpointing() -> Work:
    """Rank 0 saves so often that it costs a lot."""
    return lambda step: time.sleep(STEP + (0.2 if RANK == 0 and step % 20 == 19 else 0))


def halves() -> Work:
    """Rank 3 is slow in a group of two, and rank 2 late to all because of it."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, SIZE, 2)]

    def work(_: int) -> None:
        time.sleep(STEP * (2 if RANK == 3 else 1))
        dist.all_reduce(torch.ones(1), group=groups[RANK // 2])

    return work


def second_host() -> Work:
    """The ranks of the second host are slow."""
    return rest(STEP * (2 if RANK >= SIZE // 2 else 1))


def ddp() -> Work:
    """Rank 1 is slow, and the collectives are those of DistributedDataParallel."""
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]))

    def work(_: int) -> None:
        time.sleep(STEP * (2 if RANK == 1 else 1))
        model(torch.ones(1, 8)).sum().backward()

    return work


def quick() -> Work:
    """Steps of 5 ms, in which the ranks compute."""
    return lambda _: spin(0.005)


def answering() -> float:
    """CPU seconds of launchpad's thread: the only one but the main one that Python has started."""
    own = str(os.getpid())
    tasks = [Path("/proc/self/task", name) for name in os.listdir("/proc/self/task") if name != own]
    name = Path("/proc/self/comm").read_text()
    ours = [task for task in tasks if (task / "comm").read_text() == name]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in ours) / 1e9


def main() -> None:
    dist.init_process_group()
    work: Work = globals()[sys.argv[1]]()
    end = time.monotonic() + float(sys.argv[2])
    step, goes_on = 0, torch.ones(1)
    while goes_on:
        work(step)
        step += 1
        goes_on = torch.tensor([float(time.monotonic() < end)])
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
    dist.barrier()
    dist.destroy_process_group()
    print(f"{step} steps, {answering() / float(sys.argv[2]):.2%} of the time spent on answers")


if __name__ == "__main__":
    main()
