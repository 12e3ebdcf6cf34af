"""Programs that go wrong, each in a way of its own: gallery.py CASE. test_gallery.py tells what a person would say of each."""

import os
import sys
import time
from datetime import timedelta

CASE = sys.argv[1]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CULPRIT = SIZE - 2
"""Not the first rank, and not the last."""


def join(**options):
    """Torch's group; imported by those only that use it."""
    from launchpad import collectives as dist

    dist.init_process_group(**options)
    return dist


def add(dist, length=4):
    import torch

    tensor = torch.ones(length)
    dist.all_reduce(tensor)
    assert tensor[0] == SIZE
    return tensor


def forever():
    while True:
        time.sleep(60)


# Exceptions


def before_init():
    if RANK == CULPRIT:
        {}["learning_rate"]
    add(join())


def after_init():
    dist = join()
    add(dist)
    if RANK == CULPRIT:
        raise ValueError("the loss is not finite")
    add(dist)


def in_backward():
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if RANK == CULPRIT:
                raise ArithmeticError("a gradient is not finite")
            return gradient * 2

    join()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    Picky.apply(model(torch.ones(2, 4))).sum().backward()


def in_forward():
    """Torch's own words."""
    import torch

    dist = join()
    model = torch.nn.Linear(4 if RANK != CULPRIT else 5, 4)
    model(torch.ones(2, 4))
    add(dist)


class Images:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        if RANK == CULPRIT and index == 5:
            if CASE == "worker_killed":
                os.kill(os.getpid(), 9)
            raise IndexError("image 5 is broken")
        return torch.zeros(1)


def worker():
    from torch.utils.data import DataLoader

    dist = join()
    for _ in DataLoader(Images(), batch_size=2, num_workers=1):
        pass
    add(dist)


worker_killed = worker


def in_thread():
    """The thread's exception is what happened; the rank only reports that it did."""
    import threading

    dist = join()
    failed = []

    def prefetch():
        if RANK == CULPRIT:
            failed.append(True)
            raise FileNotFoundError("shard-17.tar")

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    if failed:
        sys.exit(3)
    add(dist)


def chained():
    dist = join()
    if RANK == CULPRIT:
        try:
            {}["step"]
        except KeyError as error:
            raise RuntimeError("the checkpoint can't be read") from error
    add(dist)


def grouped():
    dist = join()
    if RANK == CULPRIT:
        raise ExceptionGroup("two shards failed", [OSError("shard 1"), ValueError("shard 2")])
    add(dist)


def recursion():
    def deeper(n):
        return deeper(n + 1)

    dist = join()
    if RANK == CULPRIT:
        deeper(0)
    add(dist)


def long_message():
    dist = join()
    if RANK == CULPRIT:
        raise ValueError("x" * 3_000_000)
    add(dist)


def assertion():
    dist = join()
    assert RANK != CULPRIT
    add(dist)


def full_disk():
    dist = join()
    if RANK == CULPRIT:
        with open("/dev/full", "w") as file:
            file.write("checkpoint")
    add(dist)


def closed_stdout():
    dist = join()
    if RANK == CULPRIT:
        sys.stdout.close()
        print("step 1")
    add(dist)


def no_memory():
    import resource

    dist = join()
    if RANK == CULPRIT:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        bytearray(1 << 30)
    add(dist)


def import_error():
    if RANK == CULPRIT:
        import a_module_that_is_on_the_other_nodes_only
    add(join())


def spawned_child():
    import multiprocessing

    dist = join()
    if RANK == CULPRIT:
        child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(6))
        child.start()
        child.join()
        if child.exitcode:
            raise RuntimeError(f"the tokenizer ended with {child.exitcode}")
    add(dist)


def subprocess_failed():
    import subprocess

    dist = join()
    if RANK == CULPRIT:
        subprocess.run(["false"], check=True)
    add(dist)


def tear_down():
    dist = join()
    add(dist)
    dist.destroy_process_group()
    if RANK == CULPRIT:
        raise OSError("the last checkpoint was not written")


def interrupted():
    dist = join()
    if RANK == CULPRIT:
        raise KeyboardInterrupt
    add(dist)


