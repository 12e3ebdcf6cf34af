"""Print so many numbered lines, a hundred in a write."""
import os, sys

rank = (os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]).encode()
count = int(sys.argv[1])
for start in range(0, count, 100):
    numbers = range(start, min(start + 100, count))
    sys.stdout.buffer.write(b"".join(b"rank %s line %07d of a program that prints a lot\n" % (rank, i) for i in numbers))
