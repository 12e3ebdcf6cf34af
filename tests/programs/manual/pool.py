from mpi4py.futures import MPIPoolExecutor

def square(number):
    return number**2

if __name__ == "__main__":
    with MPIPoolExecutor() as pool:
        print("the squares are", *pool.map(square, range(8)))
