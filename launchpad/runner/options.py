"""The options of a job as typed values, filled in by the command line and launchpad.run. Nothing is probed."""

import os
from typing import Literal

from launchpad.job.hosts import Host, Nproc
from launchpad.job.limits import RestartLimit, Restarts
from launchpad.job.spec import Backend, Bind, FoldChoice, MpiLibrary
from launchpad.named import NamedTuple

WayIn = Literal["paramiko", "openssh"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
StartMethod = Literal["fork", "exec", "forkserver", "spawn"]

# A host that is silent for this many seconds counts as lost.
HEARTBEAT_SECONDS = 10.0


class HostOptions(NamedTuple):
    """Which hosts a job runs on, and how to reach them; the fields are options of `launchpad run`, except three."""

    hosts: str | None = None  # HOST[:N],…
    hostfile: str | None = None
    allocation: tuple[Host, ...] = ()  # the nodes of the batch allocation to run in, instead of these; not an option
    by_srun: bool = False  # the allocation is Slurm's, whose srun starts launchpad on the nodes; not an option
    joined: bool = False  # these are nodes that have joined, of a job with roles; not an option
    include: str = ""
    exclude: str = ""
    ssh: WayIn | None = None  # None: as each host needs it
    ssh_config: str | None = None  # instead of ~/.ssh/config
    accept_new_host_keys: bool = False
    sync: bool = False
    sync_env: bool = False
    enter: str = ""  # a command that runs another one in a container, with its options
    heartbeat_timeout: float = HEARTBEAT_SECONDS  # seconds
    keep_running: float = 0.0  # seconds for which ranks go on while their host has no contact with us
    spares: int = 0  # of the hosts, how many wait to take the place of a lost one: the last ones

    @property
    def silence(self) -> float:
        """After how many seconds head and agents count a silent other side as lost; 0: held links have heartbeats of
        their own.
        """
        return 0.0 if self.keep_running else self.heartbeat_timeout

    @property
    def have_launchpads(self) -> bool:
        """Whether launchpad itself was started on each of them, instead of an agent that was sent there."""
        return self.by_srun or self.joined

    @property
    def given(self) -> bool:
        """Whether any of these was given; read_hosts rejects the others if no hosts are named."""
        return self != HostOptions(heartbeat_timeout=self.heartbeat_timeout, spares=self.spares)


class NodeOptions(NamedTuple):
    """torchrun's options for a launcher that is started once on each node."""

    nnodes: str = "1"
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    standalone: bool = False
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    rdzv_secret_file: str | None = None


class ReportOptions(NamedTuple):
    """Reports on the job besides the console."""

    junit: str | None = None  # a file
    report: str | None = None  # a file
    events: str | None = None  # a file, or "-" for standard output
    job: str | None = None  # its name in a job file
    add_to_reports: float | None = None  # append to those written since then, in seconds since 1970, by earlier jobs
    notify: str | None = None  # a shell command to run at the end
    fold: FoldChoice | None = None  # lines of several ranks that are equal; None: on a terminal, from four ranks on
    quiet: bool = False
    no_advice: bool = False  # don't say for which rank the others waited, nor where the ranks of a quiet job are
    verbose: bool = False  # also say why a kept image was not used

    @property
    def absolute(self) -> "ReportOptions":
        """The same with absolute paths."""
        paths = {name: getattr(self, name) for name in ("junit", "report", "events")}
        return self._replace(
            **{name: os.path.abspath(path) for name, path in paths.items() if path not in (None, "", "-")}
        )


class ProgramOptions(NamedTuple):
    """What each program has of its own if a job has several; the fields are options of `launchpad run`."""

    target: tuple[str, ...] = ()
    nproc: Nproc | None = None
    hosts: str | None = None
    hostfile: str | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    python: str | None = None
    wdir: str | None = None
    env: tuple[str, ...] = ()
    env_file: tuple[str, ...] = ()


class RunOptions(NamedTuple):
    """One `launchpad run`."""

    target: tuple[str, ...] = ()  # the program and its arguments
    programs: tuple[ProgramOptions, ...] = ()  # those after the first, in one world with it
    nproc: Nproc | None = None  # None: not given
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    python: str | None = None
    start_method: StartMethod | None = None  # None: not given; means fork
    no_hooks: bool = False
    preload: str | None = None  # MODULE,…; None: not given
    backend: Backend | None = None
    mpi: MpiLibrary | None = None  # None: not given
    wdir: str | None = None
    env: tuple[str, ...] = ()
    env_file: tuple[str, ...] = ()
    role: str = "default"
    gpus: str = ""  # which GPUs each node leases; job/gpus.py; "": not given
    virtual_local_rank: bool = False
    bind: Bind | None = None  # None: not given; means none
    numa_binding: NumaBinding | None = None  # torchrun's, instead of it
    report_bindings: bool = False
    tf_config: bool = False
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    log_line_prefix_template: str = ""
    local_ranks_filter: frozenset[int] | None = None
    input_rank: int = 0
    debug: tuple[int, int] | None = None
    duplicate_stdout_filters: str = ""
    duplicate_stderr_filters: str = ""
    grace: float | None = None  # in seconds, like the next three
    timeout: float | None = None
    stop_before: float | None = None
    stop_signal: int | None = None
    stall_timeout: float | None = None
    sample: float = 10.0
    inject: str = ""
    health: str = ""  # a command, or doctor; "": not given
    health_timeout: float | None = None  # seconds; None: not given
    max_restarts: RestartLimit = RestartLimit()
    restart: Restarts = "judged"
    progress: tuple[str, ...] = ()
    check: bool = False
    signals_to_handle: frozenset[int] = frozenset()
    hosts: HostOptions = HostOptions()
    nodes: NodeOptions = NodeOptions()
    reports: ReportOptions = ReportOptions()

    @property
    def binds(self) -> Bind:
        """Which CPUs each rank is to be bound to."""
        return self.bind or ("numa" if self.numa_binding == "node" else self.numa_binding) or "none"


def with_absolute_paths(options: RunOptions) -> RunOptions:
    """The options with absolute paths of the files on this machine, for when the working folder changes (--wdir)."""
    hosts = options.hosts
    of_hosts = {name: getattr(hosts, name) for name in ("hostfile", "ssh_config")}
    return options._replace(
        hosts=hosts._replace(**{name: os.path.abspath(path) for name, path in of_hosts.items() if path}),
        reports=options.reports.absolute,
        env_file=tuple(map(os.path.abspath, options.env_file)),
    )
