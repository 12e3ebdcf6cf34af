"""Leave a process of the kind that is named first behind; then say so, with the job's port, and print lines until ended.

Then the rank leaves with the code that stands at its place in what follows ("-": it stays). Rank 0 listens on the port.
"hungry": it stays in the background, and rank 1 touches memory until somebody ends it.
"flood": it holds the output, and the rank writes as fast as it can.
"""
import os, signal, socket, sys, time
kind, *codes = sys.argv[1:]
if os.environ["RANK"] == "0":
    listener = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
up, ready = os.pipe()
if os.fork() == 0:
    if kind in ("session", "daemon"):
        os.setsid()
    if kind == "daemon" and os.fork() > 0:
        os._exit(0)
    if kind == "deaf":
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
    if kind not in ("holds", "flood"):  # the others let the rank's output go
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
    os.write(ready, b".")
    while True:
        signal.pause()
os.read(up, 1)
print("port", os.environ["MASTER_PORT"], flush=True)
code = codes[int(os.environ["RANK"])] if codes else "-"
if code != "-":
    sys.exit(int(code))
blocks = []
hungry = kind == "hungry" and os.environ["RANK"] == "1"
if hungry:
    open("/proc/self/oom_score_adj", "w").write("1000")
while hungry:
    blocks.append(b"x" * (8 << 20))
while kind == "flood":
    os.write(1, b"much to say\n" * 1000)
while True:
    time.sleep(0.001)
    print("still here", flush=True)
