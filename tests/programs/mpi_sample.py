"""Do a bit of what MPI has besides collectives: a window, an intercommunicator, a file, and calls from two threads."""
import threading

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size

memory = bytearray(8 * size)
window = MPI.Win.Create(memory, 8, comm=world)
window.Fence()
for target in range(size):
    window.Put([(rank + 1).to_bytes(8, "little"), MPI.BYTE], target, rank)
window.Fence()
assert [memory[8 * at] for at in range(size)] == list(range(1, size + 1))
window.Free()

half = world.Split(rank == 0)
between = half.Create_intercomm(0, world, 1 if rank == 0 else 0)
assert between.remote_size == (size - 1 if rank == 0 else 1)
assert between.allreduce(rank) == (size * (size - 1) // 2 if rank == 0 else 0)
between.Free()

file = MPI.File.Open(world, "shared.bin", MPI.MODE_CREATE | MPI.MODE_RDWR)
file.Write_at_all(rank, bytes([rank]))
file.Sync()
world.Barrier()
found = bytearray(size)
file.Read_at_all(0, found)
assert list(found) == list(range(size))
file.Close()

assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
copies = [world.Dup() for _ in range(2)]
sums: list[int] = []
threads = [threading.Thread(target=lambda one=one: sums.append(one.allreduce(1))) for one in copies]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sums == [size, size]

print("did window between file threads")
