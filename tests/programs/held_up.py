"""Says `ready`, then waits in a function of its rank's until the file `go` is there; rank 1 in C code with the GIL."""

from __future__ import annotations

import ctypes
import os
import sys
import time

RANK = int(os.environ["RANK"])


def read_batch() -> None:
    libc = ctypes.PyDLL(None)  # keeps the GIL, as C code does that does not know better
    while not os.path.exists(sys.argv[1]):
        libc.usleep(2_000_000 if "gil" in sys.argv else 10_000)


def step() -> None:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)


print("ready", flush=True)
read_batch() if RANK == 1 else step()
print("done", flush=True)
