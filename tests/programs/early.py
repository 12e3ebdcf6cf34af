"""The API of torch 0.1 to 1.x, used as programs of that time do: early.py BACKEND WHAT. Each rank prints "done"."""
import os
import sys
import time
import warnings

import torch
from launchpad import collectives as dist

BACKEND, WHAT = sys.argv[1:3]
PAIRS = 2  # tensors on each rank, as if it had that many GPUs


def said(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def noted(call):
    """A call's result and its warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call()
    return result, [(note.category.__name__, str(note.message).partition(" ")[0], note.filename) for note in found]


def names():
    rank, size = dist.get_rank(), dist.get_world_size()
    op, notes = noted(lambda: dist.reduce_op.SUM)
    assert op == dist.ReduceOp.SUM and notes == [("FutureWarning", "reduce_op.SUM", __file__)], notes
    with warnings.catch_warnings(action="ignore"):
        for name, wanted in (("SUM", size * (size + 1) / 2), ("MAX", size), ("MIN", 1)):
            tensor = torch.full((3,), rank + 1.0)
            dist.all_reduce(tensor, op=getattr(dist.reduce_op, name), group=dist.group.WORLD)
            assert tensor.tolist() == [wanted] * 3, name
        tensor = torch.full((2,), 2.0)
        dist.reduce(tensor, 0, op=dist.reduce_op.PRODUCT)
        assert rank or tensor.tolist() == [2.0**size] * 2
    assert said(lambda: dist.reduce_op.MEDIAN).startswith("AttributeError: there is no reduction 'MEDIAN'")
    assert dist.get_backend() == {"gloo": dist.dist_backend.GLOO, "mpi": dist.dist_backend.MPI}[BACKEND]
    assert noted(lambda: dist._clear_group_cache(dist.group.WORLD))[1][0][1:] == ("_clear_group_cache", __file__)
    assert noted(lambda: dist._register_stream(None))[1][0][1] == "_register_stream"
    assert "torch.distributed.rpc" in said(lambda: dist.init_master_worker("tcp", init_method="env://"))
    assert dist.algorithms.join.Join is torch.distributed.algorithms.Join


def lists():
    """One rank passes the list; it doesn't have to name itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2,), float(rank))
    last = size - 1
    # The old way: the others name the root, the root doesn't.
    if rank == last:
        parts = [torch.empty(2) for _ in range(size)]
        dist.gather(mine, gather_list=parts)
        assert [part.tolist() for part in parts] == [[float(r)] * 2 for r in range(size)]
        dist.scatter(mine, scatter_list=[torch.full((2,), 10.0 + r) for r in range(size)])
    else:
        dist.gather(mine, dst=last)
        dist.scatter(mine, src=last)
    assert mine.tolist() == [10.0 + rank] * 2
    # No rank names it: the root is rank 0.
    parts = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gather_list=parts)
    assert rank or torch.stack(parts).sum() == 2 * sum(10.0 + r for r in range(size))
    dist.scatter(mine, scatter_list=parts)
    assert mine.tolist() == [10.0 + rank] * 2
    # All ranks name it.
    parts = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(mine, dst=1, gather_list=parts)
    dist.scatter(mine, src=1, scatter_list=parts)
    group = dist.new_group([1, last])
    if rank in (1, last):
        parts = [torch.empty(2) for _ in range(2)]
        if rank == last:
            dist.gather(mine, gather_list=parts, group=group)
            assert parts[0].tolist() == [11.0, 11.0]
        else:
            dist.gather(mine, dst=last, group=group)


def requests():
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    coming = torch.zeros(3)
    first, second = dist.isend(torch.full((3,), float(rank)), right), dist.irecv(coming, src=left)
    while not (first.is_completed() and second.is_completed()):
        time.sleep(0.001)
    assert second.wait() and first.wait() and second.wait(), "a second wait works too"
    assert coming.tolist() == [left] * 3
    # Nothing has been sent yet: the receive reports that, and completes later.
    late = dist.irecv(coming, left)
    for _ in range(100):
        assert not late.is_completed()
    dist.barrier()
    sent = dist.isend(torch.full((3,), 7.0), right)
    assert late.wait() and sent.wait() and late.is_completed() and late.is_success() and late.exception() is None
    assert coming.tolist() == [7.0] * 3
    pair = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), right), dist.P2POp(dist.irecv, coming, left)]
    assert all(isinstance(one, torch.distributed.P2POp) for one in pair)
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    assert coming.tolist() == [left] * 3
    assert "Invalid" in said(lambda: dist.P2POp(dist.send, coming, left))


def ours(rank, count=PAIRS, scale=1):
    """A rank's list of tensors: [1 + 2 · rank], [2 + 2 · rank]."""
    return [torch.full((2, 2), float(scale * (1 + rank * PAIRS + j))) for j in range(count)]


