"""Defines the events that agents report and that the head creates; commands.py defines the commands to agents.

Times are the sending node's `time.monotonic_ns()`. The sinks (console, files, summary …) consume these events and
nothing else, so a job can be replayed from a record of them.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

from .gpus import SeenGpu
from .message import Message
from .printable import Printable

STDOUT, STDERR, RESULT = 1, 2, 3  # RESULT: the pickled outcome of a rank's function

# The reason of a RankFailed.
NO_INIT = "exited with code 0 without calling MPI_Init, in which others wait for it"

# Why there are no stacks of a Python rank that runs launchpad's hooks.
NO_HANDLER = "launchpad's signal handler is missing: the interpreter is exiting, or the program removed the handler"
SILENT = "it did not answer"

# What values there are, where the type doesn't say it: an agent that sends others is lost. Numbers have 64 bits.
Rank = Annotated[int, range(1 << 31)]
Port = Annotated[int, range(-1, 1 << 16)]
Signum = Annotated[int, range(65)]
ExitCode = Annotated[int, range(-64, 256)]
Count = Annotated[int, range(-1, 1 << 20)]
Place = Annotated[int, range(1 << 20)]  # in a list of the same message


class Between:
    """Numbers from `low` up to `high`."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.high


Figure = Annotated[float, Between(0.0, 1e18)]  # a quantity
Date = Annotated[float, Between(0.0, 1e11)]  # seconds since 1970

Shown = Annotated[str, Printable()]  # what our lines name

NodeRanks = tuple[str, list[Rank]]  # a node's name, and its ranks

Frame = tuple[str, int, str, str]  # file, line, function, source
# Ranks of a process group: the first, the last, and the step from one to the next.
Members = tuple[Rank, Rank, Annotated[int, range(1, 1 << 31)]]

_Size = Annotated[list[int], range(65)]  # torch's tensors have up to 64 dimensions


class ThreadStack(TypedDict):
    """A thread, innermost frame first."""

    name: str
    frames: list[Frame]


class Awaited(TypedDict, total=False):
    """What a main thread waits for, as its variables say. The agent adds the source lines of tasks."""

    what: str  # in words: its child `make`, a threading.Lock
    pids: list[int]  # of the child process that it is
    near: list[int]  # of child processes one of which may give it: a pool's, all
    thread: str  # the name of the thread that it is, or that has it
    pool: list[str]  # the names of a pool's threads
    held: bool  # it is a lock that somebody has
    lost: str  # what makes it wait for ever: its worker 4711 was killed by SIGKILL
    path: str  # of a lock that is a file
    holder: str  # who has locked that, from the agent
    server: str  # the process on this machine from which it waits for data, from the agent
    chain: list[ThreadStack]  # the main task of an event loop, what that awaits, and so on
    tasks: list[ThreadStack]  # the loop's others


class ChildStack(TypedDict):
    """A process that descends from a rank; without frames if they could not be had."""

    pid: int
    parent: int
    command: str
    state: str  # as in StackDump
    sleeps_in: str  # likewise
    frames: list[Frame]


class CollectiveEntry(TypedDict):
    """A collective that a rank has entered."""

    group: str
    number: int
    what: str
    sizes: Annotated[list[_Size], range(1 << 12)]
    types: list[str]
    done: bool
    frames: list[tuple[str, int, str]]


class MpiCollectiveEntry(CollectiveEntry, total=False):
    """The same of the mpi frontend, which records messages too."""

    p2p: bool


class Entered(TypedDict, total=False):
    """What a rank knows about its collectives."""

    counts: dict[str, int]  # by group: the number of the last one
    waiting: int  # how many have not completed
    entries: list[MpiCollectiveEntry]  # on request
    groups: dict[str, tuple[str, list[Members]]]  # likewise; by name: its description, its ranks
    raising: dict[str, Any]  # likewise: the exception that the main thread is handling, like ExceptionRaised.traceback
    alone: bool  # likewise: no other thread runs Python, and the program would not survive an exception of the main one
    reads_port: int  # the other port of the TCP connection whose data the main thread waits for; not if it has a child
    unanswered: int  # the first request that the rank has not answered, if its answering thread is blocked
    mpi: bool  # it has loaded mpi4py
    # Its threads and those of its descendants that wait for data whose bytes nobody counts: [thread, descriptor, how
    # often it was woken, seconds after which it wakes by itself; 0: never] each
    receives: list[tuple[int, int, int, float]]
    asleep: str  # identifies the sleep for a given time that the rank is in, or the child that it waits for
    # Of a rank without Python that waits busily in MPI: the library, and what identifies its call.
    spins: Annotated[list[str], (2,)]


# [rank, which of `threads`, of `collectives` and of `waits`, and as in StackDump: pid, why, state, wchan, cpu, busy,
# moved, beats, native]
DumpedRank = tuple[Rank, Place, Place, Place, int, str, str, str, float, bool, int, int, str]

