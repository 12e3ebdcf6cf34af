"""Defines the commands that the head sends to an agent; events.py defines what the agent reports."""

import struct
from typing import Any

from .message import Message

# What stands in a text for an environment's folder, and for the one that it and the copies are in.
HERE = "\0here"
CACHE = "\0cache"


class Command(Message):
    """The base of all commands."""


class Hello(Command):
    """The first frame on a link."""

    version: str
    count_gpus: bool
    port: int  # the rendezvous port on the loopback address; 0 for any free one
    silence: float  # seconds without a command after which the head counts as gone; 0: only when the link closes
    accelerator: str = ""  # what to count instead of GPUs, by its name in torch
    python: str = ""  # the ranks' interpreter, which has torch; "" for the agent's own


class Probe(Command):
    """Report NodeFacts. Sent if there is any node besides the head's own."""

    cwd: str  # the folder that the ranks will run in
    torch: bool  # whether to look up torch's version
    python: str  # the ranks' interpreter; "" for the agent's own
    environ: dict[str, str]  # for the ranks, on top of the agent's own environment
    needs: list[str]  # what the ranks run: ["file", PATH], ["module", NAME] or ["program", NAME]


class ReadTopology(Command):
    """Report the TopologyRead. Sent if ranks are to be bound to CPUs."""

    environ: dict[str, str]  # for the ranks, on top of the agent's own environment: it says which GPUs they see


class Sync(Command):
    """Mirror a folder of the head's machine; the agent answers which files it needs (Wanted)."""

    name: str  # of the copy; the same for all jobs that are started in the folder
    files: list[list[Any]]  # [path, permissions, size, modification time in ns, symlink target or ""] each
    digests: list[str]  # their SHA-256, to link those that another environment has; [] for a folder


class FileChunk(Command, raw=struct.Struct("!I")):
    """The next bytes of the wanted files, which come one after the other."""

    file: int  # the index in Sync.files of the one that the first byte belongs to
    data: bytes


class FindEnvironment(Command):
    """Look whether there is this environment (--sync-env); report an EnvironmentFound."""

    name: str
    version: str  # of its Python, like "3.11"
    abi: str  # how the names of that Python's extension modules end
    python: str  # the interpreter that comes with it, relative to its folder; "": look for one here
    libraries: list[str]  # as in MakeEnvironment: those that shared libraries outside of it look for


class MakeEnvironment(Command):
    """All files of the environment are there: have it work; report an EnvironmentMade."""

    name: str
    origin: str  # where it is on the head's machine, for people
    version: str
    python: str  # the interpreter: a path, or relative to the folder
    venv: bool  # whether the folder is to be a venv of that
    texts: list[list[Any]]  # [path, permissions, text] of each further file; HERE and CACHE in a text are paths here
    libraries: list[str]  # folders, with the same marks, of libraries that others of it look for


class LeaseGpus(Command):
    """Lease GPUs for this job's ranks (GpusLeased), until the agent exits."""

    names: list[str]  # numbers as nvidia-smi's, or UUIDs; none: any
    number: int  # of any; 0: all
    free: bool  # only those that nobody uses
    job: str  # what other users see of the job


class ListGpus(Command):
    """Report all GPUs, and who has leased them (GpusListed)."""


class CheckHealth(Command):
    """Find out whether the node is healthy (--health); report a HealthChecked."""

    words: list[str]  # the command; none: the quick part of launchpad doctor
    cwd: str  # where the ranks will run
    environ: dict[str, str]  # for the ranks, on top of the agent's own environment
    seconds: float  # how long it may take


class ListKept(Command):
    """Report what --sync and --sync-env have left here (KeptListed)."""


class RemoveKept(Command):
    """Remove these of it; report a KeptRemoved."""

    names: list[str]


class Listen(Command):
    """Listen on these addresses, to find out which of them the other nodes can reach."""

    addresses: list[str]
    ask: str  # the secret that a caller sends
    answer: str  # the secret that it is sent back


class Reach(Command):
    """Connect to all of these at once, and report each that gives the right answer, until the Start."""

    places: list[list[Any]]  # [address, port] each
    ask: str
    answer: str


class HoldPort(Command):
    """Hold the rendezvous port at this address instead of the loopback one."""

    address: str
    port: int  # 0 for any free one


