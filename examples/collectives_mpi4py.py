"""The same collectives with mpi4py instead of torch, on Python objects and on NumPy arrays.

Run it: launchpad run --backend mpi --nproc 4 examples/collectives_mpi4py.py (or mpiexec -n 4 python …)
"""

import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()


def show(name: str, value: object, only: int | None = None) -> None:
    """Print what each rank has, or what the `only` rank has."""
    if only in (None, rank):
        print(f"{name}: rank {rank} has {value.tolist() if isinstance(value, numpy.ndarray) else value}")


# Lowercase methods pickle any Python object: convenient, but slow for large data.
show("bcast", world.bcast({"lr": 0.1} if rank == 0 else None, root=0))
show("scatter", world.scatter([f"for {to}" for to in range(size)] if rank == 0 else None, root=0))
show("gather", world.gather(rank**2, root=0), only=0)
show("allgather", world.allgather("abcdefgh"[rank % 8]))
show("reduce", world.reduce(rank, op=MPI.SUM, root=0), only=0)
show("allreduce", world.allreduce(rank, op=MPI.MAX))

# Capitalised methods send NumPy arrays directly. The receiver allocates an array of the right size and dtype.
array = numpy.arange(2.0) if rank == 0 else numpy.empty(2)
world.Bcast(array, root=0)
show("Bcast", array)

part = numpy.empty(1)
world.Scatter(10.0 * numpy.arange(size) if rank == 0 else None, part, root=0)
show("Scatter", part)

parts = numpy.empty(size)
world.Gather(part + 1, parts if rank == 0 else None, root=0)
show("Gather", parts, only=0)

world.Allgather(part + 2, parts)
show("Allgather", parts)

total = numpy.empty(2)
world.Reduce(numpy.array([1.0, rank]), total if rank == 0 else None, op=MPI.SUM, root=0)
show("Reduce", total, only=0)

world.Allreduce(numpy.array([1.0, rank]), total, op=MPI.MAX)
show("Allreduce", total)
