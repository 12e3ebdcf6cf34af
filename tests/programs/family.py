"""Start children that outlive their parent where they can, say "up RANK", and stay until told otherwise.

"deaf": the rank and its children ignore every signal that can be ignored. "talks": it prints as fast as it can, too.
Where a file leave-RANK comes into the folder, the rank leaves with the code that it holds.
"""
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
if "deaf" in sys.argv:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
up, ready = os.pipe()
for kind in ("plain", "holds", "session", "daemon"):
    if os.fork() == 0:
        if kind in ("session", "daemon"):
            os.setsid()
        if kind == "daemon" and os.fork() > 0:
            os._exit(0)
        if kind != "holds":  # the others let the rank's output go
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
        os.write(ready, b".")
        while True:
            signal.pause()
for _ in range(4):
    os.read(up, 1)
print("up", rank, flush=True)
leave = pathlib.Path("leave-" + rank)
while not leave.exists():
    if "talks" in sys.argv:
        os.write(1, b"much to say\n" * 1000)
    else:
        time.sleep(0.01)
sys.exit(int(leave.read_text()))
