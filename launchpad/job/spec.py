"""What the user asked for, as frozen values. Creating one probes nothing and starts nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from launchpad.errors import UsageError
from launchpad.job.hosts import Nproc
from launchpad.job.limits import Limits
from launchpad.job.world import WorldSpec
from launchpad.named import NamedTuple

if TYPE_CHECKING:
    from launchpad.job.faults import Faults
    from launchpad.job.health import HealthCheck

Kind = Literal["script", "module", "program", "function", "pickled", "session"]
Backend = Literal["", "gloo", "nccl", "mpi"]
Bind = Literal["none", "numa", "core", "socket", "exclusive", "core-complex"]
MpiLibrary = Literal["", "mpich", "openmpi", "intel"]
FoldChoice = Literal["equal", "numbers", "never"]
ReadyCheck = Literal["started", "ended", "tcp", "http", "line", "command"]

# How long a role may take to get ready, in seconds.
READY_SECONDS = 60.0


class Target(NamedTuple):
    """The program that every rank runs."""

    kind: Kind
    # A path, a dotted module name, a program's name or path, FILE.py:NAME or MODULE:NAME; for a pickled function and
    # a session of calls, a name to show.
    name: str
    args: tuple[str, ...] = ()

    def argv(self, python: str, local_rank: int) -> tuple[str, ...]:
        """The command line, with `${local_rank}` in the arguments replaced, as torchrun does.

        Python runs unbuffered (-u), as under torchrun, so that the last output of a killed rank is not lost.
        """
        args = (arg.replace("${local_rank}", str(local_rank)) for arg in self.args)
        match self.kind:
            case "script" | "function" | "pickled" | "session":  # rank/program.py calls functions
                return (python, "-u", self.name, *args)
            case "module":
                return (python, "-u", "-m", self.name, *args)
            case "program":
                return (self.name, *args)

    @property
    def words(self) -> list[str]:
        """Its command line, as the user gave it."""
        return [*(["-m"] if self.kind == "module" else []), self.name, *self.args]

    @property
    def needs(self) -> tuple[Literal["file", "module", "program", ""], str]:
        """What every node must have to run it, by its name; "" for what the head sends."""
        match self.kind:
            case "script" | "module" | "program":
                return ("file" if self.kind == "script" else self.kind), self.name
            case "function":
                place = self.name.rpartition(":")[0]
                return ("file" if place.endswith(".py") else "module"), place
        return "", ""


class StreamMap(NamedTuple):
    """A choice of streams by local rank: torchrun's `3` (both streams of all ranks) or `0:3,1:2`.

    0 means neither, 1 stdout, 2 stderr, 3 both.
    """

    everywhere: int = 0
    by_local_rank: Mapping[int, int] = {}

    def has(self, local_rank: int, stream: int) -> bool:
        """Whether the stream (1 stdout, 2 stderr) of this local rank is chosen."""
        return bool(self.by_local_rank.get(local_rank, self.everywhere) & stream)

    def __bool__(self) -> bool:
        return bool(self.everywhere) or any(self.by_local_rank.values())

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Parse an option's value. Raises UsageError that names the option and the wrong part."""
        if text in ("0", "1", "2", "3"):
            return cls(everywhere=int(text))
        chosen: dict[int, int] = {}
        for part in text.split(","):
            rank, colon, streams = part.strip().partition(":")
            if not (colon and rank.isdecimal() and len(rank) < 10 and streams in ("0", "1", "2", "3")):
                raise UsageError(
                    f"{option} {text}: {part.strip()!r} is not LOCAL_RANK:STREAMS; write 3 for all ranks or 0:3,1:2 "
                    "for some (0 neither, 1 stdout, 2 stderr, 3 both)"
                )
            if int(rank) in chosen:
                raise UsageError(f"{option} {text}: local rank {int(rank)} is given twice; keep one")
            chosen[int(rank)] = int(streams)
        return cls(by_local_rank=chosen)


def split_filters(text: str) -> tuple[str, ...]:
    """torchrun's list of filters: separated by commas; a double comma stands for a literal one."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


class Share(NamedTuple):
    """The ranks of a program on one node."""

    node: int  # the node's number
    ranks: int


class Program(NamedTuple):
    """One of the programs, from left to right."""

    number: int  # MPI_APPNUM
    target: Target
    shares: tuple[Share, ...]
    python: str = ""  # "": the node's
    cwd: str = ""  # "": the node's
    environ: Mapping[str, str] = {}  # its own variables; they may be secret
    forks: bool = False  # its ranks are forked from the node's forkserver

    def __repr__(self) -> str:
        """Without its variables."""
        return f"Program({self.number}, {self.target})"

    @property
    def label(self) -> str:
        """What it is called before a line, and in the verdict."""
        return self.target.name.rstrip("/").rpartition("/")[2] or self.target.name

    def argv(self, python: str, local_rank: int) -> tuple[str, ...]:
        """A rank's command line on a node with this interpreter."""
        return self.target.argv(self.python or python, local_rank)

    def as_json(self) -> dict[str, Any]:
        """For a dry run, without the values of its variables."""
        return {"program": self.number, **({"cwd": self.cwd} if self.cwd else {}), "forwarded": sorted(self.environ)}

    def entry(self, entry: dict[str, Any], *, hooks: bool) -> dict[str, Any]:
        """A rank's entry in a Start, made this program's."""
        kind = self.target.kind
        return {
            **entry,
            "environ": {**self.environ, **entry["environ"]},
            "python": kind != "program" and hooks,
            "calls": "function" if kind == "function" else "",
            "executes": not self.forks,
            **({"cwd": self.cwd} if self.cwd else {}),
        }


