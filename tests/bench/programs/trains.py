"""Train for ARGV[2] seconds, counted from the first step of the first attempt; checkpoints are in the folder ARGV[1].

A step is a few ms, with one all_reduce. Rank 0 writes a checkpoint every second and at the end; every attempt goes on
from the last one. In the folder: began (when that was), steps (how many the last checkpoint holds), attempts (a line
each), pidR (of rank R, once it trains).
"""
import os, pathlib, sys, time

import torch
import torch.distributed as dist

folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
checkpoint, began = folder / "checkpoint.pt", folder / "began"


def write(name, text):
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").replace(folder / name)


def save():
    torch.save([step, model], folder / "checkpoint.new")
    (folder / "checkpoint.new").replace(checkpoint)
    write("steps", str(step))


dist.init_process_group("gloo")
step, model = 0, torch.zeros(128, 128)
if checkpoint.exists():
    step, model = torch.load(checkpoint)
if rank == 0:
    with open(folder / "attempts", "a") as attempts:
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], file=attempts)
    if not began.exists():
        write("began", str(time.monotonic()))
    ends, saved = float(began.read_text()) + seconds, time.monotonic()
over = torch.zeros(1)
trains = False
while not over:
    time.sleep(0.004)  # an accelerator's part of the work
    gradient = torch.ones(model.numel() + 1)
    gradient[-1] = rank == 0 and time.monotonic() >= ends
    dist.all_reduce(gradient)
    model += gradient[:-1].view_as(model)
    over = gradient[-1]
    step += 1
    if not trains:
        trains = True
        write(f"pid{rank}", str(os.getpid()))
    if rank == 0 and (over or time.monotonic() - saved >= 1):
        save()
        saved = time.monotonic()
assert (model == step * size).all(), "a step was lost, or was done twice"
dist.destroy_process_group()
