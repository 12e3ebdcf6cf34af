from mpi4py.futures import MPICommExecutor

def square(number):
    return number**2

with MPICommExecutor() as pool:
    if pool is not None:  # on rank 0
        print("the squares are", *pool.map(square, range(8)))
