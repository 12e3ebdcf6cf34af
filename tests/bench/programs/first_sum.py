"""Meet over gloo, sum once, leave. With `wait`: stay until the file ARGV[2] is there. With `crash`: rank 1 exits with 9 in
its first attempt, and rank 0 notes when the next attempt has summed.
"""
import os, pathlib, sys, time

import torch
import torch.distributed as dist

rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ.get("WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=size)
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == size
if sys.argv[1:2] == ["wait"]:
    folder = pathlib.Path(sys.argv[2])
    (folder / f"here{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
elif sys.argv[1:2] == ["crash"]:
    folder = pathlib.Path(sys.argv[2])
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == 0 and attempt != "0":
        (folder / "back").write_text(str(time.monotonic()))
    if rank == 1 and attempt == "0":
        (folder / "crashed").write_text(str(time.monotonic()))
        os._exit(9)
    if attempt == "0":
        time.sleep(60)  # to be ended because of rank 1
dist.destroy_process_group()
