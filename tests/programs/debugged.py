"""Rank 0 stops at a breakpoint."""
import os
secret = 41
if os.environ["RANK"] == "0":
    breakpoint()
print("done", secret)
