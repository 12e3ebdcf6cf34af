"""Synchronous SGD: split each batch over the ranks and average the gradients. It needs scikit-learn.

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
    sys.exit("the data comes from scikit-learn: pip install scikit-learn")

EPOCHS, BATCH, TESTED = 10, 64, 360

dist.init_process_group(sys.argv[1] if sys.argv[1:] else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)

# 1797 handwritten digits of 8 by 8 pixels, which come with scikit-learn, shuffled alike on all ranks by the same seed.
# In double precision, the order of a sum only affects the 12th digit of a parameter.
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images, labels = (torch.from_numpy(array)[order] for array in (digits.data / 16, digits.target))
train, test = slice(TESTED, None), slice(0, TESTED)


def new_model() -> torch.nn.Module:
    """The same parameters each time, on each rank."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()


def average_gradients(model: torch.nn.Module, share: float) -> None:
    """Replace the gradients by the whole batch's: the mean over all ranks, weighted by their shares of the batch."""
    for parameter in model.parameters():
        parameter.grad *= share
        dist.all_reduce(parameter.grad)


def learn(model: torch.nn.Module, rank: int, size: int) -> torch.nn.Module:
    """Train on this rank's part of each batch: every `size`-th digit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(EPOCHS):
        for batch_images, batch_labels in zip(images[train].split(BATCH), labels[train].split(BATCH), strict=True):
            my_images, my_labels = batch_images[rank::size], batch_labels[rank::size]
            optimizer.zero_grad()
            # Not the built-in mean: a rank may get nothing of a short last batch, and the mean of nothing is NaN.
            loss = cross_entropy(model(my_images), my_labels, reduction="sum") / max(len(my_labels), 1)
            loss.backward()
            if size > 1:
                average_gradients(model, len(my_labels) / len(batch_labels))
            optimizer.step()
    return model


model = learn(new_model(), rank, size)

# All ranks have made the same steps. Rank 0 repeats the training alone and compares.
if rank == 0:
    accuracy = (model(images[test]).argmax(1) == labels[test]).double().mean().item()
    print(f"test accuracy {accuracy:.1%} with {size} ranks")
    alone = learn(new_model(), 0, 1)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    assert difference < 1e-9, difference
    print("the parameters match those of a single process, up to rounding")

dist.destroy_process_group()