# [group, its size or 0, operation, [number, µs from then to the time of the event, …]]
Arrivals = tuple[str, int, str, list[int]]

# [rank, CPU seconds, seconds that its threads waited for a core, seconds for disks, page faults that read from a disk,
# seconds that its cgroup had no CPU quota left, the mean clock now in MHz of the cores on which it may run, whether one
# of its GPUs is throttled], with descendants
Hindered = tuple[Rank, float, float, float, float, float, float, float]

# [rank, how many collectives it joined, to how many it came last, by how many seconds in the median (weighted by what
# it cost), seconds that others waited for it, the sum of the squares of these, seconds of the others]
LateRank = tuple[Rank, Figure, Figure, Figure, Figure, Figure, Figure]

# [ranks of a node, seconds of a round trip to it, of one to the others, seconds that its ranks waited for that, seconds
# that they were watched]
FarNode = tuple[list[Rank], Figure, Figure, Figure, Figure]

# [group, number, operation, ns from then to the time of the event, ns that it took or 0]
EnteredCollective = tuple[str, int, str, int, int]

# Of which ranks an agent's event speaks: its node must have them all.


def the_node(_: Any) -> Iterable[int]:
    """No rank in particular."""
    return ()


def its_rank(event: Any) -> Iterable[int]:
    """The rank in the field of that name."""
    return (event.rank,)


def each_rank(event: Any) -> Iterable[Any]:
    """The first of each row in the field `ranks`."""
    return [row[0] for row in event.ranks]


class Event(Message):
    """The base of all events. All that there is to know about one is declared with it.

    `about`: of which ranks it speaks; an event without it is the head's own: no agent may say it, and it never travels.
    `recorded`: it is in events.jsonl. `of_lost`: it counts even from a node that is lost, or has left. `needs_part`:
    nobody may say it in a job in which no part of the head takes it. The types say which values there are (typed.py).
    """

    if TYPE_CHECKING:  # as in Message
        about: ClassVar[Callable[[Any], Iterable[Any]] | None]
        recorded: ClassVar[bool]
        of_lost: ClassVar[bool]
        needs_part: ClassVar[bool]

    about = None
    recorded = of_lost = needs_part = False

    def __init_subclass__(
        cls,
        *,
        about: Callable[[Any], Iterable[Any]] | None = None,
        recorded: bool = False,
        of_lost: bool = False,
        needs_part: bool = False,
        raw: struct.Struct | None = None,
    ) -> None:
        """Keep what is declared, where it differs: this is on the way to the first rank, and there are many events."""
        super().__init_subclass__(raw=raw)
        if about is not None:
            cls.about = about
        if recorded:
            cls.recorded = True
        if of_lost:
            cls.of_lost = True
        if needs_part:
            cls.needs_part = True


# Events: agent -> head.


class AgentReady(Event, about=the_node):
    """The node's facts, sent once in answer to Hello."""

    time: int
    wall: float  # time.time() at `time`, in seconds: turns event times into dates
    pid: int
    hostname: Shown
    cores: Count  # usable ones: CPU affinity and cgroup quota, at least 1
    gpus: Count  # visible ones, or accelerators of the kind that Hello names; -1 if they were not counted
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES, if it is set
    open_files: int  # the agent's hard limit
    processes: int  # the limit for this user
    port: Port  # the TCP port held for the job's rendezvous; -1 if the requested one is taken
    port_holder: str = ""  # and by whom: `pid 71, python`; "" if unknown


class NodeFacts(Event, about=the_node):
    """What a multi-node job needs to know about each node; the answer to Probe."""

    time: int
    python: str  # the ranks' interpreter on this node
    version: Shown  # its version, like "3.11.7"
    torch: Shown  # its torch version; "" if it has none, or none was requested
    launchpad: Shown  # the version of launchpad that a rank would import; "" likewise
    problems: list[str]  # why the ranks can't run: their folder, or their program, is missing
    machine: str  # identifies the machine: equal for two agents on the same one; "" if unknown
    addresses: list[tuple[Shown, Shown]]  # [address, interface] each, best candidates for other machines first


class TopologyRead(Event, about=the_node):
    """What is near what on this node; the answer to ReadTopology."""

    time: int
    # [CPU, core, socket, group of cores that share a cache, NUMA node] of each CPU that ranks may use; the numbers of
    # core and group are those of their first CPUs; -1 if unknown
    cpus: list[tuple[Count, Count, int, Count, Count]]
    nodes: list[Count]  # the NUMA nodes, also those that have only CPUs or only memory
    distances: list[list[int]]  # from each of them to each
    memory: list[Count]  # those whose memory ranks may use; none: memory policies are not permitted here
    gpus: list[Count]  # the NUMA node of each GPU that ranks see; -1 if unknown
    complete: bool  # whether the system shows which CPUs are one core


