"""Do a bit of what MPI has besides collectives: windows, an intercommunicator, a file, threads, datatypes."""
import struct
import threading
from array import array

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

shared = MPI.Win.Allocate_shared(8 if rank == 0 else 0, 8, comm=world)
own = bytearray(8)
shared.Lock_all()
shared.Fetch_and_op([(1).to_bytes(8, "little"), MPI.INT64_T], [own, MPI.INT64_T], 0)
shared.Unlock_all()
world.Barrier()
assert shared.Shared_query(0)[0].tobytes() == size.to_bytes(8, "little")
shared.Free()

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

grid = array("i", [10 * rank + at for at in range(size * size)])
column = MPI.INT.Create_vector(size, 1, size).Commit()
row = array("i", [0] * size)
world.Sendrecv([grid, 1, column], (rank + 1) % size, recvbuf=[row, size, MPI.INT], source=(rank - 1) % size)
assert list(row) == [10 * ((rank - 1) % size) + size * at for at in range(size)]
record = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Create_resized(0, 16).Commit()
filled = bytearray(struct.pack("i4xdi4xd", 1, 2.5, 3, 4.5) if rank == 0 else 32)
world.Bcast([filled, 2, record])
assert struct.unpack("i4xdi4xd", filled) == (1, 2.5, 3, 4.5)

print("did windows between file threads datatypes")
