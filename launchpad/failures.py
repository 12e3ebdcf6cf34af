"""More of the vocabulary of events: what a verdict on a failed job is found from, beside the ranks' ends."""

from typing import Any, NamedTuple

# The reason of a RankFailed.
NO_INIT = "left without MPI_Init, in which others wait for it; its exit code was 0"

# Events: agent -> head.


class ExceptionRaised(NamedTuple):
    """A Python exception that nobody caught, as nursery/accounts.py has kept it in the rank."""

    time: int  # when it ended the program or the thread, by the node's clock
    rank: int
    pid: int  # of the process that raised it: the rank's, or a child's
    thread: str  # the thread that it ended; "" for the main one
    account: dict[str, Any]  # {"type", "message", "frames": [[file, line, function, source]], …}


class Crashed(NamedTuple):
    """What faulthandler wrote into the rank's private file when a signal was about to end it."""

    time: int
    rank: int
    stack: str


# Events of the head's own making.


class JobPlanned(NamedTuple):
    """What is about to run; the first event of every job."""

    time: int
    wall: float  # time.time() at `time`, in seconds
    job: str  # launchpad's id of this job
    pid: int  # of the head
    run_id: str  # TORCHELASTIC_RUN_ID
    words: list[str]  # the target and its arguments
    cwd: str
    nodes: list[list[Any]]  # [name, [rank, …]] each
    folders: dict[str, str]  # of each rank: its folder's name within attempt_N
    timeout: float  # seconds; 0 for none
    logs: str  # the job's folder; "" where there is none


class ClockSeen(NamedTuple):
    """How well a node's clock is known now."""

    time: int
    node: int
    doubt: int  # ns by which its events may have happened earlier or later than they say


class RanksHeld(NamedTuple):
    """Where the ranks were when the job was found to hang, its time was over, or one had waited for others in vain."""

    time: int
    why: str  # "timeout", "stall", "failure"
    ranks: list[int]  # those that the others wait for, as far as can be seen; none where all are at one place
    lines: list[str]  # in words: who is where, and what that means for their collectives


class JobOver(NamedTuple):
    """The last event of a job that launchpad itself saw to its end."""

    time: int
    code: int  # launchpad's exit code


Failure = ExceptionRaised | Crashed | JobPlanned | ClockSeen | RanksHeld | JobOver