class Wanted(Event, about=the_node):
    """The answer to Sync."""

    time: int
    folder: str  # the copy on this node; "" if it can't be made
    files: list[list[int]]  # [first, last + 1] of each run of those to be sent, by their index in Sync.files
    problem: str


class ChunksTaken(Event, about=the_node):
    """This many bytes of FileChunk or Call were written."""

    time: int
    size: int


class Synced(Event, about=the_node):
    """All wanted files are complete, or the sync failed."""

    time: int
    problem: str  # "" if it succeeded


class EnvironmentFound(Event, about=the_node):
    """The answer to FindEnvironment."""

    time: int
    python: str  # the environment's interpreter; "" if it is not here
    base: str  # the one of that version to make it with; "" if there is none, or it brings its own
    machine: str  # like "x86_64"
    glibc: str  # its version, like "2.36"; "" with another C library
    problem: str  # why there can be none; "" if there can


class EnvironmentMade(Event, about=the_node):
    """The answer to MakeEnvironment."""

    time: int
    python: str  # its interpreter
    problem: str  # "" if it works


class GpusLeased(Event, about=the_node):
    """The answer to LeaseGpus."""

    time: int
    uuids: list[str]
    problem: str  # why it is none; "" if they are leased


class GpusListed(Event, about=the_node):
    """The answer to ListGpus."""

    time: int
    gpus: list[SeenGpu]
    problem: str


class HealthChecked(Event, about=the_node, needs_part=True):
    """The answer to CheckHealth."""

    time: int
    problem: Shown  # what became of the command if the node is not healthy: "ended with exit code 3"
    missing: bool  # there is no such command here
    lines: list[Shown]  # the last that it said, if the node is not healthy
    answers: list[tuple[str, list[Any], Shown]]  # of doctor: subject, facts (health.py), why there are none


class KeptListed(Event, about=the_node):
    """The answer to ListKept."""

    time: int
    # [name, bytes, bytes that no other environment shares, last use in seconds since 1970, HOST:FOLDER or ""] each
    folders: list[tuple[str, int, int, float, str]]
    problem: str


class KeptRemoved(Event, about=the_node):
    """The answer to RemoveKept."""

    time: int
    names: list[str]  # what is gone
    problem: str


class Listening(Event, about=the_node):
    """The answer to Listen."""

    time: int
    ports: list[Port]  # one per address; -1 if the agent can't listen on it


class Reached(Event, about=the_node):
    """An address in a Reach gave the right answer."""

    time: int
    address: str
    interface: str  # this node's interface that leads there


class PortHeld(Event, about=the_node):
    """The answer to HoldPort."""

    time: int
    port: Port  # -1 if the requested one is taken
    holder: str = ""  # and by whom: `pid 71, python`; "" if unknown


class PortsHeld(Event, about=the_node):
    """The answer to HoldPorts."""

    time: int
    ports: list[Port]
    problem: str  # why it is none; "" if they are held


class Pong(Event, about=the_node):
    """The answer to Ping, or a sign of life from a node that is busy."""

    time: int
    ping: int  # the Ping's time; 0 if there was none


class LinkHeld(Event, about=the_node):
    """The first frame on a connection to a held link (agent/holder.py)."""

    time: int
    place: str  # the holder's folder
    taken: int  # how many of the head's commands it has
    ended: bool = False  # the agent has


class CommandsTaken(Event, about=the_node):
    """The holder has so many of the head's commands."""

    time: int
    commands: int


class HoldEnded(Event, about=the_node):
    """The last frame on a connection to a held link: the agent has ended, or nothing is held there."""

    time: int
    reason: str  # "" if the agent has ended


class ContactLost(Event, about=the_node, recorded=True):
    """The connection to a node is lost; its ranks go on (--keep-running)."""

    time: int
    seconds: Figure  # for as long as this
    node: int = -1  # filled in by the head


class ContactRegained(Event, about=the_node, recorded=True):
    """There is a connection to the node again."""

    time: int
    seconds: Figure  # how long there was none
    node: int = -1  # filled in by the head


class RankStarted(Event, about=its_rank, recorded=True):
    """The rank's process exists; it may not have loaded its program yet."""

    time: int
    rank: Rank
    pid: int


class StartFailed(Event, about=its_rank, recorded=True):
    """The rank's program could not be executed."""

    time: int
    rank: Rank
    reason: str


class NotForked(Event, about=the_node, recorded=True):
    """The ranks are executed one by one instead of being forked from the forkserver."""

    time: int
    reason: str
    node: int = -1  # filled in by the head


class ImageUnused(Event, about=the_node, recorded=True):
    """The node started cold, or its ranks' forkserver did, although an image is kept there (`launchpad warm`)."""

    time: int
    reason: str
    node: int = -1  # filled in by the head


class KeeperReply(Event, about=the_node):
    """The answer to KeeperRequest."""

    time: int
    answer: dict[str, Any]  # as of image/keeper_control.py's `ask`


