"""Every operation of torch.distributed against plain arithmetic: x dtype x shape x group x sync/async; prints the counts.

Run by each rank; the argument is the module whose `install()` makes the backend "mpi" known.
"""

import collections
import importlib
import json
import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED_ONLY = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
SHAPES = ["scalar", "empty", "vector", "matrix", "transposed", "strided", "long"]
Op = dist.ReduceOp
REDUCTIONS = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR]

counts = collections.Counter()


def wide(dtype):
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64


def laid_out(values, shape):
    """The values (1-d) in memory of that shape and order."""
    if shape == "transposed":
        return values.view(2, -1).t()
    if shape == "strided":
        room = torch.zeros(values.numel(), 3, dtype=values.dtype)
        room[:, 1] = values
        return room[:, 1]
    return values.view({"scalar": (), "matrix": (2, -1)}.get(shape, (-1,)))


def tensor(rank, dtype, shape):
    size = {"scalar": 1, "empty": 0, "vector": 7, "long": 70_000}.get(shape, 12)
    values = torch.arange(size) % 2 + 1 + rank % 3
    if dtype == torch.bool:
        values = (torch.arange(size) + rank) % 2
    if dtype.is_complex:
        values = torch.complex(values.double(), values.double() - 2)
    return laid_out(values.to(dtype), shape)


def reduced(tensors, op):
    """What the reduction of them must be."""
    dtype = tensors[0].dtype
    values = [t.to(wide(dtype)) for t in tensors]
    if dtype == torch.bool:
        truths = torch.stack(values)
        found = {Op.PRODUCT: truths.amin(0), Op.MIN: truths.amin(0), Op.BAND: truths.amin(0), Op.BXOR: truths.sum(0) % 2}
        return found.get(op, truths.amax(0)).to(dtype)
    result = values[0]
    for value in values[1:]:
        if op in (Op.SUM, Op.AVG):
            result = result + value
        elif op == Op.PRODUCT:
            result = result * value
        elif op in (Op.MIN, Op.MAX):
            result = torch.minimum(result, value) if op == Op.MIN else torch.maximum(result, value)
        else:
            result = {Op.BAND: result & value, Op.BOR: result | value, Op.BXOR: result ^ value}[op]
    if op == Op.AVG:
        mode = None if dtype.is_floating_point or dtype.is_complex else "trunc"
        result = torch.div(result, len(values), rounding_mode=mode)
    return result.to(dtype)


def meaningful(op, dtype):
    if dtype == torch.bool:
        return op != Op.AVG
    if dtype.is_complex:
        return op in (Op.SUM, Op.AVG)
    if dtype in (torch.uint16, torch.uint32, torch.uint64) and op == Op.AVG:
        return False  # torch can't divide them
    return op not in (Op.BAND, Op.BOR, Op.BXOR) or not dtype.is_floating_point


def same(got, want):
    got, want = got.reshape(-1), want.reshape(-1)
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if got.dtype in MOVED_ONLY:
        got, want = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    return torch.allclose(got.to(wide(got.dtype)), want.to(wide(want.dtype)), rtol=1e-6)


def check(name, got, want):
    for one, other in zip(got, want, strict=True):
        if not same(one, other):
            raise AssertionError(f"{name}: got {one}, expected {other}")
    counts[name.split()[0]] += 1


def finish(work, later):
    if later:
        work.wait()
        assert work.is_completed() and work.is_success()


def empty(dtype, shape):
    return torch.zeros_like(tensor(0, dtype, shape)) if dtype not in MOVED_ONLY else tensor(0, dtype, shape).clone()


