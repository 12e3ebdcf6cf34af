"""What torch does wrong over gloo, or not at all: edges.py gloo|mpi|gloo-with-mpi, two ranks. Each prints "done"."""
import sys
import threading
import time
import warnings

import torch
from launchpad import collectives as dist

BACKEND = sys.argv[1]


def error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


dist.init_process_group(BACKEND.partition("-")[0])
rank = dist.get_rank()
one = torch.ones(1)

# Ranks that don't exist.
for name, call in {
    "isend": lambda: dist.isend(one, 7),
    "irecv": lambda: dist.irecv(one, -1),
    "recv_object_list": lambda: dist.recv_object_list([None], src=7),
    "send_object_list": lambda: dist.send_object_list([1], dst=7),
    "P2POp": lambda: dist.P2POp(dist.isend, one, 7),
}.items():
    assert error(call).startswith(f"ValueError: {name}: there is no rank "), error(call)

# One thread waits for a request while another one polls it.
request = dist.irecv(torch.zeros(1), 1 - rank)
waiter = threading.Thread(target=request.wait)
waiter.start()
time.sleep(0.1)
request.is_completed()
dist.send(one, 1 - rank)
waiter.join()
assert request.is_completed() and request.is_success()

# Work on strided tensors that is polled instead of waited for.
strided = torch.arange(6.0).reshape(3, 2)[:, 0]
work = dist.all_reduce(strided, async_op=True)
while not work.is_completed():
    time.sleep(0.01)
assert strided.tolist() == [0.0, 4.0, 8.0]

# Requests on lazily negated and on strided tensors.
if rank == 0:
    dist.send(torch.tensor([1.0, 2.0]), 1)
    dist.isend(torch.arange(8.0)[::4], 1).wait()
else:
    negated, strided = torch._neg_view(torch.zeros(2)), torch.zeros(4)
    dist.irecv(negated, 0).wait()
    dist.irecv(strided[::2], 0).wait()
    assert (negated.tolist(), strided.tolist()) == ([1.0, 2.0], [0.0, 0.0, 4.0, 0.0])

# Tensors that are only read may be expanded.
tensor = one.expand(3) if rank == 0 else torch.zeros(3)
dist.broadcast(tensor, 0)
assert tensor.tolist() == [1.0] * 3
tensor = one.expand(3) if rank == 1 else torch.zeros(3)
dist.reduce(tensor, 0)
assert tensor.tolist() == [1.0] * 3

# In place, and bools together.
tensor = torch.arange(4.0) + 10 * rank
dist.all_to_all_single(tensor, tensor)
assert tensor.tolist() == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
both = torch.tensor([True])
with warnings.catch_warnings(action="ignore"):  # torch says that it is deprecated
    dist.all_reduce_coalesced([both])
assert both.view(torch.uint8).tolist() == [1]

# Outside a group.
group = dist.new_group([0])
with warnings.catch_warnings(action="ignore"):
    assert rank == 0 or dist.recv(one, group=group, group_src=1) == -1

# A group of MPI beside a world of gloo, where MPI has started the ranks.
if BACKEND == "gloo-with-mpi":
    group = dist.new_group(backend="mpi")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert (dist.get_backend(group), tensor.tolist()) == ("mpi", [2.0])
print("done", flush=True)
dist.destroy_process_group()
