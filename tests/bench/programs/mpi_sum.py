from mpi4py import MPI

world = MPI.COMM_WORLD
assert world.allreduce(1) == 4
print("here")
