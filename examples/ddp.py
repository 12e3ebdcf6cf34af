"""The training of sgd.py with torch's DistributedDataParallel, as you would really do it. It needs scikit-learn.

Run it: launchpad run --nproc 4 examples/ddp.py
Over MPI: launchpad run --backend mpi --nproc 4 examples/ddp.py mpi
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from launchpad import collectives as dist

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("the data comes from scikit-learn: pip install scikit-learn")

# By default the backend is nccl on GPUs and gloo on CPUs.
dist.init_process_group(sys.argv[1] if sys.argv[1:] else None)
rank, size = dist.get_rank(), dist.get_world_size()
device = "cuda" if "nccl" in dist.get_backend() else "cpu"
torch.set_num_threads(1)

digits = load_digits()
data = TensorDataset(torch.from_numpy(digits.data / 16).float(), torch.from_numpy(digits.target))
train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))

# The sampler gives each rank its own part of the data, reshuffled in each epoch.
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=64 // size or 1, sampler=sampler)

torch.manual_seed(rank)  # the seeds may differ: DDP copies rank 0's parameters to all ranks
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images.to(device)), labels.to(device)).backward()  # also averages the gradients
        optimizer.step()

# Each rank tests its part, and the counts are summed.
mine = torch.utils.data.Subset(test, range(rank, len(test), size))
counts = torch.zeros(2, device=device)
with torch.no_grad():
    for images, labels in DataLoader(mine, batch_size=256):
        predicted = model.module(images.to(device)).argmax(1)
        counts += torch.tensor([(predicted == labels.to(device)).sum(), len(labels)], device=device)
dist.all_reduce(counts)
if rank == 0:
    correct, total = counts.tolist()
    print(f"test accuracy {correct / total:.1%} on {total:g} digits with {size} ranks")

dist.destroy_process_group()
