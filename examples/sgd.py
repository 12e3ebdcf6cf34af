"""Synchronous SGD: the data is partitioned over the ranks, and the gradients are averaged. It needs scikit-learn.

Run it: launchpad run --nproc 4 examples/sgd.py
Over MPI: launchpad run --backend mpi --nproc 4 examples/sgd.py mpi
"""

import sys

import torch
from torch.nn.functional import cross_entropy

from launchpad import collectives as dist

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("the data is scikit-learn's: pip install scikit-learn")

EPOCHS, BATCH, TESTED = 10, 64, 360

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)

# 1797 handwritten digits of 8 by 8 pixels, which come with the package. All ranks shuffle them alike, by the same seed.
# Double precision, so that the order of a sum makes no more than the 12th digit of a parameter.
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images, labels = (torch.from_numpy(array)[order] for array in (digits.data / 16, digits.target))
train, test = slice(TESTED, None), slice(0, TESTED)


def new_model() -> torch.nn.Module:
    """The same parameters each time, on each rank."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()


def average_gradients(model: torch.nn.Module, share: float) -> None:
    """What one process has for the whole batch: the mean of the ranks' gradients, by their shares of the batch."""
    for parameter in model.parameters():
        parameter.grad *= share
        dist.all_reduce(parameter.grad)


def learn(model: torch.nn.Module, rank: int, size: int) -> torch.nn.Module:
    """Train on the part that is this rank's: of each batch, one digit in `size`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(EPOCHS):
        for batch_images, batch_labels in zip(images[train].split(BATCH), labels[train].split(BATCH), strict=True):
            my_images, my_labels = batch_images[rank::size], batch_labels[rank::size]
            optimizer.zero_grad()
            # The sum of nothing is 0, where the mean of nothing is not a number: a last batch may be short.
            loss = cross_entropy(model(my_images), my_labels, reduction="sum") / max(len(my_labels), 1)
            loss.backward()
            if size > 1:
                average_gradients(model, len(my_labels) / len(batch_labels))
            optimizer.step()
    return model


model = learn(new_model(), rank, size)

# All ranks have made the same steps. Rank 0 also does it alone, and compares.
if rank == 0:
    right = (model(images[test]).argmax(1) == labels[test]).double().mean().item()
    print(f"test accuracy {right:.1%} with {size} ranks")
    alone = learn(new_model(), 0, 1)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    assert difference < 1e-9, difference
    print("the parameters are those of one process, but for rounding")

dist.destroy_process_group()
