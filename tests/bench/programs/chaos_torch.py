"""A rank of tests/bench/chaos.py that sends to all others, over and over for so many seconds, and writes lines."""
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size, seconds = dist.get_rank(), dist.get_world_size(), float(sys.argv[1])
os.write(1, b"up %d\n" % rank)
end, number, over = time.monotonic() + seconds, 0, torch.zeros(1)
ours, theirs = torch.full((size,), float(rank)), torch.zeros(size)
while not over:
    dist.all_to_all_single(theirs, ours)
    assert theirs.tolist() == list(range(size)), theirs
    os.write(1, b"rank %d line %d %s end\n" % (rank, number, b"x" * (number % 300)))
    number += 1
    over.fill_(time.monotonic() > end)
    dist.broadcast(over, 0)
dist.destroy_process_group()  # or an executed rank may crash at its end: gloo's threads outlive what they use
