"""What ends a job or its ranks before they end by themselves, and when they start again: one value, carried whole."""

from typing import Literal

from launchpad.job.duration import duration
from launchpad.named import NamedTuple

# Without a stall timeout nothing ends a job that hangs. After so many seconds, a person at a terminal is told of it.
IDLE_SECONDS = 60.0

Restarts = Literal["judged", "always"]


class RestartLimit(NamedTuple):
    """How often all ranks may be restarted: `most` times in all, or in any `period`."""

    most: int = 0
    period: float | None = None  # seconds; None: in all

    def __str__(self) -> str:
        return str(self.most) if self.period is None else f"{self.most}/{duration(self.period)}"


class Limits(NamedTuple):
    """The limits of one job, as the user set them."""

    grace: float | None = None  # seconds between the first signal and the next; None: the defaults of head/machine.py
    stop_signal: int | None = None  # asks the ranks to stop; None: the signal that the job is stopped with
    timeout: float | None = None  # seconds, for the whole job
    stop_at: float | None = None  # when to ask the ranks to stop, in seconds since 1970
    ends_at: float | None = None  # when the batch allocation, or the job that this one runs in, ends; likewise
    stall_timeout: float | None = None  # seconds without output or progress of any rank
    keep_running: float = 0.0  # seconds for which ranks go on while their host has no contact with the head
    max_restarts: RestartLimit = RestartLimit()  # how often all ranks are restarted after a failure
    restart: Restarts = "judged"  # whether a failure that recurs without progress ends the job
    progress: tuple[str, ...] = ()  # patterns of files, relative to cwd: a new one means progress
