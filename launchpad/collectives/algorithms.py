"""The textbook's collective algorithms, to read, to time and to learn from: messages between two ranks, nothing else.

They work in the world and in any group, over gloo, mpi and nccl, for each number of ranks and each dtype that torch
can add, on tensors of any shape, strided ones too. The costs are those of the α–β–γ model, for n ranks and a tensor
of m bytes: α s for a message however short, β s for each byte of it, γ s for each byte that is added to another; a rank
sends and receives one message at a time, and all ranks do so at once.

The rules of all of them: memory that is being sent is not written to before the send has ended; memory that is being
received is not touched before the receive has ended; nothing is under way when a function returns.

All ranks of the group call a function with tensors of the same shape and dtype; a rank outside it returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.algorithms

__all__ = [
    "bruck_all_gather",
    "chunked_ring_all_reduce",
    "recursive_doubling_all_reduce",
    "ring_all_reduce",
    "tree_broadcast",
]


def ring_all_reduce(send: torch.Tensor, recv: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `recv` with the sum of all ranks' `send`, which travel once around the ring.

    `send` is left as it is, unless it shares memory with `recv`. What came from the left is passed on to the right, out
    of one buffer while the next tensor comes into another, and added while it is under way: a send only reads.

    As each rank adds in an order of its own, ranks may differ in the last bits of a floating-point sum.

    Cost: (n - 1) (α + m β + m γ), n / 2 times the bytes of `chunked_ring_all_reduce`.
    Source: S. Arnold's tutorial "Writing Distributed Applications with PyTorch", "Our Own Ring-Allreduce". Copies of it
    add the caller's `send` or `recv` instead of what has just come, or refill a buffer whose send has not been waited
    for: the sum is then wrong, the second now and then. A 0-d tensor is an error there, and a strided one may be.

    Raises ValueError where `send` and `recv` differ in shape or dtype, or are not dense.
    """
    _alike("ring_all_reduce", send, recv)
    peers = _peers(group)
    if peers is None:
        return
    leaving, total = _flat(send), _flat(recv)
    if _share_memory(leaving, total):
        leaving = leaving.clone()
    coming, spare = torch.empty_like(leaving), torch.empty_like(leaving)
    total.copy_(leaving)
    for turn in range(peers.size - 1):
        works = peers.start(sends=[(leaving, peers.right)], receives=[(coming, peers.left)])
        if turn > 0:
            total.add_(leaving)
        _wait(works)
        # The caller's own tensor leaves in the first turn only, and never becomes a buffer.
        leaving, coming, spare = coming, spare, coming
    if peers.size > 1:
        total.add_(leaving)
    _store(recv, total)


def chunked_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over all ranks, in place: reduce-scatter, then all-gather, of n chunks around the ring.

    No all-reduce sends fewer bytes. The chunks are equal but for an element, and may be empty. Each is summed on one
    rank, and so the same on all.

    Cost: 2 (n - 1) α + 2 (n - 1) / n · m β + (n - 1) / n · m γ.
    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
    Parallel and Distributed Computing 69 (2009).

    Raises ValueError where `tensor` is not dense.
    """
    _dense("chunked_ring_all_reduce", tensor)
    peers = _peers(group)
    if peers is None:
        return
    flat = _flat(tensor)
    chunks = flat.tensor_split(peers.size)
    room = torch.empty_like(chunks[0])
    # After turn t a rank has in chunk (rank - t - 1) the sum of t + 2 ranks'; after the last, all of chunk rank + 1.
    for turn in range(peers.size - 1):
        leaving, growing = chunks[(peers.rank - turn) % peers.size], chunks[(peers.rank - turn - 1) % peers.size]
        coming = room[: growing.numel()]
        _wait(peers.start(sends=[(leaving, peers.right)], receives=[(coming, peers.left)]))
        growing.add_(coming)
    for turn in range(peers.size - 1):
        leaving, coming = chunks[(peers.rank + 1 - turn) % peers.size], chunks[(peers.rank - turn) % peers.size]
        _wait(peers.start(sends=[(leaving, peers.right)], receives=[(coming, peers.left)]))
    _store(tensor, flat)


def recursive_doubling_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over all ranks, in place: pairs exchange their sums, at distances of 1, 2, 4 …

    The fewest messages, so the best for short tensors. Where n is no power of two, the first ranks stand aside in
    pairs: one hands its tensor to the other before, and gets the sum after. Both of a pair add the same two sums, so
    the result is the same on all ranks.

    Cost: ⌊log2 n⌋ (α + m β + m γ), and 2 (α + m β) + m γ more where n is no power of two.
    Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
    International Journal of High Performance Computing Applications 19 (2005), 4.5.

    Raises ValueError where `tensor` is not dense.
    """
    _dense("recursive_doubling_all_reduce", tensor)
    peers = _peers(group)
    if peers is None:
        return
    flat = _flat(tensor)
    room = torch.empty_like(flat)
    power = 1 << (peers.size.bit_length() - 1)
    aside = peers.size - power  # so many pairs, which are the ranks below 2 · aside, send one of theirs aside
    paired = peers.rank < 2 * aside
    if paired and peers.rank % 2 == 0:
        _wait(peers.start(sends=[(flat, peers.rank + 1)]))
        _wait(peers.start(receives=[(flat, peers.rank + 1)]))
    else:
        if paired:
            _wait(peers.start(receives=[(room, peers.rank - 1)]))
            flat.add_(room)
        place = peers.rank // 2 if paired else peers.rank - aside
        distance = 1
        while distance < power:
            other = place ^ distance
            partner = 2 * other + 1 if other < aside else other + aside
            _wait(peers.start(sends=[(flat, partner)], receives=[(room, partner)]))
            flat.add_(room)
            distance *= 2
        if paired:
            _wait(peers.start(sends=[(flat, peers.rank - 1)]))
    _store(tensor, flat)


