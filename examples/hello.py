"""Print which rank this is. Run it: launchpad run --nproc 4 examples/hello.py"""

import os
import socket

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"hello from rank {rank} of {world}, process {os.getpid()} on {socket.gethostname()}")
