"""A rank of tests/bench/chaos.py --heads: notes again and again in which world it is at work, until the file `go`."""
import os, sys, time
folder = sys.argv[1]
world = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
size, rank = os.environ["GROUP_WORLD_SIZE"], os.environ["RANK"]
while not os.path.exists(f"{folder}/go"):
    with open(f"{folder}/worlds", "a") as file:
        file.write(f"{time.monotonic()} {world} {size} {rank} {os.uname().nodename}\n")
    time.sleep(0.02)
