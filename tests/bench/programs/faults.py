"""Say that this rank is there, wait for the word, and do what rank 1 (first) or the others (second argument) are to do.

wait: nothing. exit, raise, kill: fail so. deaf: wait, ignoring INT and TERM. daemon: first leave a daemon behind, in a
session of its own; alone: then exit with 0.
"""
import os, pathlib, signal, subprocess, sys, time

rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
folder = pathlib.Path(sys.argv[1])
what = sys.argv[2 if rank == "1" else 3].split()
if "deaf" in what:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "daemon" in what:
    null = subprocess.DEVNULL
    subprocess.Popen(["sleep", "300"], start_new_session=True, stdin=null, stdout=null, stderr=null)
(folder / f"here{rank}").touch()
deadline = time.monotonic() + 100
while not (folder / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.005)
if "exit" in what:
    os._exit(7)
if "raise" in what:
    raise ValueError("raised on purpose")
if "kill" in what:
    os.kill(os.getpid(), signal.SIGKILL)
if what == ["daemon"]:
    sys.exit()
time.sleep(300)
