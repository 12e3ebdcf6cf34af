"""The vocabulary of events: what agents report, and what the head notes itself; commands.py has what it asks for.

Times are `time.monotonic_ns()` of the node that speaks, in nanoseconds. Every sink (console, files, summary …)
consumes these events and nothing else, so that what was shown can be told again from a record of them.
"""

from typing import NamedTuple

STDOUT, STDERR, RESULT = 1, 2, 3  # RESULT: how a rank's function ended, pickled

# Events: agent -> head.


class AgentReady(NamedTuple):
    """The node's facts, sent once in answer to Hello."""

    time: int
    wall: float  # time.time() at `time`, in seconds: what turns event times into dates
    pid: int
    hostname: str
    cores: int  # usable ones: CPU affinity and cgroup quota, at least 1
    gpus: int  # visible ones; -1 where they were not asked for
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES, where it is set
    open_files: int  # the most that the agent may hold
    processes: int  # the most that this user may start
    port: int  # the TCP port that is held for the job's rendezvous; -1 where the one that was asked for is taken


class Surveyed(NamedTuple):
    """What a job over several nodes has to know of each; the answer to Survey."""

    time: int
    python: str  # the ranks' interpreter on this node
    version: str  # its version, like "3.11.7"
    torch: str  # torch's version there; "" where there is none, or it was not asked for
    launchpad: str  # the version of the launchpad that a rank would import; the same
    problem: str  # why the ranks can't run in their folder; "" where they can
    machine: str  # the same for two agents on one machine
    addresses: list[list[str]]  # [address, interface] each, those that other machines can be expected to reach first


class Wanted(NamedTuple):
    """The answer to Sync."""

    time: int
    folder: str  # where the files are kept on this node; "" where there is no room for them
    files: list[int]  # those to be sent, by their place in the list
    problem: str


class Taken(NamedTuple):
    """Bytes of Pieces were written."""

    time: int
    size: int


class Synced(NamedTuple):
    """All that was wanted is there; or why not."""

    time: int
    problem: str


class Listening(NamedTuple):
    """The answer to Listen."""

    time: int
    ports: list[int]  # one for each address; -1 where it can't be listened on


class Reached(NamedTuple):
    """One of the addresses in a Reach was reached, and the agent there gave the right answer."""

    time: int
    address: str
    interface: str  # the one of this node that leads there


class Held(NamedTuple):
    """The answer to Hold."""

    time: int
    port: int  # -1 where the one that was asked for is taken


class Pong(NamedTuple):
    """The answer to Ping."""

    time: int
    ping: int  # the Ping's time


class RankStarted(NamedTuple):
    """The rank's process exists (its program may not have been loaded yet)."""

    time: int
    rank: int
    pid: int


class StartFailed(NamedTuple):
    """The rank's program could not be executed."""

    time: int
    rank: int
    reason: str


class NotForked(NamedTuple):
    """The ranks were to be forked from the nursery, and are executed, each by itself, instead."""

    time: int
    reason: str


class Output(NamedTuple):
    """Bytes that a rank wrote, in bulk; they begin and end anywhere."""

    time: int
    rank: int
    stream: int  # STDOUT, STDERR or RESULT
    data: bytes


class RankRaised(NamedTuple):
    """What the rank's error file (`TORCHELASTIC_ERROR_FILE`) held when the rank was gone."""

    time: int
    rank: int
    error: str  # the file's text, JSON as torch's @record writes it


class RankExited(NamedTuple):
    """A rank's process is gone."""

    time: int
    rank: int
    code: int  # its exit code, or -n for signal n
    memory: int  # largest resident set, in bytes
    memory_killed: bool  # the kernel's counters rose: it has killed for memory since the last failure


class RankFailed(NamedTuple):
    """A rank has ended its world (MPI_Abort), or left it as none may; its process may live, or leave with 0."""

    time: int
    rank: int
    code: int  # the job's exit code if nothing else failed before, 1 to 255
    reason: str  # what the rank did, in words that follow its name