def tree_broadcast(tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensor` on all ranks with that of the global rank `src`, or of the group's first, down a binomial tree.

    Whoever has it sends it on, so that in each round twice as many have it.

    Cost: ⌈log2 n⌉ (α + m β).
    Source: as of `recursive_doubling_all_reduce`, 4.2; the tree is of every MPI textbook.

    Raises ValueError where `src` is not in the group, or `tensor` is not dense.
    """
    _dense("tree_broadcast", tensor)
    peers = _peers(group)
    if peers is None:
        return
    members = dist.get_process_group_ranks(group)
    if src is not None and src not in members:
        raise ValueError(f"tree_broadcast: there is no rank {src} in the group, whose ranks are {members}")
    root = 0 if src is None else members.index(src)
    flat = _flat(tensor)
    place = (peers.rank - root) % peers.size  # as though the root were rank 0
    distance = 1
    while distance < peers.size and not place & distance:
        distance *= 2
    if place:
        _wait(peers.start(receives=[(flat, peers.rank - distance)]))
        _store(tensor, flat)
    while distance > 1:
        distance //= 2
        if place + distance < peers.size:  # the largest of the subtrees first: it has the longest way to go
            _wait(peers.start(sends=[(flat, peers.rank + distance)]))


def bruck_all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the i-th of each rank's `tensor_list` with rank i's `tensor`; in each round a rank passes on what it has.

    Cost: ⌈log2 n⌉ α + (n - 1) m β, for any n; a ring takes as many bytes and n - 1 messages.
    Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE Trans. on Parallel and Distributed Systems 8 (1997).

    Raises ValueError where `tensor_list` has not one tensor for each rank, all like `tensor` in shape and dtype, or one
    is not dense.
    """
    _alike("bruck_all_gather", tensor, *tensor_list)
    peers = _peers(group)
    if peers is None:
        return
    if len(tensor_list) != peers.size:
        raise ValueError(f"bruck_all_gather: {len(tensor_list)} tensors in the list, for {peers.size} ranks")
    own = _flat(tensor)
    length = own.numel()
    blocks = own.new_empty(peers.size * length)  # block i is that of the i-th rank to the right
    blocks[:length] = own
    have = 1
    while have < peers.size:
        more = min(have, peers.size - have)
        leaving, coming = blocks[: more * length], blocks[have * length : (have + more) * length]
        _wait(peers.start(sends=[(leaving, peers.rank - have)], receives=[(coming, peers.rank + have)]))
        have += more
    for place, output in enumerate(tensor_list):
        block = (place - peers.rank) % peers.size
        _store(output, blocks[block * length : (block + 1) * length])


def __getattr__(name: str) -> Any:
    # torch.distributed.algorithms (`join`, `ddp_comm_hooks` …) goes by this name too, and all that torch has is here.
    try:
        return getattr(torch.distributed.algorithms, name)
    except AttributeError:
        raise AttributeError(f"neither {__name__} nor torch.distributed.algorithms has {name!r}") from None


class _Peers(NamedTuple):
    """This rank's place in a group. Ranks are the group's, and count on around the ring beyond either end."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @property
    def left(self) -> int:
        return self.rank - 1

    @property
    def right(self) -> int:
        return self.rank + 1

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]] = (),
        receives: Sequence[tuple[torch.Tensor, int]] = (),
    ) -> list[dist.Work]:
        """Start sends to and receives from ranks, together: NCCL would wait for the first before it starts the second.

        Both ends know how long a message is, so an empty one isn't sent.
        """
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=rank % self.size)
            for operation, several in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, rank in several
            if tensor.numel()
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []


def _peers(group: dist.ProcessGroup | None) -> _Peers | None:
    rank = dist.get_rank(group)
    return _Peers(group, rank, dist.get_world_size(group)) if rank >= 0 else None


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _dense(name: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: dense tensors only, not {tensor.layout}")


def _alike(name: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    _dense(name, first, *others)
    for other in others:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{name}: tensors of one shape and dtype are needed, not {tuple(first.shape)} {first.dtype} and "
                f"{tuple(other.shape)} {other.dtype}"
            )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row: the tensor's own memory where they are one, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _store(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Put the elements where they are wanted, unless they are there."""
    if not tensor.is_contiguous() or not _share_memory(tensor, flat):
        tensor.detach().copy_(flat.view(tensor.shape))
