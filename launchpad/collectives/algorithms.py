"""Textbook collective algorithms, to read, time and learn from, built only from point-to-point messages.

They work in the world and in any group, over gloo, mpi and nccl, for any number of ranks, any dtype that torch can add,
and tensors of any shape, strided ones too. Costs follow the α–β–γ model, for n ranks and a tensor of m bytes: α seconds
per message, β seconds per byte sent, γ seconds per byte added. A rank can send one message and receive one at the same
time, and all ranks work in parallel.

All of them follow three rules: a buffer is not written to until its send completes; a buffer is not touched until its
receive completes; nothing is in flight when the function returns.

Every rank of the group calls the function with tensors of the same shape and dtype; a rank outside the group returns
immediately.
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
    """Fill `recv` with the sum of all ranks' `send` tensors, each of which travels once around the ring.

    `send` is unchanged unless it shares memory with `recv`. What arrived from the left is forwarded to the right from
    one buffer while the next tensor arrives in another. It is added to the sum during the send, which only reads it.

    Each rank adds in its own order, so ranks may differ in the last bits of a floating-point sum.

    Cost: (n - 1) (α + m β + m γ), n / 2 times the bytes of `chunked_ring_all_reduce`.
    Source: S. Arnold's tutorial "Writing Distributed Applications with PyTorch", "Our Own Ring-Allreduce". Copies of it
    add the caller's `send` or `recv` instead of what just arrived, or refill a buffer before its send completes. The
    first makes the sum wrong, the second makes it wrong now and then. They also fail on 0-d tensors and may fail on
    strided ones.

    Raises ValueError if `send` and `recv` differ in shape or dtype, or are not dense.
    """
    _check_alike("ring_all_reduce", send, recv)
    peers = _peers(group)
    if peers is None:
        return
    outgoing, total = _flat(send), _flat(recv)
    if _share_memory(outgoing, total):
        outgoing = outgoing.clone()
    incoming, spare = torch.empty_like(outgoing), torch.empty_like(outgoing)
    total.copy_(outgoing)
    for step in range(peers.size - 1):
        works = peers.start(sends=[(outgoing, peers.right)], receives=[(incoming, peers.left)])
        if step > 0:
            total.add_(outgoing)
        _wait(works)
        # The caller's own tensor is sent in the first step only and is never used as a buffer.
        outgoing, incoming, spare = incoming, spare, incoming
    if peers.size > 1:
        total.add_(outgoing)
    _store(recv, total)


def chunked_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over all ranks, in place: a reduce-scatter, then an all-gather, of n chunks around the ring.

    No all-reduce sends fewer bytes. Chunk sizes differ by at most one element, and chunks may be empty. Each chunk's
    sum is completed on one rank and then copied, so the result is identical on all ranks.

    Cost: 2 (n - 1) α + 2 (n - 1) / n · m β + (n - 1) / n · m γ.
    Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
    Parallel and Distributed Computing 69 (2009).

    Raises ValueError if `tensor` is not dense.
    """
    _check_dense("chunked_ring_all_reduce", tensor)
    peers = _peers(group)
    if peers is None:
        return
    flat = _flat(tensor)
    chunks = flat.tensor_split(peers.size)
    buffer = torch.empty_like(chunks[0])
    # After step t, chunk (rank - t - 1) holds the sum of t + 2 ranks; after the last step, chunk rank + 1 is complete.
    for step in range(peers.size - 1):
        outgoing, partial = chunks[(peers.rank - step) % peers.size], chunks[(peers.rank - step - 1) % peers.size]
        incoming = buffer[: partial.numel()]
        _wait(peers.start(sends=[(outgoing, peers.right)], receives=[(incoming, peers.left)]))
        partial.add_(incoming)
    for step in range(peers.size - 1):
        outgoing, incoming = chunks[(peers.rank + 1 - step) % peers.size], chunks[(peers.rank - step) % peers.size]
        _wait(peers.start(sends=[(outgoing, peers.right)], receives=[(incoming, peers.left)]))
    _store(tensor, flat)


