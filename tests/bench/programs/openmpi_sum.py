import os

os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
from mpi4py import MPI

world = MPI.COMM_WORLD
assert world.allreduce(1) == 4
print("here")
