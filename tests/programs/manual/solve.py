from mpi4py import MPI

world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, "has the sum", world.allreduce(world.rank))
