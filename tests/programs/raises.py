"""Rank 0 raises; the others wait."""
import os, time
if os.environ["RANK"] == "0":
    raise ValueError("the learning rate is negative")
time.sleep(600)