class Checked(Event, about=the_node):
    """The answer to Check."""

    time: int
    subject: str
    facts: list[Any]  # the fields of the subject's class in health.py
    problem: str  # why there are none; ""


class Output(Event, about=its_rank, raw=struct.Struct("!qIB")):
    """Bytes that a rank wrote; they may begin and end anywhere."""

    time: int
    rank: Rank
    stream: Annotated[int, (STDOUT, STDERR, RESULT)]
    data: bytes


class Fenced(Event, about=the_node):
    """The answer to Fence."""

    time: int
    number: int


class ModulesImported(Event, about=the_node, recorded=True):
    """A node's forkserver has imported what the ranks need."""

    time: int
    seconds: float  # how long it took
    modules: list[str]
    node: int = -1  # filled in by the head


class SpareReady(Event, about=the_node):
    """A Start without ranks was carried out: what the ranks need has been imported."""

    time: int


class RankRaised(Event, about=its_rank, recorded=True):
    """The contents of an exited rank's error file (`TORCHELASTIC_ERROR_FILE`)."""

    time: int
    rank: Rank
    error: str  # the file's text, JSON as torch's @record writes it


class RankExited(Event, about=its_rank, recorded=True):
    """A rank's process is gone."""

    time: int
    rank: Rank
    code: ExitCode  # its exit code, or -n for signal n
    memory: int  # peak resident set size, in bytes
    # Whether the kernel's count of OOM kills has risen since the last failure; None if it can't be read.
    memory_killed: bool | None
    oom_kills: int = 0  # by how much that count has risen since the start of the attempt, if the rank failed
    why: str = ""  # what its node knows of the reason: of a bus error, that /dev/shm is full
    hardware: str = ""  # if the rank failed, the last error of its node's hardware in the kernel's log since it started
    # Whether it was exiting already when it was first sent a signal to end it. A process closes its connections before
    # it is gone, so the job may be stopped for a peer's failure while whoever caused that is still exiting.
    exiting: bool = False


class LeftBehind(Event, about=its_rank):
    """A rank that has exited with 0, of which its RankExited will tell, has left processes behind."""

    time: int
    rank: Rank


class RankFailed(Event, about=its_rank, recorded=True):
    """A rank aborted its MPI world, left it improperly, or can't do without something that has died."""

    time: int
    rank: Rank
    code: Annotated[int, range(1, 256)]  # the job's exit code if nothing else failed before
    reason: str  # what the rank did, as a phrase that follows its name


class BarrierIn(Event, about=the_node, needs_part=True):
    """All members of an MPI barrier on this node have reached it."""

    time: int
    world: int
    group: str  # the barrier's name
    members: list[int]  # the MPI ranks that take part; none: the whole world
    keys: dict[str, str]  # put on this node since the last barrier


class MpiRequest(Event, about=its_rank, needs_part=True):
    """A rank's PMI-1 request that only the head can answer, with an MpiReply."""

    time: int
    rank: Rank
    lines: Annotated[list[str], range(1, 1 << 20)]


class PmixRequest(Event, about=the_node, needs_part=True):
    """What ranks of Open MPI need of other nodes, or of the head; answered by a PmixReply."""

    time: int
    number: int  # the node's own
    verb: str  # fence, group, connect, disconnect, modex, publish, lookup, unpublish, spawn, worlds (tell of all)
    # [world, MPI rank] each, with rank -1 for a whole world: who takes part, who asks, or (modex) whose data is wanted
    members: list[tuple[int, int]]
    given: list[Any]


class PmixFetched(Event, about=the_node, needs_part=True):
    """The answer to a PmixFetch."""

    time: int
    number: int
    status: int
    data: str  # in base64


class MpiFound(Event, about=the_node):
    """Which MPI the ranks of this node use."""

    time: int
    library: str  # as in MpiWorld
    why: str


class NoMpi(Event, about=the_node, recorded=True):
    """Open MPI can't be served here, or all ranks have exited with 0 without ever contacting us over PMI or PMIx."""

    time: int
    library: str  # the MPI that was served; "" for all
    why: str  # why Open MPI was not; "" if it was, or was not needed
    node: int = -1  # filled in by the head


class OwnWorld(Event, about=its_rank, recorded=True):
    """A rank uses MPI in a world of its own, as nothing has made it join one with the others."""

    time: int
    rank: int


class LeftoversAwaited(Event, about=the_node, recorded=True):
    """All ranks have ended well, and the processes that they left behind have time to end, too."""

    time: int
    processes: list[str]  # "PID NAME"
    seconds: float
    node: int = -1  # filled in by the head


class OrphansKilled(Event, about=the_node, recorded=True):
    """Processes that the ranks left behind were killed at the end."""

    time: int
    processes: list[str]  # "PID NAME"
    node: int = -1  # filled in by the head