class Ready(NamedTuple):
    """When those that come after a role may start."""

    check: ReadyCheck
    port: str = ""  # for tcp and http: which one
    text: str = ""  # the path of http, the text of a line, a shell's command
    seconds: float = READY_SECONDS

    @property
    def words(self) -> str:
        """As the user wrote it."""
        if self.check in ("tcp", "http"):
            return f"{self.check}:{self.port}{self.text}"
        return f"{self.check}:{self.text}"


def named(world: str, text: str) -> bool:
    """Whether a text names this world: it, or the role of which it is a replica."""
    return bool(text) and text in (world, world.rpartition(".")[0])


class RoleSpec(NamedTuple):
    """One world of the job: a role, or a replica of it."""

    name: str  # the role's; with several replicas and the number of this one, rollout.1
    spec: "JobSpec"
    service: bool = False  # it lives as long as the others
    ports: tuple[str, ...] = ()  # names of ports; each of its ranks has one of each
    ready: Ready = Ready("ended")
    after: tuple[str, ...] = ()  # the worlds that it waits for
    replica: int = 0
    replicas: int = 1
    gpus: int | None = None  # for each rank; None: all of its host

    @property
    def role(self) -> str:
        """The role's name."""
        return self.name if self.replicas == 1 else self.name.rpartition(".")[0]


class JobSpec(NamedTuple):
    """One `launchpad run`."""

    target: Target
    programs: tuple[Program, ...] = ()  # if there are several; the target is then the first one's
    roles: tuple[RoleSpec, ...] = ()  # if there are several worlds; the target is then the first one's
    nproc: Nproc = 1
    python: str = "python3"
    cwd: str = "."
    environ: Mapping[str, str] = {}  # from --env and --env-file
    log_dir: str | None = None
    redirects: StreamMap = StreamMap()  # to files only
    tee: StreamMap = StreamMap()  # to files and the console
    # By stream: lines that contain one of these are also written to a filtered file.
    filters: Mapping[int, tuple[str, ...]] = {}
    shown_local_ranks: frozenset[int] | None = None  # None: all
    line_prefix: str = ""  # the template of the lines' prefixes; "": our own
    input_rank: int = 0  # the rank that has our standard input, and the terminal if that is one
    debug: tuple[int, int] | None = None  # the rank that waits for a debugger, and the port for that; 0: any free one
    limits: Limits = Limits()
    sample: float = 0.0  # seconds between two samples of what the ranks use, for the record; 0: none
    faults: "Faults | None" = None  # those to inject, to try how the job recovers
    world: WorldSpec = WorldSpec()
    role: str = "default"  # ROLE_NAME
    torch: bool = False  # whether the target imports torch, as far as its sources tell
    preload: tuple[str, ...] = ()  # modules imported once per node before the ranks are forked; empty: ranks are exec'd
    executes: bool = False  # the user wants ranks executed, not forked from a kept image either
    hooks: bool = True  # whether Python ranks run code of ours, which reports their failures and stacks
    health: "HealthCheck | None" = None  # what tells whether a node may take part in the next attempt
    gpus: str = ""  # which GPUs each node leases for its ranks; job/gpus.py; "": none
    virtual_local_rank: bool = False  # every rank sees only its own GPU, and has LOCAL_RANK 0
    bind: Bind = "none"  # which CPUs each rank is bound to; job/binding.py
    report_bindings: bool = False  # say it for each rank
    tf_config: bool = False  # every rank has a port and TF_CONFIG, TensorFlow's description of the cluster
    timeline: bool = False  # the ranks tell at their end when they entered their last collectives
    backend: Backend = ""  # LAUNCHPAD_BACKEND; with mpi the ranks also form an MPI_COMM_WORLD
    mpi: MpiLibrary = ""  # the MPI that they use; "": what their program is found to use

    def hides(self, local_rank: int, stream: int) -> str:
        """The option that keeps this stream (1 stdout, 2 stderr) of a local rank off the console, or ""."""
        if self.shown_local_ranks is not None and local_rank not in self.shown_local_ranks:
            return "--local-ranks-filter"
        if self.redirects.has(local_rank, stream) and not self.tee.has(local_rank, stream):
            return "--redirects"
        return ""
