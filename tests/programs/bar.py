"""A progress bar as tqdm draws it, and lines of other ranks between."""
import os, sys, time
if os.environ["RANK"] == "0":
    for i in range(0, 101, 20):
        sys.stderr.write(f"\r{i:3d}%|{'#' * (i // 10):10}|")
        sys.stderr.flush()
        time.sleep(0.15)
    sys.stderr.write("\n")