class BarrierIn(NamedTuple):
    """All of this node's ranks that are to be at an MPI barrier are."""

    time: int
    world: int
    group: str  # the barrier's name
    members: list[int]  # the MPI ranks that are to be there; none: all of the world
    keys: dict[str, str]  # what was put here since the last time


class MpiRequest(NamedTuple):
    """A rank asks something over PMI-1 that only the head can answer, with an MpiReply."""

    time: int
    rank: int
    lines: list[str]


class NoMpi(NamedTuple):
    """Ranks that were to be an MPI world have all left with 0, and no MPI in them has met us."""

    time: int


class StraysEnded(NamedTuple):
    """Processes that ranks had left behind, and that were killed at the end."""

    time: int
    processes: list[str]  # "PID NAME"


class Suspended(NamedTuple):
    """The ranks were sent SIGSTOP."""

    time: int


class InputTaken(NamedTuple):
    """Bytes of an Input were written for the rank to read."""

    time: int
    size: int


class Drained(NamedTuple):
    """All that the ranks had left behind is ended, and all that they wrote was sent."""

    time: int


class AgentFailed(NamedTuple):
    """The agent is gone without having been asked to finish; its node was swept by the guard."""

    time: int
    reason: str


# Events of the head's own making.


class LinkClosed(NamedTuple):
    """Nothing more comes from this node."""

    time: int


class NodeLost(NamedTuple):
    """A node is gone, or can't be heard any more, with the ranks that it had."""

    time: int
    node: int
    reason: str
    ranks: list[int]  # that it was to run


class NodeBack(NamedTuple):
    """A node that was lost has an agent again."""

    time: int
    node: int


class StopRequested(NamedTuple):
    """A signal reached the head."""

    time: int
    signum: int


class InputRead(NamedTuple):
    """The head's standard input has brought these bytes for a rank 0 on another machine; none: it has ended."""

    time: int
    data: bytes


class ConsoleClosed(NamedTuple):
    """The head's standard output takes no more: its reader has left, or its disk is full."""

    time: int
    reason: str


class PeerFailed(NamedTuple):
    """On another node, where another launchpad runs its part of this world, something failed."""

    time: int
    reason: str
    code: int  # the exit code of that launchpad


class LogFailed(NamedTuple):
    """A per-rank file takes no more; the ranks go on without it."""

    time: int
    path: str
    reason: str


class Written(NamedTuple):
    """A sink that had kept an Output's bytes for its writer has written them."""

    output: Output


class Restarted(NamedTuple):
    """All ranks were started again."""

    time: int
    attempt: int  # 1 for the first restart
    most: int  # how many restarts the user allows
    rank: int  # the rank that failed first; -1 where a node was lost
    code: int  # its exit code, or -n for signal n
    node: int  # the lost node, else -1


class RanksSpawned(NamedTuple):
    """A rank has started others (MPI_Comm_spawn); they are numbered behind all that were there."""

    time: int
    by: int
    node: int
    ranks: list[int]
    argv: list[str]  # of the first of them


class PhaseChanged(NamedTuple):
    """The job's state machine took a step."""

    time: int
    phase: str  # "stopping", "over"
    cause: str  # "", "failure", "signal", "timeout", "stall", "console", "start", "lost", "peer"
    signum: int  # the signal that was sent to the ranks, 0 for none
    seconds: float  # how long the ranks have until the next step, 0 for no limit
    ranks: list[int]  # the ranks that were still running


Event = (
    AgentReady
    | Surveyed
    | Wanted
    | Taken
    | Synced
    | Listening
    | Reached
    | Held
    | Pong
    | RankStarted
    | StartFailed
    | NotForked
    | Output
    | RankRaised
    | RankExited
    | RankFailed
    | BarrierIn
    | MpiRequest
    | NoMpi
    | StraysEnded
    | Suspended
    | InputTaken
    | Drained
    | AgentFailed
    | LinkClosed
    | NodeLost
    | NodeBack
    | StopRequested
    | InputRead
    | ConsoleClosed
    | PeerFailed
    | LogFailed
    | Written
    | Restarted
    | RanksSpawned
    | PhaseChanged
)