def two_at_once():
    """Both by themselves, a millisecond apart."""
    dist = join()
    add(dist)
    if RANK >= CULPRIT:
        begin = time.monotonic()
        while time.monotonic() < begin + 0.001 * (RANK - CULPRIT):
            pass
        raise ValueError(f"rank {RANK} by itself")
    add(dist)


def all_alike():
    dist = join()
    add(dist)
    raise ValueError("every rank says this")


def retried():
    """A victim that catches what it was told, and ends a little later with an exception of its own words."""
    dist = join()
    add(dist)
    if RANK == CULPRIT:
        raise ValueError("the loss is not finite")
    try:
        add(dist)
    except RuntimeError as error:
        raise RuntimeError("training was stopped") from error


# Ends without a word


def exit_code():
    dist = join()
    if RANK == CULPRIT:
        sys.exit(3)
    add(dist)


def exit_message():
    dist = join()
    if RANK == CULPRIT:
        sys.exit("config.yaml: no such key: lr")
    add(dist)


def os_exit():
    dist = join()
    if RANK == CULPRIT:
        os._exit(5)
    add(dist)


def in_atexit():
    import atexit

    dist = join()
    add(dist)
    if RANK == CULPRIT:
        atexit.register(os._exit, 4)


def aborts_at_exit():
    """As torch does now and then, whose threads outlive the interpreter's."""
    import atexit

    dist = join()
    add(dist)
    dist.destroy_process_group()
    if RANK == CULPRIT:
        atexit.register(os.abort)


def segfault():
    import ctypes

    dist = join()
    add(dist)
    if RANK == CULPRIT:
        ctypes.string_at(0)
    add(dist)


def abort():
    dist = join()
    add(dist)
    if RANK == CULPRIT:
        os.abort()
    add(dist)


def killed():
    dist = join()
    add(dist)
    if RANK == CULPRIT:
        os.kill(os.getpid(), 9)
    add(dist)


def leaves_early():
    """With 0, while the others still wait for it."""
    dist = join()
    add(dist)
    if RANK == CULPRIT:
        return
    add(dist)


# Hangs


def other_operation():
    import torch

    dist = join()
    add(dist)
    if RANK == CULPRIT:
        dist.broadcast(torch.ones(4), src=0)
        dist.barrier()
    add(dist)


def other_shape():
    dist = join()
    add(dist)
    add(dist, 4 if RANK != CULPRIT else 1 << 20)
    add(dist)


def missing():
    """One waits for a message that nobody sends, the others for it."""
    import torch

    dist = join()
    add(dist)
    if RANK == CULPRIT:
        dist.recv(torch.ones(4), src=0)
    add(dist)


def lock():
    import threading

    dist = join()
    add(dist)
    if RANK == CULPRIT:
        cache = threading.Lock()
        with cache:
            cache.acquire()
    add(dist)


def endless_loop():
    dist = join()
    add(dist)
    os.nice(19)  # others may need the processor
    while RANK == CULPRIT:
        pass
    add(dist)


def late():
    """The others' time-outs are the first that anybody says."""
    dist = join(timeout=timedelta(seconds=3))
    add(dist)
    if RANK == CULPRIT:
        forever()
    add(dist)


# Nothing is wrong


def slow():
    dist = join()
    for _ in range(2):
        end = time.monotonic() + 3
        while RANK == CULPRIT and time.monotonic() < end:
            sum(range(10_000))
        add(dist)


def quiet():
    dist = join()
    for _ in range(40):
        add(dist)
        time.sleep(0.1)


def early():
    """A rank that nobody waits for any more."""
    if RANK == CULPRIT:
        return
    time.sleep(1.5)
    print("done")


def caught():
    dist = join()
    try:
        raise ValueError("expected")
    except ValueError:
        import logging

        logging.exception("this is handled")
    add(dist)
    if RANK == CULPRIT:
        print("Traceback (most recent call last):\nConnectionResetError: only a story", file=sys.stderr)


def thread_only():
    import threading

    dist = join()
    thread = threading.Thread(target=lambda: {}["nobody minds"])
    thread.start()
    thread.join()
    add(dist)


def atexit_raises():
    """Python prints it and ends with 0."""
    import atexit

    dist = join()
    add(dist)
    if RANK == CULPRIT:
        atexit.register(lambda: {}["too late"])


globals()[CASE]()