def movements(ranks, me, group, dtype, shape, later):
    """The operations that only move."""
    size, mine = len(ranks), tensor(me, dtype, shape)
    everyone = [tensor(rank, dtype, shape) for rank in range(size)]
    what = f"{dtype} {shape} {ranks} async={later}"
    root = size - 1

    got = mine.clone() if shape != "transposed" else laid_out(mine.t().reshape(-1).clone(), shape)
    finish(dist.broadcast(got, group_src=root, group=group, async_op=later), later)
    check(f"broadcast {what}", [got], [everyone[root]])

    got = [empty(dtype, shape) for _ in ranks]
    finish(dist.all_gather(got, mine, group=group, async_op=later), later)
    check(f"all_gather {what}", got, everyone)

    got = torch.empty(size * mine.numel(), dtype=dtype)
    finish(dist.all_gather_into_tensor(got, mine.contiguous(), group=group, async_op=later), later)
    check(f"all_gather_into_tensor {what}", [got], [torch.cat([t.reshape(-1) for t in everyone])])

    got = [empty(dtype, shape) for _ in ranks] if me == root else None
    finish(dist.gather(mine, got, group_dst=root, group=group, async_op=later), later)
    check(f"gather {what}", got or [], everyone if me == root else [])

    got = empty(dtype, shape)
    finish(dist.scatter(got, everyone if me == root else None, group_src=root, group=group, async_op=later), later)
    check(f"scatter {what}", [got], [mine])

    got = [empty(dtype, shape) for _ in ranks]
    finish(dist.all_to_all(got, [mine] * size, group=group, async_op=later), later)
    check(f"all_to_all {what}", got, everyone)

    # Rank r sends r + 1 rows to everyone.
    sent = tensor(me, dtype, "vector")[:1].expand((me + 1) * size).contiguous()
    got = torch.empty(sum(range(1, size + 1)), dtype=dtype)
    splits = dict(output_split_sizes=list(range(1, size + 1)), input_split_sizes=[me + 1] * size)
    finish(dist.all_to_all_single(got, sent, **splits, group=group, async_op=later), later)
    want = torch.cat([tensor(rank, dtype, "vector")[:1].expand(rank + 1) for rank in range(size)])
    check(f"all_to_all_single {what}", [got], [want])

    if size > 1:
        got, following, before = empty(dtype, shape), (me + 1) % size, (me - 1) % size
        if later:
            ops = [
                dist.P2POp(dist.isend, mine, group=group, group_peer=following),
                dist.P2POp(dist.irecv, got, group=group, group_peer=before),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            check(f"batch_isend_irecv {what}", [got], [everyone[before]])
        else:
            work = dist.isend(mine, group_dst=following, group=group, tag=3)
            sender = dist.recv(got, group=group, tag=3)
            work.wait()
            assert sender == ranks[before]
            check(f"recv {what}", [got], [everyone[before]])


def reductions(ranks, me, group, dtype, shape, later, op):
    size, mine = len(ranks), tensor(me, dtype, shape)
    everyone = [tensor(rank, dtype, shape) for rank in range(size)]
    what = f"{op} {dtype} {shape} {ranks} async={later}"

    got = laid_out(mine.t().reshape(-1).clone(), shape) if shape == "transposed" else mine.clone()
    finish(dist.all_reduce(got, op, group=group, async_op=later), later)
    check(f"all_reduce {what}", [got], [reduced(everyone, op)])

    got = mine.clone()
    finish(dist.reduce(got, group_dst=0, op=op, group=group, async_op=later), later)
    check(f"reduce {what}", [got], [reduced(everyone, op) if me == 0 else mine])

    # Everyone's part for rank r is what rank (own + r) holds.
    parts = [[tensor(rank + place, dtype, shape) for place in range(size)] for rank in range(size)]
    want = reduced([parts[rank][me] for rank in range(size)], op)
    got = empty(dtype, shape)
    finish(dist.reduce_scatter(got, parts[me], op, group=group, async_op=later), later)
    check(f"reduce_scatter {what}", [got], [want])

    got = torch.empty(mine.numel(), dtype=dtype)
    whole = torch.cat([t.reshape(-1) for t in parts[me]])
    finish(dist.reduce_scatter_tensor(got, whole, op, group=group, async_op=later), later)
    check(f"reduce_scatter_tensor {what}", [got], [want])


def refused(group, dtype, op):
    try:
        dist.all_reduce(tensor(0, dtype, "vector"), op, group=group)
    except (ValueError, RuntimeError):
        counts["refused"] += 1
    else:
        raise AssertionError(f"{op} of {dtype} was not refused")


def odds(ranks, me, group):
    """What has no dtype or shape."""
    size = len(ranks)
    found = [None] * size
    dist.all_gather_object(found, {"rank": me}, group=group)
    assert found == [{"rank": rank} for rank in range(size)]
    sent = [f"from {ranks[0]}" if me == 0 else None]
    dist.broadcast_object_list(sent, group_src=0, group=group)
    assert sent == [f"from {ranks[0]}"]
    counts["objects"] += 2
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait()
    counts["barrier"] += 2
    many = [torch.full((3,), float(me + k)) for k in range(4)]
    with dist._coalescing_manager(group=group):
        for one in many:
            dist.all_reduce(one, group=group)
    check("all_reduce_coalesced", many, [torch.full((3,), float(sum(range(size)) + k * size)) for k in range(4)])
    scaled = torch.ones(3)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), group=group)
    check("premul_sum", [scaled], [torch.full((3,), size / 2)])
    future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
    assert torch.equal(future.then(lambda done: done.value()[0] * 2).wait(), torch.full((2,), 2.0 * size))
    counts["future"] += 1
    whole = torch.zeros(2 * size)
    part = whole[2 * me : 2 * me + 2].fill_(me)
    dist.all_gather_into_tensor(whole, part, group=group)
    check("all_gather_in_place", [whole], [torch.arange(float(size)).repeat_interleave(2)])
    whole = torch.arange(2.0 * size)
    dist.reduce_scatter_tensor(whole[2 * me : 2 * me + 2], whole, group=group)
    want = torch.arange(2.0 * size)
    want[2 * me : 2 * me + 2] *= size
    check("reduce_scatter_in_place", [whole], [want])
    negative = torch.tensor([1 + 2j]).conj().imag  # torch keeps the sign as a flag beside the memory
    dist.broadcast(negative, group_src=0, group=group)
    check("broadcast_negative", [negative], [torch.tensor([-2.0])])


def chosen(shape, dtype):
    """Each dtype in each order of memory; each shape with a dtype of each kind; what is long with floats."""
    if shape == "long":
        return dtype in FLOATS
    return shape in ("vector", "transposed") or dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64)


def contract(ranks, group, ways):
    me = ranks.index(dist.get_rank())
    assert dist.get_world_size(group) == len(ranks) and dist.get_rank(group) == me
    for later in ways:
        for shape in SHAPES:
            for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *MOVED_ONLY]:
                if not chosen(shape, dtype):
                    continue
                movements(ranks, me, group, dtype, shape, later)
                for op in REDUCTIONS if dtype not in MOVED_ONLY else []:
                    if meaningful(op, dtype):
                        reductions(ranks, me, group, dtype, shape, later, op)
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in REDUCTIONS:
            if not meaningful(op, dtype):
                refused(group, dtype, op)
    odds(ranks, me, group)


def main():
    importlib.import_module(sys.argv[1]).install()
    dist.init_process_group("mpi")
    assert dist.get_backend() == "mpi" and dist.is_mpi_available()
    world = list(range(dist.get_world_size()))
    contract(world, dist.group.WORLD, (False, True))
    for ranks, later in [(world[:-1], True), (world[::2], False)] if len(world) > 2 else []:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            contract(ranks, group, [later])
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"checks": sum(counts.values()), **dict(sorted(counts.items()))}))
    dist.destroy_process_group()


main()