def multigpu():
    rank, size = dist.get_rank(), dist.get_world_size()
    all_of = [tensor for r in range(size) for tensor in ours(r)]
    for is_async in (False, True):

        def done(work, is_async=is_async):
            assert (work is not None) == is_async
            assert work is None or work.wait()

        tensors = ours(rank)
        done(dist.broadcast_multigpu(tensors, size - 1, async_op=is_async, src_tensor=1))
        assert all(torch.equal(tensor, all_of[-1]) for tensor in tensors)
        for op, wanted in (
            (dist.ReduceOp.SUM, sum(all_of)),
            (dist.ReduceOp.MAX, all_of[-1]),
            (dist.ReduceOp.MIN, all_of[0]),
            (dist.ReduceOp.PRODUCT, torch.stack(all_of).prod(0)),
            (dist.ReduceOp.AVG, sum(all_of) / len(all_of)),
        ):
            tensors = ours(rank)
            done(dist.all_reduce_multigpu(tensors, op, async_op=is_async))
            assert all(torch.allclose(tensor, wanted) for tensor in tensors), op
            tensors = ours(rank)
            done(dist.reduce_multigpu(tensors, 1, op, async_op=is_async, dst_tensor=1))
            assert torch.equal(tensors[0], ours(rank)[0])
            assert torch.allclose(tensors[1], wanted if rank == 1 else ours(rank)[1]), op
        bits = [torch.tensor([1 << (rank * PAIRS + j)]) for j in range(PAIRS)]
        dist.all_reduce_multigpu(bits, dist.ReduceOp.BOR)
        assert bits[0].item() == (1 << (size * PAIRS)) - 1
        outputs = [[torch.empty(2, 2).t() for _ in range(size * PAIRS)] for _ in range(PAIRS)]
        done(dist.all_gather_multigpu(outputs, ours(rank), async_op=is_async))
        for output in outputs:
            for sender in range(size):
                for j in range(PAIRS):
                    assert torch.equal(output[sender * PAIRS + j], ours(sender)[j])
        inputs = [[torch.full((2,), float(10 * k + i + rank)) for k in range(size * PAIRS)] for i in range(PAIRS)]
        results = [torch.empty(2) for _ in range(PAIRS)]
        done(dist.reduce_scatter_multigpu(results, inputs, async_op=is_async))
        for j, result in enumerate(results):
            wanted = sum(10 * (rank * PAIRS + j) + i + r for i in range(PAIRS) for r in range(size))
            assert result.tolist() == [float(wanted)] * 2
    group = dist.new_group([0, size - 1])
    tensors = ours(rank)
    dist.all_reduce_multigpu(tensors, group=group)
    assert rank not in (0, size - 1) or torch.equal(tensors[0], sum(ours(0)) + sum(ours(size - 1)))
    assert rank in (0, size - 1) or torch.equal(tensors[0], ours(rank)[0])
    assert said(lambda: dist.all_reduce_multigpu([])).startswith("ValueError: all_reduce_multigpu: the tensors in a list")
    assert "AVG, PRODUCT" in said(lambda: dist.all_reduce_multigpu(ours(rank), dist.ReduceOp.PREMUL_SUM))
    assert f"2 lists of {2 * size} tensors" in said(lambda: dist.all_gather_multigpu([[]], ours(rank)))
    assert "use SUM" in said(lambda: dist.all_reduce_multigpu([torch.ones(1).int()], dist.ReduceOp.AVG))


def run(rank, size):
    assert (rank, size, dist.get_backend()) == (dist.get_rank(), dist.get_world_size(), BACKEND)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


if WHAT == "function":
    where = dist.world_of(os.environ)
    rank, size = map(int, sys.argv[3:]) if sys.argv[3:] else where[:2]
    # Twice if the launcher serves the store. Otherwise a rank may still find the first group's store.
    for _ in range(1 if sys.argv[3:] else 2):
        assert dist.init_process(rank, size, run, BACKEND) == size
        assert not dist.is_initialized()
elif WHAT == "unranked":  # early.py BACKEND unranked URL SIZE
    dist.init_process_group(BACKEND, init_method=sys.argv[3], world_size=int(sys.argv[4]), group_name="any")
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    assert ranks == list(range(int(sys.argv[4])))
    dist.barrier()
    dist.destroy_process_group()
elif WHAT == "tcp":
    _, notes = noted(lambda: dist.init_process_group("tcp"))
    assert [note[1] for note in notes] == ['backend="tcp"'] and dist.get_backend() == "gloo", notes
    dist.barrier()  # gloo connects to a rank that may have left otherwise
    dist.destroy_process_group()
else:
    assert said(lambda: dist._register_stream(None)).startswith("RuntimeError: _register_stream: there is no process group")
    dist.init_process_group(BACKEND)
    for part in (names, lists, requests, multigpu):
        part()
    dist.barrier()
    dist.destroy_process_group()
os.write(1, b"done\n")
