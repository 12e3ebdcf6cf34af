"""mpi4py alone: `hangs_in_mpi.py (receive | reduce | leave | healthy SECONDS)`."""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
print("ready", flush=True)
if sys.argv[1] == "receive":
    comm.recv(source=(comm.rank + 1) % comm.size)
elif sys.argv[1] == "leave":  # by a handler, say: mpi4py calls MPI_Finalize then
    if comm.rank == 0:
        comm.recv(source=1)
elif sys.argv[1] == "reduce":  # of Python objects: mpi4py keeps the interpreter's lock meanwhile
    if comm.rank == 0:
        comm.recv(source=1)
    else:
        comm.allreduce(1)
else:
    end = time.monotonic() + float(sys.argv[2])
    while not comm.bcast(time.monotonic() > end):
        comm.allreduce(1)
