"""Read the rank from torch's or MPI's variables, as the script's own option says, and pass it on.

launchpad run --nproc 4 examples/frontend.py --frontend torch
launchpad run --backend mpi --nproc 4 examples/frontend.py --frontend mpi
mpiexec -n 4 python examples/frontend.py --frontend mpi
"""

import argparse
import os

import torch

from launchpad import collectives as dist

# For each frontend: the backend, and the variables in which its launchers set rank and world size.
FRONTENDS = {
    "torch": ("gloo", [("RANK", "WORLD_SIZE")]),
    "mpi": ("mpi", [("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--frontend", choices=FRONTENDS, default="torch")
frontend = parser.parse_args().frontend

backend, variables = FRONTENDS[frontend]
found = [names for names in variables if all(name in os.environ for name in names)]
if not found:
    parser.error(f"no launcher has set {' or '.join(rank for rank, _ in variables)}: start it as --help says")
rank, size = (int(os.environ[name]) for name in found[0])

# What a script passes must agree with the launcher. Without arguments, `init_process_group()` finds it out itself.
dist.init_process_group(backend, rank=rank, world_size=size)
tensor = torch.tensor([rank])
dist.all_reduce(tensor)
print(f"rank {rank} of {size} by {found[0][0]}, over {dist.get_backend()}: the sum of all ranks is {tensor.item()}")
dist.destroy_process_group()