class HoldPorts(Command):
    """Hold this many free ports too, for ranks to listen at; instead of those held before."""

    number: int


class Ping(Command):
    """The head's heartbeat, answered by a Pong."""

    time: int  # by the head's clock


class Start(Command):
    """Start these ranks. A spare has none: it starts the forkserver, and reports when it is ready (SpareReady)."""

    attempt: int  # 0 for the first
    cwd: str
    environ: dict[str, str]  # for all ranks, on top of the agent's own environment
    defaults: dict[str, str]  # for all ranks: variables to set if they are still unset
    interfaces: dict[str, str]  # likewise, but they may differ from one attempt to the next
    # {"rank": int, "argv": [str], "environ": {str: str}, "python": bool, "calls": str, "debug": bool, "bind": list}
    # and, where programs differ, {"cwd": str, "executes": bool}
    # each; with "debug" it waits for a debugger before it begins its program; "bind": the CPUs that it runs on, and the
    # NUMA nodes whose memory it prefers: [[int], [int]], or [] if it is not bound
    ranks: list[dict[str, Any]]
    argv: list[str]  # a rank's command line, for the forkserver
    calls: str  # as in the ranks, for the forkserver
    preload: list[str]  # modules for the forkserver to import; none: execute the ranks, don't fork them
    window: int  # bytes of output that may be in flight per rank and stream
    store: str  # torch's store at MASTER_ADDR: "serve" it from here, "use" another node's, or "": not ours
    stdin_rank: int  # the rank that gets the head's standard input, -1 for none
    sends_input: bool  # whether that comes as StdinData; otherwise the agent inherited the descriptor, if there is one
    typed: bool  # whether a person can type it
    terminal: list[int]  # [rows, columns] of the terminal that shows that rank's output, or []
    watched: bool  # whether the ranks' stacks will be sampled regularly (--stall-timeout)
    hooks: bool  # whether our hooks run in Python ranks; an entry's "python" marks those ranks
    once: bool = False  # this rank is the job's only one, and is not started again: a forkserver need not stay


class Call(Command, raw=struct.Struct("!")):
    """The next bytes of the pickled call for the ranks of the coming Start; answered by ChunksTaken."""

    data: bytes


class NextCall(Command, raw=struct.Struct("!q")):
    """The next bytes of a call to the ranks of a session; answered by ChunksTaken."""

    left: int  # how many bytes follow
    data: bytes


class EndCall(Command):
    """One rank of a session has to exit as the call that failed in it would have made it exit."""

    rank: int


class EndSession(Command):
    """No more calls: the ranks of the session may exit."""


class Fence(Command):
    """Send what the ranks have written by now, then a Fenced."""

    number: int


class StdinData(Command, raw=struct.Struct("!")):
    """Bytes for the standard input of `stdin_rank`; empty at its end."""

    data: bytes


class Signal(Command):
    """Send a signal to running ranks; agent/ranks/signals.py decides which of its processes get it."""

    signum: int
    stops: bool = False  # it asks the ranks to stop, as INT, TERM and HUP do in any case
    ranks: list[int] | None = None  # only these; None: all


class StopBy(Command):
    """The ranks will be stopped after so many seconds, or once they have been asked to stop, killed. None: not known.

    It says so for `launchpad.stop_by`, and nothing else.
    """

    seconds: float | None


class SignalRank(Command):
    """Send a signal to the main process of one rank: an injected fault."""

    rank: int
    signum: int


class SignalAgent(Command):
    """Send a signal to yourself: an injected fault, KILL or STOP."""

    signum: int


class Credit(Command):
    """This many bytes of the stream were consumed; as many more may be sent."""

    rank: int
    stream: int
    size: int


class Finish(Command):
    """All ranks are gone: kill what they left behind, send the rest of their output; then exit or await a Start."""

    leave: bool
    grace: float = 0.0  # seconds that what they left behind has to end by itself


