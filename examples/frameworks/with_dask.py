"""Dask over MPI: rank 0 is the scheduler, rank 1 goes on with this program, the others are workers."""

from dask.distributed import Client
from dask_mpi import initialize

initialize(interface="lo", dashboard=False)
with Client() as client:
    print("the sum of the squares is", client.submit(sum, client.map(lambda number: number**2, range(4))).result())
