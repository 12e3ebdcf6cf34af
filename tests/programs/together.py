"""What launchpad.collectives does besides moving tensors: together.py WHAT …. Each rank prints what it found.

WHAT is a function's name, or NAME=ARGUMENT,….
"""
import os, sys
from datetime import timedelta

import torch
from launchpad import collectives as dist

def told(*words):
    """A line that no other rank's can end up in."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def add():
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return int(tensor)


def again():
    for turn in range(3):
        dist.init_process_group("gloo")
        told("turn", turn, "rank", dist.get_rank(), "of", dist.get_world_size(), dist.get_backend(), "sum", add())
        assert dist.group.WORLD is torch.distributed.group.WORLD
        dist.destroy_process_group()
    assert not dist.is_initialized()


def unnamed():
    dist.init_process_group()
    told("unnamed", dist.get_backend(), add())
    dist.destroy_process_group()


def method(url, given=""):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    places = {"rank": rank, "world_size": size} if given else {}
    dist.init_process_group("gloo", init_method=url, group_name="any", **places)
    told("at", url, given, "rank", dist.get_rank(), "sum", add())
    dist.destroy_process_group()


def objects():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * rank}
    all_of = [{"rank": one, "text": "x" * one} for one in range(size)]
    got = [None] * size
    dist.all_gather_object(got, mine)
    assert got == all_of
    got = [None] * size if rank == 1 else None
    dist.gather_object(mine, got, dst=1)
    assert got == (all_of if rank == 1 else None)
    got = [mine, rank]
    dist.broadcast_object_list(got, src=size - 1)
    assert got == [all_of[-1], size - 1]
    got = [None]
    dist.scatter_object_list(got, all_of if rank == 0 else None, src=0)
    assert got == [mine]
    if rank == 0:
        got, senders = [None, None], set()
        for _ in range(size - 1):
            sender = dist.recv_object_list(got)
            assert got == [all_of[sender], sender]
            senders.add(sender)
        assert senders == set(range(1, size))
        dist.barrier()
        assert dist.recv_object_list(got, src=1) == 1 and got == ["named", 1]
    else:
        dist.send_object_list([mine, rank], dst=0)
        dist.barrier()  # or the next one might be received from anybody
        if rank == 1:
            dist.send_object_list(["named", 1], dst=0)
    dist.monitored_barrier()
    told("objects", rank)
    dist.destroy_process_group()


def ddp():
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, wanted = torch.randn(12 * size, 5), torch.randn(12 * size, 2)

    def train(model, inputs, wanted):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def fresh(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    part = slice(12 * rank, 12 * (rank + 1))
    found = train(DistributedDataParallel(fresh(rank)), inputs[part], wanted[part])  # DDP takes rank 0's parameters
    torch.testing.assert_close(found, train(fresh(0), inputs, wanted))
    told("ddp", rank)
    dist.destroy_process_group()


def refusal(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def errors():
    from torch.distributed import all_reduce

    told("no group:", refusal(lambda: all_reduce(torch.ones(1))))
    told("nccl:", refusal(lambda: dist.init_process_group("nccl")))
    dist.init_process_group("GLOO", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    told("twice:", refusal(lambda: dist.init_process_group("gloo")))
    told("rank:", refusal(lambda: dist.send(torch.ones(1), size)))
    told("self:", refusal(lambda: dist.send(torch.ones(1), rank)))
    told("shape:", refusal(lambda: dist.all_gather([torch.ones(2)] * size, torch.ones(3))))
    told("dtype:", refusal(lambda: dist.all_gather([torch.ones(2)] * size, torch.ones(2).int())))
    told("list:", refusal(lambda: dist.scatter(torch.ones(2), [torch.ones(2)], src=rank)))
    told("no tensor:", refusal(lambda: dist.all_reduce([1.0])))
    told("name:", refusal(lambda: dist.no_such_thing))
    told("still:", add())
    dist.destroy_process_group()


def futures():
    """The work of an operation on strided tensors behaves as any other."""
    dist.init_process_group("gloo")
    tensor = torch.arange(6.0).reshape(2, 3).t()
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    future.wait()
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).t() * dist.get_world_size())
    assert work.wait() and work.is_completed() and work.is_success()
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).t() * dist.get_world_size())
    tensor = torch.ones(4)[::2]
    assert dist.all_reduce(tensor, async_op=True).wait(timeout=timedelta(seconds=30))
    assert tensor.tolist() == [dist.get_world_size()] * 2
    leaf = torch.full((2, 3), float(dist.get_rank())).t().requires_grad_()  # a parameter in channels_last, for example
    dist.broadcast(leaf, 1)
    assert (leaf == 1).all() and leaf.is_leaf
    right, left = ((dist.get_rank() + step) % dist.get_world_size() for step in (1, -1))
    came = torch.zeros(1)
    both = dist.isend(torch.ones(1), right), dist.irecv(came, left)
    assert all(work.wait(timeout=timedelta(seconds=30)) for work in both) and came.item() == 1
    told("futures", dist.get_rank())
    dist.destroy_process_group()


for word in sys.argv[1:]:
    name, _, given = word.partition("=")
    globals()[name](*given.split(",") if given else ())
