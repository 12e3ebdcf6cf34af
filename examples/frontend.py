"""A script that reads its rank itself, from torch's variables or from MPI's, as its own option says.

launchpad run --nproc 4 examples/frontend.py --frontend torch
launchpad run --backend mpi --nproc 4 examples/frontend.py --frontend mpi
mpiexec -n 4 python examples/frontend.py --frontend mpi
"""

import argparse
import os

import torch

from launchpad import collectives as dist

# Of each frontend: a backend, and the variables of its launchers that tell a rank and how many there are.
FRONTENDS = {
    "torch": ("gloo", [("RANK", "WORLD_SIZE")]),
    "mpi": ("mpi", [("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--frontend", choices=FRONTENDS, default="torch")
frontend = parser.parse_args().frontend

backend, variables = FRONTENDS[frontend]
told = [names for names in variables if all(name in os.environ for name in names)]
if not told:
    parser.error(f"no launcher has set {' or '.join(rank for rank, _ in variables)}: start it as --help tells")
rank, size = (int(os.environ[name]) for name in told[0])

# What a script passes must agree with what the launcher told. `init_process_group()` alone would find it out, too.
dist.init_process_group(backend, rank=rank, world_size=size)
tensor = torch.tensor([rank])
dist.all_reduce(tensor)
print(f"rank {rank} of {size} by {told[0][0]}, over {dist.get_backend()}: the sum of all ranks is {tensor.item()}")
dist.destroy_process_group()
