"""The rank that is named, or else rank 0, stops at a breakpoint."""
import os, sys
secret = 41
if os.environ["RANK"] == (sys.argv[1] if len(sys.argv) > 1 else "0"):
    breakpoint()
print("done", secret)
