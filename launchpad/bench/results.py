"""What is asked of the ranks and what they answer, as frozen values; each travels as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """What one job is to measure."""

    backend: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    dtype: str
    seconds: float  # for all of it; every point is measured a few times however long that takes
    hosts: tuple[str, ...] = ()  # as the user names them, in their order; none: as they name themselves


@dataclass(frozen=True)
class Setting:
    """Where a backend is measured; comes first."""

    backend: str
    ranks: int
    hosts: tuple[str, ...]
    ranks_on: tuple[int, ...]  # how many ranks each has
    cores: tuple[int, ...]  # how many processors the ranks of each may use
    dtype: str
    torch: str  # its version
    library: str  # what carries the data: "gloo", an MPI library's or NCCL's name and version
    points: int  # how many rows will follow
    missing: dict[str, str] = field(default_factory=dict)  # backends that some rank can't have, and why


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    A call's time is that of the rank that took longest; of all calls `time_us` is the median.
    """

    operation: str
    backend: str
    ranks: int
    size: int  # bytes, the whole buffer as nccl-tests count it
    count: int  # elements
    dtype: str
    calls: int
    time_us: float
    min_us: float
    max_us: float
    algbw: float  # GB/s
    busbw: float  # GB/s
    wrong: int  # elements that are not what arithmetic says, on all ranks
    model_us: float | None = None  # what the cost model says of such links
    error: str = ""  # why it can't be done; then all figures are 0


@dataclass(frozen=True)
class Link:
    """Two ranks that sent a message to and fro: half the time of a small one, and the bandwidth of a large one."""

    backend: str
    first: str  # a host, or "rank R" where there is one host
    second: str  # the same as `first`: between two ranks on it
    latency_us: float
    bandwidth: float  # GB/s


@dataclass(frozen=True)
class Unavailable:
    """A backend that a rank can't have."""

    backend: str
    reason: str


Message = Setting | Row | Link | Unavailable
_MESSAGES: dict[str, Any] = {kind.__name__: kind for kind in (Request, Setting, Row, Link, Unavailable)}


def to_line(message: Message | Request) -> str:
    """A line of JSON, without its end."""
    return json.dumps({"is": type(message).__name__, **asdict(message)})


def from_line(line: str | bytes) -> Any:
    """The value of which `to_line` made the line. Raises ValueError for any other."""
    try:
        found = json.loads(line)
        kind = _MESSAGES[found.pop("is")]
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a bench: {error}") from None
