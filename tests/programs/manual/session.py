import torch

import launchpad
from launchpad import collectives as dist


def setup(size):
    global weights
    weights = torch.ones(size)


def step(rate):
    global weights
    dist.all_reduce(weights)
    weights *= rate
    return weights.sum().item()


with launchpad.ranks(4, backend="gloo") as ranks:
    ranks.run(setup, 3)
    print(ranks.run(step, 0.5))
    print(ranks.run(step, 0.5)[0])
