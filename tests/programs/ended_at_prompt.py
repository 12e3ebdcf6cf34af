"""Rank 0 stands at a breakpoint when rank 1 fails."""
import os, sys, time
if os.environ["RANK"] == "0":
    open("at prompt", "w").close()
    breakpoint()
while not os.path.exists("at prompt"):
    time.sleep(0.01)
time.sleep(0.5)  # the prompt follows at once; nothing that a test could wait for says that it stands
sys.exit(9)