class MpiWorld(Command):
    """Serve PMI-1 or PMIx to these ranks of the next Start: with ranks on other nodes they form an MPI_COMM_WORLD."""

    number: int  # 0 for the job's own world; others were spawned
    name: str  # unique
    size: int
    first: int  # the MPI rank of the first of `ranks`; the others follow it
    ranks: list[int]  # none: the world is on other nodes
    programs: list[int]  # MPI_APPNUM of all its ranks: their program's place among those that were started together
    hosts: list[str]  # the nodes' names
    counts: list[int]  # how many ranks each of them has
    mapping: str  # the same in MPICH's notation
    parent: list[int]  # the world and MPI rank that spawned it; [] for the job's own
    keys: dict[str, str]  # the initial ones
    interface: str  # by which the nodes reach each other; "" for a single node
    library: str  # --mpi: "mpich", "intel" or "openmpi"; "": what the ranks' program is found to use
    beside: int = 0  # how many ranks of the job's other worlds this host has


class BarrierOut(Command):
    """All members have reached this barrier."""

    world: int
    group: str
    keys: dict[str, str]  # put on other nodes


class StartMore(Command):
    """Execute these too: the ranks of a spawned world."""

    ranks: list[dict[str, Any]]  # as in Start, and {"cwd": str}; they are not bound


class MpiReply(Command):
    """The answer to an MpiRequest: a line of PMI-1."""

    rank: int
    line: str


class PmixReply(Command):
    """The answer to a PmixRequest."""

    number: int
    status: int  # PMIx' own
    found: Any


class PmixFetch(Command):
    """A rank on another node wants the data of this MPI rank; answered by PmixFetched."""

    number: int
    world: int
    rank: int


class DumpStacks(Command):
    """Report where each running rank is, in a StackDump each (stacks.py)."""

    number: int  # of this request
    everything: bool  # all threads, and the last collectives
    insists: bool  # send the signal to a rank that does not answer over the debug channel
    native: bool  # native frames too, if py-spy is installed on the node


class Debug(Command):
    """Have the rank's debugger listen, unless it does; answered by DebuggerReady."""

    rank: int


class Profile(Command):
    """Have py-spy watch running ranks; each is answered by a ProfileTaken."""

    number: int  # of this request
    ranks: list[int]
    seconds: float


class Sample(Command):
    """Report what the running ranks use; answered by a Sampled and, without `asks`, Hindrances and ArrivalTimes."""

    number: int  # of this request
    asks: bool  # ask the ranks, too, what they wait for; otherwise, which collectives they have entered


class TunnelOpen(Command):
    """Connect to the rank's debugger. If that fails, or when it hangs up, TunnelRead has no data."""

    number: int  # of the connection; each gets a new one
    rank: int


class TunnelData(Command, raw=struct.Struct("!I")):
    """Bytes for a rank's debugger, answered by TunnelWritten; none: hang up."""

    number: int
    data: bytes


class TunnelCredit(Command):
    """This many bytes of TunnelRead were passed on; as many more may be sent."""

    number: int
    size: int


class KeeperRequest(Command):
    """Ask the keeper of images: the only frame to a node on which no agent was started, answered by KeeperReply."""

    request: dict[str, Any]  # as for image/keeper_control.py's `ask`


class Check(Command):
    """Find out about this subject of a checkup (`launchpad doctor`), to which no agent belongs; answered by Checked."""

    subject: str  # agent/checkup/answers.py has a function for each
    request: dict[str, Any]


class Resume(Command):
    """The first frame on a connection to a held link (agent/holder.py): send the agent's frames from here on."""

    secret: str
    taken: int  # how many of them the head has; -1: it doesn't know, and wants those that have not been acknowledged
    done: int = -1  # how many of these need not be kept; -1: all


class EventsTaken(Command):
    """For the holder: the head has so many of the agent's frames."""

    events: int


class LetGo(Command):
    """For the holder: hang up on the agent."""


class RosterChanged(Command):
    """Who belongs to the job has changed: for the launchpad of a node that has joined, answered by RosterHeld."""

    rosters: list[Any]  # job/succession.py's, the newest last
    survives: bool  # the job goes on when a node is lost


class HeadMoved(Command):
    """The job is led from elsewhere: for the launchpad of a node that has joined, which joins there."""

    host: str
    port: int


class JoinMore(Command):
    """Join so many more times, with an agent each: for the launchpad of a node that has joined.

    Where the job has several worlds on a node, each has an agent of its own there.
    """

    further: int


class JobEnded(Command):
    """The job is over: the last frame to the launchpad of a node that has joined, which takes it for itself."""

    code: int  # the job's exit code
    lines: list[str]  # why, for the user


COMMANDS = tuple(Command.__subclasses__())