def recursive_doubling_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over all ranks, in place: pairs of ranks exchange their sums, at distances of 1, 2, 4 …

    It needs the fewest messages, so it is the best choice for short tensors. If n is not a power of two, some of the
    first ranks sit out: each hands its tensor to a neighbour beforehand and gets the result afterwards. Both ranks of a
    pair add the same two sums, so the result is identical on all ranks.

    Cost: ⌊log2 n⌋ (α + m β + m γ), plus 2 (α + m β) + m γ if n is not a power of two.
    Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
    International Journal of High Performance Computing Applications 19 (2005), 4.5.

    Raises ValueError if `tensor` is not dense.
    """
    _check_dense("recursive_doubling_all_reduce", tensor)
    peers = _peers(group)
    if peers is None:
        return
    flat = _flat(tensor)
    buffer = torch.empty_like(flat)
    power = 1 << (peers.size.bit_length() - 1)
    extra = peers.size - power  # how many ranks sit out: the even ones below 2 · extra
    paired = peers.rank < 2 * extra
    if paired and peers.rank % 2 == 0:
        _wait(peers.start(sends=[(flat, peers.rank + 1)]))
        _wait(peers.start(receives=[(flat, peers.rank + 1)]))
    else:
        if paired:
            _wait(peers.start(receives=[(buffer, peers.rank - 1)]))
            flat.add_(buffer)
        position = peers.rank // 2 if paired else peers.rank - extra
        distance = 1
        while distance < power:
            other = position ^ distance
            partner = 2 * other + 1 if other < extra else other + extra
            _wait(peers.start(sends=[(flat, partner)], receives=[(buffer, partner)]))
            flat.add_(buffer)
            distance *= 2
        if paired:
            _wait(peers.start(sends=[(flat, peers.rank - 1)]))
    _store(tensor, flat)


def tree_broadcast(tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Copy `tensor` from global rank `src` (default: the group's first rank) to all ranks, down a binomial tree.

    Every rank that has it sends it on, so the number of ranks that have it doubles in each round.

    Cost: ⌈log2 n⌉ (α + m β).
    Source: section 4.2 of the paper cited in `recursive_doubling_all_reduce`; the tree is in every MPI textbook.

    Raises ValueError if `src` is not in the group or `tensor` is not dense.
    """
    _check_dense("tree_broadcast", tensor)
    peers = _peers(group)
    if peers is None:
        return
    members = dist.get_process_group_ranks(group)
    if src is not None and src not in members:
        raise ValueError(f"tree_broadcast: rank {src} is not in the group, whose ranks are {members}")
    root = 0 if src is None else members.index(src)
    flat = _flat(tensor)
    position = (peers.rank - root) % peers.size  # renumbered so that the root is 0
    distance = 1
    while distance < peers.size and not position & distance:
        distance *= 2
    if position:
        _wait(peers.start(receives=[(flat, peers.rank - distance)]))
        _store(tensor, flat)
    while distance > 1:
        distance //= 2
        if position + distance < peers.size:  # the largest subtree first: it takes longest
            _wait(peers.start(sends=[(flat, peers.rank + distance)]))


def bruck_all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the i-th tensor of each rank's `tensor_list` with rank i's `tensor`; a rank's holdings double in each round.

    Cost: ⌈log2 n⌉ α + (n - 1) m β, for any n; a ring moves as many bytes in n - 1 messages.
    Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", IEEE Trans. on Parallel and Distributed Systems 8 (1997).

    Raises ValueError if `tensor_list` doesn't have one tensor per rank, if they differ from `tensor` in shape or dtype,
    or if any is not dense.
    """
    _check_alike("bruck_all_gather", tensor, *tensor_list)
    peers = _peers(group)
    if peers is None:
        return
    if len(tensor_list) != peers.size:
        raise ValueError(f"bruck_all_gather: tensor_list has {len(tensor_list)} tensors for {peers.size} ranks")
    own = _flat(tensor)
    length = own.numel()
    blocks = own.new_empty(peers.size * length)  # block i comes from the i-th rank to the right
    blocks[:length] = own
    have = 1
    while have < peers.size:
        more = min(have, peers.size - have)
        outgoing, incoming = blocks[: more * length], blocks[have * length : (have + more) * length]
        _wait(peers.start(sends=[(outgoing, peers.rank - have)], receives=[(incoming, peers.rank + have)]))
        have += more
    for position, output in enumerate(tensor_list):
        block = (position - peers.rank) % peers.size
        _store(output, blocks[block * length : (block + 1) * length])


def __getattr__(name: str) -> Any:
    # torch.distributed.algorithms (`join`, `ddp_comm_hooks` …) must be reachable under this name too.
    try:
        return getattr(torch.distributed.algorithms, name)
    except AttributeError:
        raise AttributeError(f"neither {__name__} nor torch.distributed.algorithms has {name!r}") from None


class _Peers(NamedTuple):
    """This rank's position in a group. Ranks are numbered within the group; out-of-range ones wrap around."""

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
        """Start all sends and receives in one batch; NCCL would otherwise finish the first before it starts the next.

        Both ends know a message's length, so empty ones aren't sent.
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


def _check_dense(name: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: tensors must be dense, not {tensor.layout}")


def _check_alike(name: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    _check_dense(name, first, *others)
    for other in others:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"{name}: tensors must have the same shape and dtype, not {tuple(first.shape)} {first.dtype} and "
                f"{tuple(other.shape)} {other.dtype}"
            )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a 1-d tensor: a view of the tensor's memory if it is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _store(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy `flat` into `tensor`, unless `flat` is a view of it."""
    if not tensor.is_contiguous() or not _share_memory(tensor, flat):
        tensor.detach().copy_(flat.view(tensor.shape))
