"""Says how long it has, and again when it is asked to stop. `fail`: the first attempt fails instead of waiting."""
import os, signal, sys, time
import launchpad
def left():
    seconds = launchpad.stop_by()
    return seconds if seconds is None else round(seconds / 100) * 100  # a machine may be slow
def on(signum, frame):
    print("asked to stop:", left(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, on)
print("left:", left(), flush=True)
if "fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        sys.exit(1)
elif "wait" not in sys.argv:
    sys.exit(0)
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    time.sleep(0.05)
