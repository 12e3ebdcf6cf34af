"""Make shared memory with the test's name, which Python's own helper process removes once the rank is gone; then wait.

With "tidy" it removes it itself, and leaves.
"""
import os, sys, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(name=f"{os.environ['LAUNCHPAD_TEST']}-{os.environ['RANK']}", create=True, size=4096)
print("shared", flush=True)
if "tidy" in sys.argv:
    block.unlink()
    sys.exit()
time.sleep(600)
