"""Says how long it has, and again when it is asked to stop. `fail`: the first attempt of two ranks fails instead."""
import os, signal, sys, time
import launchpad
def left():
    seconds = launchpad.stop_by()
    return seconds if seconds is None else round(seconds / 100) * 100  # a machine may be slow
def on(signum, frame):
    sys.stdout.write(f"asked to stop: {left()}\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, on)
sys.stdout.write(f"left: {left()}\n")
deadline = time.monotonic() + 600
if "fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        open("began", "w").close()
    else:
        while not os.path.exists("began"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sys.exit(1)
elif "wait" not in sys.argv:
    sys.exit(0)
while time.monotonic() < deadline:
    time.sleep(0.05)
