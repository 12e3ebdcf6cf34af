"""Saves when it is asked to stop and a file is there, or with "orphan" its parent is gone; until there is a file `go`."""
import os, signal, sys, time
until, parent, got = sys.argv[1], os.getppid(), []
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(signum) != signal.SIG_IGN:
        signal.signal(signum, lambda signum, _: got.append(signal.Signals(signum).name))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
while os.getppid() == parent if until == "orphan" else not os.path.exists(until):
    time.sleep(0.01)
print("saving", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("saved after", *got, flush=True)