class Suspended(Event, about=the_node, of_lost=True):
    """The ranks were sent SIGSTOP."""

    time: int


class StdinTaken(Event, about=the_node):
    """This many bytes of StdinData were written to the rank's standard input."""

    time: int
    size: int


class StdinUnused(Event, about=the_node, recorded=True):
    """The job is over, and no rank has read this much of what was sent for the one with our standard input.

    An agent says it of what it has written to that rank; what is recorded has what was on its way, too.
    """

    time: int
    size: Annotated[int, range(1 << 31)]  # bytes


class AtPrompt(Event, about=its_rank, recorded=True):
    """The rank that gets what the user types waits for it, or goes on."""

    time: int
    rank: Rank
    waits: bool


class Drained(Event, about=the_node):
    """The processes that the ranks left behind are gone, and all output has been sent."""

    time: int


class AgentFailed(Event, about=the_node):
    """The agent ended before it was told to; its node gets swept."""

    time: int
    reason: str
    trace: str = ""  # the traceback, if a bug in launchpad is to blame


class AgentLeft(Event, about=the_node):
    """The agent of a node that has joined is gone; the connection stays, for the news of how the job ends."""

    time: int


class RosterHeld(Event, about=the_node, needs_part=True):
    """The launchpad of a node that has joined keeps this roster of the head's, and those before it."""

    time: int
    change: int  # its number


class DoorsTried(Event, about=the_node, needs_part=True):
    """The launchpad of a node that has joined has tried to reach those that may lead after the head."""

    time: int
    missed: list[tuple[Shown, Shown]]  # their keys on the roster, and why they can't be reached


class ExceptionRaised(Event, about=its_rank, recorded=True):
    """An uncaught Python exception, recorded in the rank by rank/exceptions.py."""

    time: int  # when it ended the program or the thread, by the node's clock
    rank: Rank
    pid: int  # of the process that raised it: the rank's or a child's
    thread: str  # the thread that it ended; "" for the main thread
    traceback: dict[str, Any]  # {"type", "message", "frames": [[file, line, function, source]], …}


class CollectivesEntered(Event, about=its_rank, recorded=True):
    """The last collectives that a rank has entered, told at its end if the job has a report."""

    time: int
    rank: Rank
    entries: list[EnteredCollective]


class MilestoneReached(Event, about=its_rank, recorded=True):
    """A rank has got so far; told at its end, if a timeline is wanted."""

    time: int
    rank: Rank
    what: str  # "torch": torch.distributed is imported; "group": its first process group is being made


class RecordDropped(Event, about=its_rank, recorded=True):
    """What a rank has recorded or answered can't be used; told once of each kind."""

    time: int
    rank: Rank
    what: str  # "an exception that it recorded"
    why: str


class Crashed(Event, about=its_rank, recorded=True):
    """A fatal signal hit a rank; `stack` is what faulthandler wrote into its private file."""

    time: int
    rank: Rank
    stack: str


class StackDump(Event):
    """The state of one rank. If its stacks could not be had, `threads` is empty and `why` has the reason."""

    time: int
    rank: Rank
    number: int  # of the request
    pid: int
    why: str  # the reason why there are no stacks; "" if there are
    threads: list[ThreadStack]
    state: str  # the main thread's, a letter as in proc(5); "" if unknown
    wchan: str  # the kernel function, or else the system call, that the main thread sleeps in; "" if unknown
    cpu: float  # CPU seconds that the rank and its descendants have used; -1 if unknown
    busy: bool  # one of their threads was runnable
    moved: int  # bytes that they have read and written, also over TCP; -1 if unknown
    beats: int  # increases if the main thread has run Python code since the last request; -1 if unknown
    collectives: Entered
    native: str
    awaits: Awaited = {}  # noqa: RUF012  # immutable, as nobody changes it
    children: list[ChildStack] = []  # noqa: RUF012


class StackDumps(Event, about=each_rank):
    """The StackDumps of ranks of a node: stacks that are equal are in it once (stacks.py)."""

    time: int
    number: int  # of the request
    threads: list[str]  # JSON, as the head decodes equal ones once
    collectives: list[str]  # likewise
    waits: list[str]  # likewise: [awaits, children]
    ranks: list[DumpedRank]


class DebuggerReady(Event, about=its_rank):
    """The debugger in a rank listens; or `problem` says why it doesn't."""

    time: int
    rank: Rank
    problem: str


class ProfileTaken(Event, about=its_rank):
    """What py-spy saw of a rank and the processes that descend from it."""

    time: int
    rank: Rank
    number: int  # of the request
    problem: str  # why there is no profile; "" if there is
    profile: str  # a speedscope file, compressed with zlib, in base64
    pid: int = 0  # the rank's


