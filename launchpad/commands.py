"""The vocabulary of commands: what the head asks of an agent; events.py has what that reports."""

from typing import Any, NamedTuple


class Hello(NamedTuple):
    """The first frame on a link."""

    version: str
    count_gpus: bool
    port: int  # of the rendezvous on the loopback address; 0 for any that is free
    silence: float  # seconds after which a head that says nothing is taken for gone; 0: the link's end tells


class Survey(NamedTuple):
    """Look around; asked where there is another node than the head's own."""

    cwd: str  # the folder that the ranks are to run in
    torch: bool  # whether torch's version is of interest
    python: str  # the ranks' interpreter; "": the one that the agent runs in
    environ: dict[str, str]  # of the ranks, over the agent's own


class Sync(NamedTuple):
    """Have the files of a folder here, as they are on the head's machine."""

    name: str  # of the folder's copy; the same for each job that is started in it
    files: list[list[Any]]  # [path, permissions, bytes, modification time in ns, "" or where the link leads] each


class Piece(NamedTuple):
    """The next bytes of a file that was wanted; one that is complete is followed by the next."""

    file: int  # its place in the list
    data: bytes


class Listen(NamedTuple):
    """Listen on these addresses, to find out which of them the other nodes reach."""

    addresses: list[str]
    ask: str  # who says this
    answer: str  # is told that


class Reach(NamedTuple):
    """Connect to these, all at once; each that answers rightly is reported. They are forgotten at the Start."""

    places: list[list[Any]]  # [address, port] each
    ask: str
    answer: str


class Hold(NamedTuple):
    """Hold the rendezvous port at this address instead of the loopback one."""

    address: str
    port: int  # 0 for any that is free


class Ping(NamedTuple):
    """The head is there; say that you are."""

    time: int  # of the head


class Start(NamedTuple):
    """Start these ranks."""

    cwd: str
    environ: dict[str, str]  # for all ranks, over the agent's own environment
    defaults: dict[str, str]  # for all ranks, where the result of the above leaves them unset
    ranks: list[dict[str, Any]]  # {"rank": int, "argv": [str], "environ": {str: str}, "python": bool}
    preload: list[str]  # modules to be imported once, in a process that the ranks are forked from; none: execute them
    window: int  # bytes of output that may be under way per rank and stream
    store: str  # torch's store at MASTER_ADDR: "serve" it from here, "use" it as served on another node, "" not ours
    stdin_rank: int  # the rank that gets the head's standard input, -1 for none
    sends_input: bool  # whether that comes as Input; else the agent was given the descriptor itself, if there is one
    terminal: list[int]  # [rows, columns] of a terminal that rank's output is shown on, or []
    watched: bool  # whether the ranks will be asked again and again where they are (--stall-timeout)


class Call(NamedTuple):
    """The next bytes of what the ranks of the Start that follows are to call; to be answered by Taken."""

    data: bytes


class Input(NamedTuple):
    """Bytes for the standard input of the rank that gets it; none: its end."""

    data: bytes


class Signal(NamedTuple):
    """Send a signal to the process group of every rank that runs."""

    signum: int


class Credit(NamedTuple):
    """So many bytes of this stream were consumed; as many more may be sent."""

    rank: int
    stream: int
    size: int


class Finish(NamedTuple):
    """All ranks are gone: end what they left behind, send what they wrote; then leave, or be ready for a Start."""

    leave: bool


class World(NamedTuple):
    """Speak PMI-1 with these ranks of the next Start: with others elsewhere they are an MPI_COMM_WORLD."""

    number: int  # 0 is the job's own, others were spawned
    name: str  # nobody else has it
    size: int
    first: int  # the MPI rank of the first of these; the others follow it
    ranks: list[int]
    programs: list[int]  # of each of them, which of those that were spawned together: MPI_APPNUM
    mapping: str  # which MPI ranks share a node, as MPICH writes it
    keys: dict[str, str]  # that are there from the start
    interface: str  # by which the nodes reach each other; "" for one node


class BarrierOut(NamedTuple):
    """All who are to be at this barrier are."""

    world: int
    group: str
    keys: dict[str, str]  # what was put on other nodes


class StartMore(NamedTuple):
    """Execute these too: ranks of a world that was spawned."""

    ranks: list[dict[str, Any]]  # as in Start, and {"cwd": str}


class MpiReply(NamedTuple):
    """The answer to an MpiRequest, a line of PMI-1."""

    rank: int
    line: str


class Examine(NamedTuple):
    """Say of each rank that runs where it is: an Examined each (stacks.py)."""

    number: int  # of this question
    everything: bool  # all threads and the last collectives
    insists: bool  # a rank that does not answer by its socket is sent the signal
    native: bool  # the frames of native code as well, where py-spy is installed on the node


Command = (
    Hello
    | Survey
    | Sync
    | Piece
    | Listen
    | Reach
    | Hold
    | Ping
    | Start
    | Input
    | Signal
    | Credit
    | Finish
    | World
    | BarrierOut
    | StartMore
    | MpiReply
    | Call
    | Examine
)
