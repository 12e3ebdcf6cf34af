"""Print ARGV[1] thousand numbered lines of 100 bytes, as fast as they can be taken: a block is numbered in one stroke."""
import os, sys

rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
text = " of a program that pours out its log".ljust(99 - len(f"rank {rank} line 0000000"), ".")
block = b"".join(f"rank {rank} line @@@@{i:03d}{text}\n".encode() for i in range(1000))
for thousand in range(int(sys.argv[1])):
    sys.stdout.buffer.write(block.replace(b"@@@@", b"%04d" % thousand))