class Sampled(Event, about=the_node):
    """What the running ranks of a node use, each with its descendants, and the node's GPUs."""

    time: int
    number: int  # of the request
    # [rank, the main thread's state as in StackDump, CPU seconds, resident bytes, threads, bytes read, bytes written]
    # each; figures are -1 if unknown
    ranks: list[tuple[Rank, str, float, int, int, int, int]]
    # [rank, operation, number of the collective or -1, seconds or -1] of those that wait
    waits: list[tuple[Rank, str, int, float]]
    # [UUID, use in percent, bytes in use, bytes in all, {rank: its bytes}] each; -1: unknown
    gpus: list[tuple[str, int, int, int, dict[str, int]]]
    # If the ranks were asked: [rank, pid, command, state, CPU seconds, resident bytes, threads] of processes below them
    children: Sequence[tuple[Rank, int, str, str, float, int, int]] = ()


class ArrivalTimes(Event, about=its_rank):
    """When a rank has entered the collectives of which it has not told before."""

    time: int
    rank: Rank
    groups: list[Arrivals]
    doubt: int = 0  # by how many ns its node's clock may be wrong; filled in by the head


class Hindrances(Event, about=each_rank):
    """What has kept the ranks of a node from computing since they began; figures are -1 if unknown."""

    time: int
    ranks: list[Hindered]
    # Since the node was booted: "busy", "stolen" (CPU seconds), "swapped" (pages), "retransmitted" (TCP segments); and
    # "cores"
    host: dict[str, float]


class TunnelRead(Event, about=the_node, raw=struct.Struct("!qI")):
    """Bytes from a rank's debugger, as the answer to which TunnelCredit is due; none: it has hung up."""

    time: int
    number: int
    data: bytes


class TunnelWritten(Event, about=the_node):
    """This many bytes of TunnelData were written to the debugger."""

    time: int
    number: int
    size: int


# Events that the head itself creates.


class LinkClosed(Event, of_lost=True):
    """Nothing more will come from this node."""

    time: int


class NodeLost(Event, recorded=True):
    """A node is gone or out of contact, together with its ranks."""

    time: int
    node: int
    reason: str
    ranks: list[Rank]  # those assigned to it
    trace: str = ""  # the traceback, if a bug in its agent is to blame


class NodeUnwell(Event, recorded=True):
    """A node's health check has failed (--health), so it is left out, and lost to the job until it is healthy."""

    time: int
    node: int
    reason: str  # what became of the check
    lines: list[str]  # the last that it said


class NodeDoubted(Event, recorded=True):
    """Attempts have failed repeatedly because of this node's own hardware: it comes last among the spares."""

    time: int
    node: int
    times: int
    reason: str  # what it was the last time


class NodeJoined(Event, recorded=True):
    """A node can take part from now on: one that joined while the job runs, or a lost one that is back."""

    time: int
    node: int
    name: str
    slots: int  # how many ranks it takes


class NodeLeaving(Event, recorded=True):
    """The launchpad of a node that has joined got a stop signal, and the job goes on without this node."""

    time: int
    node: int
    signum: Signum


class HeadLost(Event, recorded=True):
    """Another launcher has led the job before this one. One event each, in their order, after JobPlanned."""

    time: int
    name: str  # its node's
    job: str  # its id of the job, under which its record is there; "" if it had none
    lost: Date  # when those that went on lost it, by time.time(); 0: it is not known


class CantLead(Event, recorded=True):
    """If the head is lost, this node can't lead: too few of the others reach its launchpad."""

    time: int
    node: int
    place: str  # where its launchpad listens
    by: list[int]  # nodes that don't reach it
    why: str


class GaveWay(Event):
    """The head ends its part of the job, as the other nodes go on without it, or may do so."""

    time: int
    node: int  # because of it: the last one that was lost, or the head's own, which has left
    reason: str


class NodesAwaited(Event, recorded=True):
    """The job goes on when these lost nodes are back, or as many others are there."""

    time: int
    nodes: list[int]
    seconds: float  # how long it waits


class NodeRefused(Event, recorded=True):
    """A machine that joined while the job runs can't take part."""

    time: int
    name: str
    reason: str


class SeatsReady(Event):
    """These nodes have a common rendezvous address for the next attempt."""

    time: int
    seats: Sequence[tuple[int, int]]  # (node, number of ranks) each


class StopRequested(Event, about=the_node, recorded=True):
    """A signal reached the head, or the launchpad of a node that has joined; or it is time to stop."""

    time: int
    signum: Signum
    reason: str = ""  # why it is time; only from the head
    asked: bool = False  # the whole job is meant: by `launchpad stop`, or on a terminal that is attached


class SignalPassedOn(Event, about=the_node, recorded=True):
    """The launchpad of a node that has joined got a signal other than those, and passed it on to its own ranks."""

    time: int
    signum: Signum
    node: int = -1  # filled in by the head


class StdinRead(Event):
    """Bytes from the head's standard input, for a rank on another machine; empty at end-of-file."""

    time: int
    data: bytes


