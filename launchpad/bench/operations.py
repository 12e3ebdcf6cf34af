"""The operations that can be measured: the data, bus factor and cost model of each. Imports no torch.

To add a function, add a line to OPERATIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "all_reduce",
    "all_reduce_into",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_list",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
]
"""The layout of the data before and after; `patterns.py` creates it, calls the function on it and checks it."""

Model = Callable[[int], tuple[float, float, float]]
"""Maps the number of ranks to (a, b, c) in the time aα + bSβ + cSγ, in seconds. S is the size in bytes; α is a link's
latency and β its time per byte (R. Hockney, "The communication challenge for MPP", 1994); γ is the time to add a byte
(as in R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", 2005)."""

ALGORITHMS = "algorithms"


@dataclass(frozen=True)
class Operation:
    """A function to time."""

    kind: Kind
    function: str  # its name in launchpad.collectives; "algorithms.NAME" for one in its algorithms module
    model: Model | None = None
    usual: bool = True  # measured by default, without --op

    @property
    def shared(self) -> bool:
        """Whether the buffer is split into equal parts, one per rank."""
        return self.kind not in ("all_reduce", "all_reduce_into", "broadcast", "reduce", "send_recv", "barrier")

    @property
    def is_algorithm(self) -> bool:
        """Whether it is a textbook algorithm over send and recv."""
        return self.function.startswith(ALGORITHMS + ".")


def _doublings(ranks: int) -> int:
    """⌈log2 n⌉: the rounds until all ranks have what one had."""
    return (ranks - 1).bit_length()


def _recursive_doubling(ranks: int) -> tuple[float, float, float]:
    """⌊log2 n⌋ exchanges; if n is not a power of two, plus a message before (whose tensor is added) and one after."""
    exchanges = ranks.bit_length() - 1
    odd = ranks != 1 << exchanges
    return exchanges + 2 * odd, exchanges + 2 * odd, exchanges + odd


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", "all_reduce"),
    "ring_all_reduce": Operation("all_reduce_into", "algorithms.ring_all_reduce", lambda n: (n - 1, n - 1, n - 1)),
    "chunked_ring_all_reduce": Operation(
        "all_reduce", "algorithms.chunked_ring_all_reduce", lambda n: (2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n)
    ),
    "recursive_doubling_all_reduce": Operation(
        "all_reduce", "algorithms.recursive_doubling_all_reduce", _recursive_doubling
    ),
    "broadcast": Operation("broadcast", "broadcast"),
    "tree_broadcast": Operation("broadcast", "algorithms.tree_broadcast", lambda n: (_doublings(n), _doublings(n), 0)),
    "reduce": Operation("reduce", "reduce", usual=False),
    "all_gather": Operation("all_gather", "all_gather_single"),
    "bruck_all_gather": Operation(
        "all_gather_list", "algorithms.bruck_all_gather", lambda n: (_doublings(n), (n - 1) / n, 0)
    ),
    "reduce_scatter": Operation("reduce_scatter", "reduce_scatter_single"),
    "all_to_all": Operation("all_to_all", "all_to_all_single"),
    "gather": Operation("gather", "gather", usual=False),
    "scatter": Operation("scatter", "scatter", usual=False),
    "send_recv": Operation("send_recv", "batch_isend_irecv", usual=False),
    "barrier": Operation("barrier", "barrier"),
}
"""By their --op names. The costs of the textbook algorithms are derived in launchpad.collectives.algorithms."""

FACTORS: dict[Kind, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_reduce_into": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_gather_list": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,  # noqa: ARG005
    "reduce": lambda n: 1.0,  # noqa: ARG005
    "send_recv": lambda n: 1.0,  # noqa: ARG005
    "barrier": lambda n: 0.0,  # noqa: ARG005
}
"""The ratio of bus bandwidth to algorithm bandwidth, by the number of ranks. From nccl-tests: doc/PERFORMANCE.md, or
src/{gather,scatter,sendrecv}.cu for the operations that it omits."""


def bandwidths(kind: Kind, ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw of a call in GB/s (1e9 bytes), as nccl-tests define them: size / time, and that times the factor.

    `size` is the whole buffer: each rank's output of all_gather, each rank's input of reduce_scatter and all_to_all,
    the root's buffer of gather and scatter.
    """
    algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
    return algorithm, algorithm * FACTORS[kind](ranks)


def predicted(model: Model, ranks: int, size: int, costs: tuple[float, float, float]) -> float:
    """The time in seconds that the model predicts for a call; `costs` are α, β and γ."""
    messages, sent, added = model(ranks)
    latency, per_byte, per_sum = costs
    return messages * latency + sent * size * per_byte + added * size * per_sum
