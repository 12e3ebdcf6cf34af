"""A rank of tests/bench/chaos.py that talks to nobody: lines for so many seconds, with a child in a session of its own."""
import os, signal, sys, time
rank, seconds = os.environ["RANK"], float(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    signal.pause()
os.write(1, b"up %s\n" % rank.encode())
end, number = time.monotonic() + seconds, 0
while time.monotonic() < end:
    os.write(1, b"rank %s line %d %s end\n" % (rank.encode(), number, b"x" * (number % 300)))
    number += 1
    time.sleep(0.002)
os._exit(0)