class ConsoleClosed(Event, recorded=True):
    """The head's standard output can't be written to: its reader is gone, or the disk is full."""

    time: int
    reason: str


class LogFailed(Event, recorded=True):
    """A per-rank file can't be written to; the ranks go on without it."""

    time: int
    path: str
    reason: str


class Written(Event):
    """A sink that queued an Output's bytes has written them."""

    output: Output


class Restarted(Event, recorded=True):
    """All ranks were started again."""

    time: int
    attempt: int  # 1 for the first time
    most: int  # how many restarts the user allows
    rank: int  # the rank that failed first; -1 if none did
    code: ExitCode  # its exit code, or -n for signal n
    node: int  # the node that was lost, or has joined; -1 if a rank failed
    restarts: int = 0  # how many restarts have been counted, of `most`
    counted: bool = True  # this is one of them; otherwise the job goes on with other nodes
    nodes: Sequence[NodeRanks] = ()  # by their numbers; none: they are as before
    shown_there: Sequence[int] = ()  # the nodes whose launchpad shows the output of its ranks itself
    period: float = 0.0  # in how many seconds `most` restarts are allowed; 0: in all


class WorldStopping(Event, recorded=True):
    """A rank of a world has failed, and the world is to start again: its other ranks are stopped."""

    time: int
    world: str  # a role, or a replica of it
    signum: Signum  # the signal that they were sent
    seconds: float  # until the next one
    ranks: list[Rank]  # those that were still running


class WorldRequested(Event):
    """Somebody wants to stop a role of a running job, or have it start again."""

    time: int
    asker: int
    what: str  # "stop", "restart"
    role: str  # a role, or a replica of it


class WorldAsked(Event, recorded=True):
    """This is done to a world, as somebody has asked for it."""

    time: int
    world: str
    what: str  # "stop", "restart"


class WorldAnswered(Event):
    """What becomes of a WorldRequested."""

    asker: int
    text: str
    refused: bool


class WorldRestarted(Event, recorded=True):
    """The ranks of one world were started again, while all others ran on."""

    time: int
    world: str  # a role, or a replica of it
    ranks: list[Rank]
    restarts: int  # how often this world was started again, of `most`
    most: int
    period: float = 0.0  # in how many seconds `most` restarts are allowed; 0: in all
    counted: bool = True  # it had failed; otherwise somebody has asked for it


class NotRestarted(Event, recorded=True):
    """Restarts are allowed, but the ranks are not started again, and the job ends."""

    time: int
    reason: str  # a sentence for the user


class RanksBound(Event, recorded=True):
    """Which CPUs the ranks of this attempt run on."""

    time: int
    # [rank, its node's name, CPUs, NUMA nodes whose memory it prefers] each, both as the kernel writes them (0-3,8); no
    # CPUs: the rank is not bound
    ranks: list[tuple[Rank, str, str, str]]


class RanksSpawned(Event, recorded=True):
    """A rank has spawned others (MPI_Comm_spawn); their numbers follow those of all earlier ranks."""

    time: int
    by: Rank
    node: int
    ranks: list[Rank]
    argv: list[str]  # of the first spawned rank


class PortsTold(Event, recorded=True):
    """Where all ranks find this world."""

    time: int
    world: str  # a role, or a replica of it
    addresses: list[str]  # HOST:PORT each


class RoleReady(Event, recorded=True):
    """A role is ready: those that come after it may start."""

    time: int
    role: str
    seconds: float  # since its ranks had started


class RoleAwaited(Event, recorded=True):
    """A role is not ready yet, and others wait for it."""

    time: int
    role: str
    waiting: Sequence[str]  # the roles that wait
    why: str  # what the last look at it said
    seconds: float  # since its ranks had started


class PhaseChanged(Event, recorded=True):
    """The job's state machine changed phase."""

    time: int
    phase: str  # "stopping", "over"
    cause: str  # a CauseKind of job/outcome.py; "" while nothing has gone wrong
    signum: Signum  # the signal that was sent to the ranks, 0 for none
    seconds: float  # until the next escalation, 0 for no limit
    ranks: list[Rank]  # those that were still running


class JobPlanned(Event, recorded=True):
    """The job that is about to run; the first event of every job."""

    time: int
    wall: Date  # time.time() at `time`
    job: str  # launchpad's id of this job
    pid: int  # of the head
    run_id: str  # TORCHELASTIC_RUN_ID
    words: list[str]  # the target and its arguments
    cwd: str
    nodes: list[NodeRanks]
    folders: dict[str, str]  # the name of each rank's folder within attempt_N
    timeout: float  # seconds; 0 for none
    logs: str  # the job's folder; "" for none
    host: str = ""  # the head's; with the next three it identifies the head's process (record/liveness.py)
    boot: str = ""
    pids: str = ""
    born: float = 0.0
    line_prefix: str = ""  # the template of --log-line-prefix-template; "" for none
    role: str = "default"  # what ${role_name} is in it
    input_rank: Rank = 0  # the one that has our standard input
    programs: Sequence[NodeRanks] = ()  # if there are several: each one's name, and its ranks
    roles: Sequence[NodeRanks] = ()  # if there are several worlds: each one's name, and its ranks in their order


