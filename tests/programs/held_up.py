"""Says `ready`, then waits in a function of its rank's until the file `go` is there; rank 1 in C code with the GIL.

os.access has no Python frame, so a rank that looks for the file is still met in its own function.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

RANK = int(os.environ["RANK"])


def read_batch() -> None:
    libc = ctypes.PyDLL(None)  # keeps the GIL, as C code does that does not know better
    while not os.access(sys.argv[1], os.F_OK):
        libc.usleep(2_000_000 if "gil" in sys.argv else 10_000)


def step() -> None:
    while not os.access(sys.argv[1], os.F_OK):
        time.sleep(0.02)


print("ready", flush=True)
read_batch() if RANK == 1 else step()
print("done", flush=True)
