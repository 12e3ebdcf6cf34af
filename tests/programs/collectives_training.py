"""DDP, FSDP 1 and 2, a device mesh and DTensor: each must give the same weights as one process with the whole batch.

Run by each rank; the argument is the module whose `install()` registers the backend "mpi".
"""

import importlib
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
STEPS = 4


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def batches(size):
    torch.manual_seed(2)
    return [(torch.randn(size * 3, 8), torch.randn(size * 3, 4)) for _ in range(STEPS)]


def train(net, part=slice(None)):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, wanted in batches(dist.get_world_size()):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs[part]), wanted[part]).backward()
        optimizer.step()
    return net


def agree(name, got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    dist.barrier()
    if dist.get_rank() == 0:
        print(name, "agrees", flush=True)


def main():
    importlib.import_module(sys.argv[1]).install()
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(3 * rank, 3 * rank + 3)
    want = [p.detach() for p in train(model()).parameters()]

    agree("DDP", train(DistributedDataParallel(model(), bucket_cap_mb=0.001), part).parameters(), want)

    def averaged(_, bucket):  # a user's hook, with our future
        work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hooked = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    hooked.register_comm_hook(None, averaged)
    agree("DDP with a hook", train(hooked, part).parameters(), want)

    half = DistributedDataParallel(model().bfloat16())
    half(torch.ones(2, 8, dtype=torch.bfloat16) * rank).sum().backward()
    sums = [p.grad.clone() for p in half.parameters()]
    for grad in sums:
        dist.broadcast(grad, 0)
    agree("DDP in bfloat16", [p.grad for p in half.parameters()], sums)

    net = train(FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True), part)
    with FullyShardedDataParallel.summon_full_params(net):
        agree("FSDP 1", [p.detach().clone() for p in net.parameters()], want)

    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    agree("FSDP 2", [p.full_tensor().detach() for p in train(net, part).parameters()], want)

    if size == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        net = train(fully_shard(model(), mesh=grid), part)
        agree("HSDP", [p.full_tensor().detach() for p in net.parameters()], want)

    whole = torch.arange(float(size * 2 * 3)).view(size * 2, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    agree("DTensor gathered", [sharded.full_tensor()], [whole])
    agree("DTensor across", [sharded.redistribute(mesh, [Shard(1)]).full_tensor()], [whole])
    agree("DTensor summed", [sharded.sum(0).full_tensor()], [whole.sum(0)])
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    total = whole * sum(range(1, size + 1))
    agree("DTensor reduced", [partial.redistribute(mesh, [Replicate()]).to_local()], [total])
    scattered = partial.redistribute(mesh, [Shard(0)]).to_local()
    agree("DTensor reduced and scattered", [scattered], [total[2 * rank : 2 * rank + 2]])
    uneven = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    agree("DTensor unevenly", [(uneven * 2).full_tensor()], [torch.arange(7.0) * 2])
    dist.destroy_process_group()


main()
