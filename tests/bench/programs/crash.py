"""Once all ranks are there, rank 1 notes the time and exits with 7; the others wait to be ended."""
import os, pathlib, sys, time

rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
folder = pathlib.Path(sys.argv[1])
(folder / f"here{rank}").touch()
deadline = time.monotonic() + 60
while len(list(folder.glob("here*"))) < 4 and time.monotonic() < deadline:
    time.sleep(0.01)
if rank == "1":
    time.sleep(0.2)
    (folder / "crashed").write_text(str(time.monotonic()))
    os._exit(7)
time.sleep(10)  # a launcher that does not end them waits for this
