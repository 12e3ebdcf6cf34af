"""The request to the ranks and their answers, as frozen values; each is sent as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class BenchRequest:
    """What one job should measure."""

    backend: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    dtype: str
    seconds: float  # in total; every point is measured a few times, however long that takes
    hosts: tuple[str, ...] = ()  # the user's names for them, in order; empty: their own host names


@dataclass(frozen=True)
class Setting:
    """The setting in which a backend is measured; sent first."""

    backend: str
    ranks: int
    hosts: tuple[str, ...]
    ranks_on: tuple[int, ...]  # how many ranks each host has
    cores: tuple[int, ...]  # how many cores the ranks of each host may use
    dtype: str
    torch: str  # its version
    library: str  # what moves the data: "gloo", or the name and version of the MPI library or of NCCL
    points: int  # how many rows follow
    missing: dict[str, str] = field(default_factory=dict)  # backends that some rank lacks, and why


@dataclass(frozen=True)
class Point:
    """What is measured next."""

    backend: str
    operation: str
    size: int  # bytes


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    A call's time is that of its slowest rank; `time_us` is the median over all calls.
    """

    operation: str
    backend: str
    ranks: int
    size: int  # bytes, of the whole buffer, as in nccl-tests
    count: int  # elements
    dtype: str
    calls: int
    time_us: float
    min_us: float
    max_us: float
    algbw: float  # GB/s
    busbw: float  # GB/s
    wrong: int  # elements with a wrong value, over all ranks
    model_us: float | None = None  # what the cost model predicts for these links
    error: str = ""  # why it failed; all figures are then 0


@dataclass(frozen=True)
class LinkTiming:
    """A ping-pong between two ranks: half the round trip of a small message, and the bandwidth of a large one."""

    backend: str
    first: str  # a host, or "rank R" if there is only one host
    second: str  # if equal to `first`: between two ranks on that host
    latency_us: float
    bandwidth: float  # GB/s


@dataclass(frozen=True)
class Unavailable:
    """A backend that isn't available on a rank."""

    backend: str
    reason: str


Message = Setting | Point | Row | LinkTiming | Unavailable
_MESSAGES: dict[str, Any] = {
    kind.__name__: kind for kind in (BenchRequest, Setting, Point, Row, LinkTiming, Unavailable)
}


def to_line(message: Message | BenchRequest) -> str:
    """A line of JSON, without the newline."""
    return json.dumps({"is": type(message).__name__, **asdict(message)})


def from_line(line: str | bytes) -> Any:
    """The inverse of `to_line`. Raises ValueError for any other line."""
    try:
        found = json.loads(line)
        kind = _MESSAGES[found.pop("is")]
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a bench: {error}") from None
