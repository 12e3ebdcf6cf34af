"""How a job ended, and the exit code that says so."""

import functools
import signal
from collections.abc import Iterable
from typing import Literal

from launchpad.errors import UsageError
from launchpad.named import NamedTuple

CauseKind = Literal["failure", "signal", "timeout", "console", "start", "lost", "stall", "joined", "left"]

# Exit codes of jobs whose ranks don't decide it. Those of a job that could not begin are in errors.py.
NOT_STARTED = UsageError.exit_code
NODE_LOST = 4
TIMED_OUT = 124
OUTPUT_CLOSED = 128 + signal.SIGPIPE

# The signals to launchpad that stop a job.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Those that the launchpad of a node that has joined passes on to the head: they are about the whole job.
FOR_THE_HEAD = (*STOPPING, signal.SIGQUIT)

# Of several jobs in a row, the next one is not started after one that ended with these: the user has stopped it.
INTERRUPTED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM, OUTPUT_CLOSED)


class Cause(NamedTuple):
    """Why a job was stopped before all of its ranks had exited with 0."""

    kind: CauseKind
    rank: int = -1  # failure, start: the rank that failed first
    node: int = -1  # lost, joined, left: the node's number
    code: int = 0  # failure: its exit code, -n for signal n
    signum: int = 0  # signal: the one that the head received
    seconds: float = 0.0  # stall: how long there was no progress
    text: str = ""  # start, lost, console: the reason; failure: what the rank did, if it did not just exit

    @property
    def exit_code(self) -> int:
        """The job's exit code."""
        match self.kind:
            case "failure":
                return self.code if self.code > 0 else 128 - self.code
            case "signal":
                return 128 + self.signum
            case "timeout" | "stall":
                return TIMED_OUT
            case "console":
                return OUTPUT_CLOSED
            case "start":
                return NOT_STARTED
            case "lost" | "joined" | "left":
                return NODE_LOST


@functools.cache
def signal_name(signum: int) -> str:
    """SIGTERM for 15. Python has no names for most real-time signals: "signal 40"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


@functools.cache
def exit_in_words(code: int) -> str:
    """An exit code in words: "exit code 7", "killed by SIGSEGV (Segmentation fault)"."""
    if code >= 0:
        return f"exit code {code}"
    meaning = signal.strsignal(-code)
    return f"killed by {signal_name(-code)}" + (f" ({meaning})" if meaning else "")


def ranges(ranks: Iterable[int]) -> list[str]:
    """A list of ranks with each run as one: "0-2", "4"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def ranks_in_words(ranks: list[int]) -> str:
    """A list of ranks in words: "rank 3", "ranks 0-2, 4"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(ranges(ranks))}"


# The most runs of ranks that a reader can use.
MOST_RUNS = 10


def several_in_words(ranks: list[int]) -> str:
    """The same of what may be very many ranks with gaps: "ranks 0, 2, 4, … (65536 ranks)"."""
    runs = ranges(ranks)
    if len(runs) <= MOST_RUNS:
        return ranks_in_words(ranks)
    return f"ranks {', '.join(runs[:MOST_RUNS])}, … ({len(ranks)} ranks)"