class ClocksSeen(Event, recorded=True):
    """How accurately the clocks of other machines are known now."""

    time: int
    doubts: list[
        tuple[int, int]
    ]  # [node, ns by which its events may have happened earlier or later than they say] each


class RanksHeld(Event, recorded=True):
    """Where the ranks were when the job stalled, timed out or was quiet, or when a rank's wait for others failed."""

    time: int
    why: str  # "timeout", "stall", "vain", "failure", "idle": like StacksTaken
    ranks: list[Rank]  # those that the others seem to wait for; none if all are at the same place
    lines: list[str]  # for the user: which rank is where, and what that means for their collectives
    raising: dict[str, Any] | None = None  # what the first of these ranks was handling, like ExceptionRaised.traceback


class ArrivalsCompared(Event, recorded=True):
    """Who came last to the collectives since the last comparison, and what that cost the others."""

    time: int
    operation: str  # which collective it was; "" if there were several
    ranks: Annotated[list[LateRank], range(1, 1 << 31)]
    because: str = ""  # what slowed the worst of them, if that is clear
    far: Sequence[FarNode] = ()  # nodes that are much farther away


class HeadResumed(Event, recorded=True):
    """`launchpad resume` has taken over, as the launchpad before was killed. Fields like those of JobPlanned."""

    time: int
    wall: float
    pid: int
    host: str
    boot: str
    pids: str
    born: float
    away: Figure  # how long the job had been without launchpad, about, in seconds
    ahead: int  # by how much this launchpad's clock is ahead of the clock before, in ns; 0 on the same machine


class NotResumable(Event, recorded=True):
    """If launchpad is killed from now on, nothing can take over (--keep-running)."""

    time: int
    reason: str


class JobOver(Event, recorded=True):
    """The last event of a job, unless launchpad died before its end."""

    time: int
    code: Annotated[int, range(256)]  # launchpad's exit code


class StacksRequested(Event):
    """Someone asks where the ranks are."""

    time: int
    asker: int  # who gets the answer; 0: the console
    native: bool
    full: bool
    rank: int = -1  # only this one; -1: all
    role: str = ""  # only the ranks of this one, or of this replica; "": all


class DebugRequested(Event):
    """Someone asks for a debugger in a rank."""

    time: int
    asker: int
    rank: int
    port: int  # where it is to be reached; 0 for any free port


class ProfileRequested(Event):
    """Someone asks for a profile of one rank, or of all (-1)."""

    time: int
    asker: int
    rank: int
    seconds: float


class SampleRequested(Event):
    """Someone asks what the ranks do and use."""

    time: int
    asker: int


class SamplesTaken(Event):
    """The answer to SampleRequested: what the nodes have said."""

    time: int
    askers: list[int]
    samples: list[Sampled]
    joining: list[str]  # machines that are being prepared to take part


class ProfilesTaken(Event):
    """The answer to a ProfileRequested."""

    time: int
    asker: int
    profiles: list[ProfileTaken]
    problem: str  # why there are none


class DebuggerListening(Event):
    """A rank's debugger can be reached at a port of this machine; or `problem` says why not."""

    time: int
    rank: int
    asker: int  # who gets the answer; 0: the console
    port: int
    folder: str  # the rank's working folder, if it is on another machine
    waits: bool  # the rank has not begun its program
    problem: str


class StacksTaken(Event):
    """The stacks of all running ranks."""

    time: int
    # "asked", "timeout", "failure", "stall"; "vain": they wait for what nobody can do; "idle": the user should know
    why: str
    asker: int
    full: bool
    ranks: list[int]  # those that were running
    dumps: list[StackDump]  # of those that answered
    starting: Sequence[int] = ()  # those that have no process yet


class NodesApart(Event, recorded=True):
    """These nodes could not reach each other when the job stalled, though the head reached them."""

    time: int
    pairs: list[tuple[int, int]]  # [from, to] each


class Stalled(Event, recorded=True):
    """No rank has written anything or made progress for `seconds`."""

    time: int
    seconds: float
    vain: bool = False  # and none can: they wait in torch's store, and a rank that might have set the key has returned
    role: str = ""  # no rank of this one; others may go on


class FaultInjected(Event, recorded=True):
    """The head is injecting a fault (--inject)."""

    time: int
    signum: Signum  # the signal for the rank's main process or the node's agent; 0: the link to the node is cut
    rank: int  # -1: it is for the node
    node: int


class FaultMissed(Event, recorded=True):
    """The job was over before a fault could be injected."""

    time: int
    fault: str  # as --inject has it


EVENTS = tuple(Event.__subclasses__())
