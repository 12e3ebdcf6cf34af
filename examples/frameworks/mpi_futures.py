"""A pool of processes over MPI: rank 0 goes on with this program, the others do what is submitted."""

from mpi4py.futures import MPICommExecutor


def square(number: int) -> int:
    return number**2


with MPICommExecutor() as executor:
    if executor is not None:  # rank 0
        print("the squares are", *executor.map(square, range(4)))
