"""The facts of a checkup (`launchpad doctor`): what a host found out about itself, and about its path to the others.

Each class is the answer to one subject of Check. Sizes are in bytes and times in seconds; -1 is a figure that is not
known, or a limit that is not set.
"""

from typing import Any

from ..named import NamedTuple
from .events import Shown
from .typed import typed


class PlatformSeen(NamedTuple):
    """What an environment of another machine (--sync-env) would find here."""

    machine: Shown  # like "x86_64"
    glibc: Shown  # its version, like "2.36"; "" with another C library
    python: bool  # whether there is a Python that it could be made with


class Identity(NamedTuple):
    """Who the host is, and when."""

    hostname: Shown
    machine: str  # equal for two names of one machine; "" if unknown
    python: str  # the interpreter that answers, which ranks would use
    wall: float  # its time of day


class Inlet(NamedTuple):
    """An address at which the host listens while it is checked."""

    address: str
    interface: str
    mtu: int
    tcp: int  # ports; -1 if it can't listen
    udp: int


class Network(NamedTuple):
    """The host's addresses, best candidates for other hosts first, and all of its interfaces."""

    inlets: list[Inlet]
    interfaces: list[str]


class LookUp(NamedTuple):
    """What the hosts' own names mean on this host, in the order of the request."""

    addresses: list[list[str]]  # none: the name is not known


class Probed(NamedTuple):
    """One host's path to another one."""

    peer: int
    address: str  # of the peer, over which everything below was measured; "" if none of them answered
    source: str  # the own address
    interface: str
    failed: list[list[str]]  # [address, why] of those that did not answer
    latency: float  # the shortest round trip
    sent: int  # small datagrams
    answered: int
    packet: int  # the size of the largest packets that should pass without being cut up
    passes: int  # whether they do: 1, 0, or -1 if it is not known


class Probes(NamedTuple):
    """The paths to all others."""

    paths: list[Probed]


class Heard(NamedTuple):
    """How many small datagrams arrived from each other host."""

    counts: list[list[int]]  # [host, how many] each


class Streamed(NamedTuple):
    """How fast data went to another host for a moment."""

    rate: float


class ResourceLimits(NamedTuple):
    """What the user's processes may use."""

    nofile: int  # ranks start with this one
    nofile_hard: int
    memlock: int
    processes: int
    cores: float  # usable ones, as the CPU affinity and the cgroup's quota say
    all_cores: int
    infiniband: bool  # whether there is an RDMA device, which needs locked memory


class Folder(NamedTuple):
    """A folder and its file system."""

    path: str
    problem: str  # why it can't be used; "" if it can
    free: int
    total: int
    inodes: int  # free ones; -1 where they are not counted
    noexec: bool


class MemoryLeft(NamedTuple):
    """The host's memory, and how much of it is left for the job."""

    total: int
    available: int
    left_in_cgroup: int
    swapped: float  # per second, right now


class Load(NamedTuple):
    """What others do on the host right now."""

    running: float  # tasks that run or want to, averaged over a minute
    busy: float  # the share of all cores


class Software(NamedTuple):
    """What the ranks' interpreter has; "" for what it doesn't."""

    python: str
    torch: str
    cuda: str  # that torch was built for
    packages: dict[str, str]  # versions, by name


class CodeFiles(NamedTuple):
    """The Python files in the working folder."""

    problem: str  # why there are none: the folder is missing
    hashes: dict[str, str]  # by path
    complete: bool


class SshServer(NamedTuple):
    """What any user can see of sshd."""

    pending: int  # connections that are not logged in yet
    begin: int  # from so many on it drops some; -1 if it doesn't show


class KeptImages(NamedTuple):
    """The images that `launchpad warm` keeps."""

    images: list[str]


class GpuHealth(NamedTuple):
    """One GPU."""

    number: int
    name: str
    ecc: int  # uncorrected memory errors since the driver was loaded
    slowed: str  # why its clocks are held down; ""
    used: int
    total: int


class Gpus(NamedTuple):
    """The NVIDIA GPUs."""

    driver: str
    gpus: list[GpuHealth]
    links: list[list[str]]  # what connects each GPU with each: NV18, PIX, SYS …, X for itself; empty if unknown
    apart: list[list[int]]  # pairs that can't read each other's memory
    xids: list[str]  # the driver's error messages in the kernel's log
    log_hidden: bool  # that log is only root's
    problem: str  # why the driver doesn't work
    unknown: str  # why nobody can say whether there are any


class Imported(NamedTuple):
    """Torch is imported for the all_reduce; the first rank's store listens."""

    port: int
    kept: bool  # a kept image had imported it


class Reduced(NamedTuple):
    """One all_reduce with one backend, or in an MPI world."""

    seconds: float
    failed: str  # why there was none; ""


class MpiThere(NamedTuple):
    """The MPI that mpi4py loads."""

    library: str  # its name; "": mpi4py is not there, or finds none
    version: str  # in its own words
    path: str
    problem: str  # why it can't be used; ""


SUBJECTS: dict[str, Any] = {
    "identity": Identity,
    "network": Network,
    "lookup": LookUp,
    "probes": Probes,
    "heard": Heard,
    "stream": Streamed,
    "limits": ResourceLimits,
    "tmp": Folder,
    "cache": Folder,
    "shm": Folder,
    "memory": MemoryLeft,
    "load": Load,
    "software": Software,
    "platform": PlatformSeen,
    "code": CodeFiles,
    "sshd": SshServer,
    "kept": KeptImages,
    "gpus": Gpus,
    "import": Imported,
    "all_reduce": Reduced,
    "mpi": MpiThere,
    "world": Reduced,
}


def facts_of(subject: str, fields: list[Any]) -> Any:
    """The facts in an answer. Raises ValueError if it is no such answer."""
    try:
        return typed(SUBJECTS[subject], fields)
    except TypeError as error:
        raise ValueError(f"{subject}: {error}") from None
