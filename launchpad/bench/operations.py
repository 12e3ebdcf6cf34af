"""What can be measured: each operation's data, its bus factor and its cost model. Imports no torch.

To time one more function is one line in OPERATIONS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
]
"""How the data lies before and after; `patterns.py` makes it, calls the function with it and checks it."""

Model = Callable[[int], tuple[float, float]]
"""From the number of ranks: (a, b) of the time aα + bSβ, where S is the size in bytes; α the latency of a link in
seconds, β its time for a byte (Hockney 1994; as in Thakur, Rabenseifner, Gropp 2005, without the cost of the sums)."""

ALGORITHMS = "algorithms"


@dataclass(frozen=True)
class Operation:
    """One function that is timed."""

    kind: Kind
    function: str  # in launchpad.collectives, or in launchpad.collectives.algorithms where that stands before it
    model: Model | None = None
    usual: bool = True  # measured where no --op is given

    @property
    def is_algorithm(self) -> bool:
        """Whether it is one of the textbook, over send and recv."""
        return self.function.startswith(ALGORITHMS + ".")


def _log(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", "all_reduce"),
    "broadcast": Operation("broadcast", "broadcast"),
    "reduce": Operation("reduce", "reduce", usual=False),
    "all_gather": Operation("all_gather", "all_gather_single"),
    "reduce_scatter": Operation("reduce_scatter", "reduce_scatter_single"),
    "all_to_all": Operation("all_to_all", "all_to_all_single"),
    "gather": Operation("gather", "gather", usual=False),
    "scatter": Operation("scatter", "scatter", usual=False),
    "send_recv": Operation("send_recv", "batch_isend_irecv", usual=False),
    "barrier": Operation("barrier", "barrier"),
}
"""By the name that --op takes."""

FACTORS: dict[Kind, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,  # noqa: ARG005
    "reduce": lambda n: 1.0,  # noqa: ARG005
    "send_recv": lambda n: 1.0,  # noqa: ARG005
    "barrier": lambda n: 0.0,  # noqa: ARG005
}
"""Bus bandwidth over algorithm bandwidth, from the number of ranks: nccl-tests, doc/PERFORMANCE.md, and for what that
leaves out (gather, scatter, send and receive) src/{gather,scatter,sendrecv}.cu there."""


def bandwidths(kind: Kind, ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw of a call in GB/s (1e9 bytes), as nccl-tests define them: size / time, and that by the factor.

    `size` is the whole buffer: what all_gather leaves on each rank, what reduce_scatter and all_to_all find there, what
    the root of gather and scatter has.
    """
    algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
    return algorithm, algorithm * FACTORS[kind](ranks)


def predicted(model: Model, ranks: int, size: int, latency: float, per_byte: float) -> float:
    """The time in seconds that the model gives a call over links of that latency (s) and time for a byte (s)."""
    rounds, share = model(ranks)
    return rounds * latency + share * size * per_byte
