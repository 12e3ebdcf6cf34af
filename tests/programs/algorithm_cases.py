"""Cases for launchpad.collectives.algorithms: what each has to give, by plain arithmetic, for each dtype and shape.

Imported by ranks only, as it imports torch.
"""

from functools import cache
from itertools import product

import torch
import torch.distributed as td
from launchpad import collectives as dist
from launchpad.collectives import algorithms

DTYPES = (
    "float32 float64 float16 bfloat16 uint8 int8 int16 int32 int64 bool complex64 complex128 float8_e4m3fn float8_e5m2"
).split()
SHAPES = {
    "0-d": lambda: torch.empty(()),
    "one": lambda: torch.empty(1),
    "empty": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 3),
    "vector": lambda: torch.empty(7),
    "cube": lambda: torch.empty(2, 3, 4),
    "transposed": lambda: torch.empty(3, 5).t(),
    "strided": lambda: torch.empty(12)[1::2],
    "mixed": lambda: torch.empty(2, 3, 4).permute(2, 0, 1)[:, :, ::2],
    "large": lambda: torch.empty(20_011),
}
GAP = 3  # the value between the elements of a strided tensor


class Watched:
    """torch's batch_isend_irecv, but received data is only delivered in `wait`.

    Until then the receive buffer holds junk. Neither it nor the send buffer may change. So reading too early gives a
    wrong result, and writing too early an error here.
    """

    in_flight = 0

    def __init__(self, start):
        self.start = start

    def __call__(self, operations):
        works = []
        for operation in operations:
            own, receives = operation.tensor, operation.op is td.irecv
            if receives:
                junk(own)
            kept, Watched.in_flight = own.clone(), Watched.in_flight + 1
            there = torch.empty_like(own) if receives else kept
            other = td.P2POp(operation.op, there, group=operation.group, group_peer=operation.group_peer)
            works.append(Watch(self.start([other]), own, kept, there if receives else None))
        return works


class Watch:
    def __init__(self, works, own, kept, arriving):
        self.works, self.own, self.kept, self.arriving = works, own, kept, arriving

    def wait(self):
        for work in self.works:
            work.wait()
        assert same(self.own, self.kept), "a buffer was written to in flight"
        if self.arriving is not None:
            self.own.copy_(self.arriving)
        Watched.in_flight -= 1


def junk(tensor):
    tensor.view(torch.uint8).fill_(0 if tensor.dtype is torch.bool else 0x55)


def same(one, other):
    """Compare bits, as junk may be NaN."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def room(dtype, shape):
    """An unset tensor, and the whole memory that it is a view of."""
    like = SHAPES[shape]()
    whole = torch.full((like.untyped_storage().nbytes() // 4,), GAP).to(dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset()), whole


@cache
def number(rank, shape):
    """The rank's values, in int64; sums of eight ranks are exact in every dtype."""
    tensor = SHAPES[shape]()
    return ((torch.arange(tensor.numel()) * 7 + rank * 3) % 5).reshape(tensor.shape)


def value(rank, dtype, shape):
    """A rank's tensor, and the whole memory that it is a view of."""
    tensor, whole = room(dtype, shape)
    tensor.copy_(of(number(rank, shape), dtype))
    return tensor, whole


def of(numbers, dtype):
    return (numbers * (1 + 2j)).to(dtype) if dtype.is_complex else numbers.to(dtype)


@cache
def sum_of(ranks, dtype, shape):
    return of(sum(number(rank, shape) for rank in ranks), dtype)


def check(found, whole, wanted, what):
    assert same(found, wanted), f"{what}: {found} is not {wanted}"
    found.copy_(torch.full((), GAP).to(found.dtype))
    assert same(whole, torch.full(whole.shape, GAP).to(whole.dtype)), f"{what}: it wrote outside the tensor"


def ring(ranks, group, dtype, shape, me):
    send, kept = value(me, dtype, shape)
    kept = kept.clone()
    recv, whole = room(dtype, shape)
    algorithms.ring_all_reduce(send, recv, group)
    check(recv, whole, sum_of(ranks, dtype, shape), "ring_all_reduce")
    assert same(send, value(me, dtype, shape)[0]), "ring_all_reduce changed its input"
    both, whole = value(me, dtype, shape)
    algorithms.ring_all_reduce(both, both, group)
    check(both, whole, sum_of(ranks, dtype, shape), "ring_all_reduce in place")


def in_place(name):
    def case(ranks, group, dtype, shape, me):
        tensor, whole = value(me, dtype, shape)
        getattr(algorithms, name)(tensor, group=group)
        check(tensor, whole, sum_of(ranks, dtype, shape), name)

    return case


def broadcast(ranks, group, dtype, shape, me):
    for src in {None, ranks[-1], ranks[len(ranks) // 2]}:
        tensor, whole = value(me, dtype, shape)
        algorithms.tree_broadcast(tensor, src, group)
        check(tensor, whole, of(number(ranks[0] if src is None else src, shape), dtype), "tree_broadcast")


def gather(ranks, group, dtype, shape, me):
    tensor, whole = value(me, dtype, shape)
    parts = [room(dtype, shape) for _ in ranks]
    algorithms.bruck_all_gather([part for part, _ in parts], tensor, group)
    for rank, (part, memory) in zip(ranks, parts):
        check(part, memory, of(number(rank, shape), dtype), "bruck_all_gather")


SUMS = {
    "ring_all_reduce": ring,
    "chunked_ring_all_reduce": in_place("chunked_ring_all_reduce"),
    "recursive_doubling_all_reduce": in_place("recursive_doubling_all_reduce"),
}
COPIES = {"tree_broadcast": broadcast, "bruck_all_gather": gather}


def check_all(ranks, group, me, part, of):
    """Check one `of` so many parts of all pairs of dtype and shape; it includes each dtype and each shape."""
    for (row, dtype), (column, shape) in product(enumerate(DTYPES), enumerate(SHAPES)):
        if (row + column) % of != part % of:
            continue
        for name, case in {**SUMS, **COPIES}.items():
            if "float8" in dtype and name in SUMS:
                continue  # torch has no addition for it
            case(ranks, group, getattr(torch, dtype), shape, me)
            assert Watched.in_flight == 0, f"{name} left something in flight"


def check_same_bits(ranks, group):
    """Floating-point sums, which depend on the order, are identical on all ranks."""
    for name in ("chunked_ring_all_reduce", "recursive_doubling_all_reduce"):
        torch.manual_seed(dist.get_rank())
        tensor = torch.randn(101)
        getattr(algorithms, name)(tensor, group)
        gathered = [torch.empty(101) for _ in ranks]
        algorithms.bruck_all_gather(gathered, tensor, group)
        assert all(same(one, gathered[0]) for one in gathered), name


def careless(send, recv, group=None):
    """A ring that modifies its send buffer too early."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total, coming = send.clone(), torch.empty_like(send)
    works = td.batch_isend_irecv(
        [td.P2POp(td.irecv, coming, (rank - 1) % size, group), td.P2POp(td.isend, total, (rank + 1) % size, group)]
    )
    works[0].wait()
    total += coming
    works[1].wait()


def hasty(send, recv, group=None):
    """A ring that reads its receive buffer too early."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    recv.copy_(send)
    coming = torch.empty_like(send)
    works = td.batch_isend_irecv(
        [td.P2POp(td.irecv, coming, (rank - 1) % size, group), td.P2POp(td.isend, send, (rank + 1) % size, group)]
    )
    recv += coming
    for work in works:
        work.wait()
