"""Rank 1 fails once all ranks are ready; the others report the signal they get and then leave, or ignore it."""
import os, pathlib, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ignore = "ignore" in sys.argv
def on(signum, frame):
    sys.stdout.write(f"got {signal.Signals(signum).name}\n")
    if not ignore:
        sys.exit(0)
signal.signal(signal.SIGTERM, on)
signal.signal(signal.SIGINT, on)
pathlib.Path(f"ready{rank}").touch()
while not all(os.path.exists(f"ready{r}") for r in range(world)):
    time.sleep(0.005)
sys.stdout.write("ready\n")  # at once: print writes words one by one, and a signal may come between them
if rank == 1 and "fail" in sys.argv:
    sys.stderr.write("some words\nthe last words\n")
    sys.exit(7)
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    time.sleep(0.05)
