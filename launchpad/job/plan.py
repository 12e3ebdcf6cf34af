"""Turns the job's spec and the nodes' resources into a plan: every rank's node, command line and environment."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from launchpad.errors import UsageError
from launchpad.job.membership import Seat
from launchpad.job.spec import JobSpec, Program
from launchpad.named import Named, NamedTuple
from launchpad.protocol.commands import Start
from launchpad.protocol.defaults import defaults_for
from launchpad.protocol.events import AgentReady, NodeRanks, TopologyRead

if TYPE_CHECKING:  # few jobs bind their ranks
    from launchpad.job.binding import Binding

# How ranks that call functions of ours get them: by name, one that is sent to them, or one after the other.
Calls = Literal["", "function", "pickled", "session"]
_CALLS = get_args(Calls)

# Descriptors of an agent: three per rank (stdout, stderr, exec status), and some of its own. A rank that waits to be
# forked needs four (both ends of stdout and stderr).
FILES_PER_RANK = 3
FILES_OF_AGENT = 32
FILES_FOR_MPI = 2  # both ends of a rank's PMI connection

# Addresses at which the agent of a single node reserves the port.
LOOPBACK = ("127.0.0.1", "localhost")

# torchrun's contract (2.13: torch/distributed/elastic/agent/server/local_elastic_agent.py). --env can't override it.
CONTRACT = frozenset(
    (
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
        "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE"
    ).split()
)


class Member(NamedTuple):
    """A node of a job of several, or on another machine, before it has been probed."""

    name: str
    nproc: int | str
    python: str  # the ranks' interpreter there; "" for the agent's own
    own: JobSpec | None = None  # what its ranks run, if its own command line said so
    ends_at: float | None = None  # when its own batch allocation ends, in seconds since 1970


class NodePlacement(NamedTuple):
    """One of several nodes, or a node that is not this machine."""

    name: str  # as the user gave it, or its own
    nproc: int | str  # a number of ranks, auto, cpu, gpu, or an accelerator's name in torch
    python: str  # the ranks' interpreter there
    cwd: str  # the ranks' working folder there
    interface: str = ""  # the network interface that the nodes reach each other by; "" for one node
    own: JobSpec | None = None  # what its ranks run, if its own command line said so
    address: str = ""  # its own at that interface
    ends_at: float | None = None  # when its own batch allocation ends, in seconds since 1970


class Master(NamedTuple):
    """The rendezvous of several nodes: an address and port that all of them could reach."""

    address: str
    port: int


class Stdin(NamedTuple):
    """How one rank gets our standard input."""

    typed: bool = False  # it is a terminal
    sent: bool = False  # in frames, to another machine; otherwise the rank has our descriptor
    terminal: Sequence[int] = ()  # [rows, columns] of the terminal that shows the rank's output, if it can edit lines


class RankPlan(NamedTuple):
    """One rank."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]  # its variables of the contract
    binding: "Binding | None" = None  # None: it may run on any CPU
    program: Program | None = None  # the one that it runs, if the job has several


class NodeResources(NamedTuple):
    """One node: what it has for its ranks, and what they run."""

    index: int  # type: ignore[assignment]  # a tuple's method of this name is not needed
    ready: AgentReady
    place: NodePlacement
    spec: JobSpec  # the job's, or its own
    slots: int  # how many ranks it takes
    files_per_rank: int  # descriptors of its agent
    topology: TopologyRead | None = None  # if its ranks are bound to CPUs
    ports: Sequence[int] = ()  # for --tf-config, those that it holds for its ranks

    @property
    def most_by_files(self) -> int:
        """How many ranks its limit of open files allows."""
        return max(0, (self.ready.open_files - FILES_OF_AGENT) // self.files_per_rank)

    @property
    def most(self) -> int:
        """How many ranks its limits allow."""
        return max(0, min(self.most_by_files, self.ready.processes - 1))

    def check(self, count: int) -> None:
        """Raise UsageError if its limits don't allow so many ranks."""
        name = self.place.name
        if count > self.most_by_files:
            files = count * self.files_per_rank + FILES_OF_AGENT
            raise UsageError(
                f"--nproc {count} needs {files} open files, but the limit on {name} is {self.ready.open_files}: "
                f"raise it (ulimit -Hn) or start at most {self.most_by_files} ranks"
            )
        if count > self.most:
            raise UsageError(
                f"--nproc {count} is too many: {name} allows {self.ready.processes} processes in all; "
                "start fewer ranks, or raise the limit (ulimit -u, the cgroup's pids.max, kernel.pid_max)"
            )

    def visible_gpu(self, local_rank: int) -> str:
        """The one GPU that a rank sees under --virtual-local-rank: the entry at its local rank in the node's list."""
        listed = self.spec.environ.get("CUDA_VISIBLE_DEVICES", self.ready.visible_devices)
        if listed is None:
            return str(local_rank)
        devices = [device.strip() for device in listed.split(",")]
        if local_rank >= len(devices):
            raise UsageError(
                f"--virtual-local-rank: local rank {local_rank} has no GPU in CUDA_VISIBLE_DEVICES={listed}; start "
                "fewer ranks, or list more devices"
            )
        return devices[local_rank]


class NodePlan(NamedTuple):
    """One node and its ranks."""

    index: int  # type: ignore[assignment]  # a tuple's method of this name is not needed
    name: str  # as the user gave it, or its own
    cwd: str
    defaults: Mapping[str, str]  # for every rank, if unset in the node's environment
    ranks: tuple[RankPlan, ...]  # none: a spare, or a node that is lost
    environ: Mapping[str, str]  # the user's own variables
    store: str = ""  # torch's store at MASTER_ADDR: "serve", "use", or "" if rank 0 serves it
    once: bool = False  # it has the only rank of the job, which is never started again
    interface: str = ""  # the network interface that the nodes reach each other by; "" for one node
    address: str = ""  # its own there
    preload: tuple[str, ...] = ()  # imported once, before the ranks are forked; empty: they are exec'd
    python: bool = False  # the ranks are Python programs
    calls: Calls = ""  # they call functions
    hooks: bool = True  # Python ranks run code of ours
    shown_there: bool = False  # the launchpad typed there shows and files its ranks' output
    argv: tuple[str, ...] = ()  # a rank's command line, for the forkserver of a node that has none
    slots: int = 0  # how many ranks it takes
    most: int = 0  # how many it can hold, with those that they spawn
    ends_at: float | None = None  # when its own batch allocation ends, in seconds since 1970
    mpi: bool = False  # its ranks are part of an MPI_COMM_WORLD
    mpi_library: str = ""  # --mpi; "": what their program uses
    beside: int = 0  # how many ranks of other worlds its host has

    def __repr__(self) -> str:
        """Without the user's variables, whose values may be secret."""
        return f"NodePlan({self.index}, {self.name!r})"


class Plan(Named):
    """The whole job: the value that `--dry-run` prints is the one that is run."""

    run_id: str
    nodes: tuple[NodePlan, ...]  # all that the job has or had, by their numbers, with and without ranks
    mpi_why: str = ""  # which MPI the ranks use, and why; for --dry-run only
    watched: bool = False  # they are asked for their stacks regularly (--stall-timeout)
    input_rank: int = 0  # the one that has our standard input
    debug_rank: int = -1  # the one that waits for a debugger before it begins; -1 for none
    health: str = ""  # the check before each attempt (--health), for --dry-run
    left_out: Mapping[int, str] = {}  # the nodes that have failed it, and why; likewise
    roles: tuple[NodeRanks, ...] = ()  # if there are several worlds: each one's name, and its ranks

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @functools.cached_property
    def taking_part(self) -> list[NodePlan]:
        """The nodes with ranks, in the order of these."""
        return sorted((node for node in self.nodes if node.ranks), key=lambda node: node.ranks[0].rank)

    @functools.cached_property
    def ranks(self) -> list[RankPlan]:
        """All ranks, in order."""
        return [rank for node in self.taking_part for rank in node.ranks]

    def node_of(self, rank: int) -> NodePlan:
        """The node that the rank runs on."""
        return next(node for node in self.taking_part if rank <= node.ranks[-1].rank)

    @functools.cached_property
    def mpi_worlds(self) -> dict[str, list[NodePlan]]:
        """The nodes of each MPI_COMM_WORLD, in the order of its ranks, by its role; "" if the job has no roles."""
        names = {rank: name for name, ranks in self.roles for rank in ranks}
        found: dict[str, list[NodePlan]] = {}
        for node in self.taking_part:
            if node.mpi:
                found.setdefault(names.get(node.ranks[0].rank, ""), []).append(node)
        return found

    @property
    def bindings(self) -> list[tuple[int, str, str, str]]:
        """What RanksBound says of each rank."""
        from launchpad.job import binding

        return [
            (rank.rank, node.name, *binding.written(rank.binding)) for node in self.taking_part for rank in node.ranks
        ]

    @functools.cached_property
    def seats(self) -> tuple[Seat, ...]:
        """Which nodes take part, with how many ranks each."""
        return tuple(Seat(node.index, len(node.ranks)) for node in self.taking_part)

    @functools.cached_property
    def programs(self) -> list[NodeRanks]:
        """Each program's name and ranks, for the record, if there are several."""
        found: dict[int, NodeRanks] = {}
        for rank in self.ranks:
            if rank.program is not None:
                found.setdefault(rank.program.number, (rank.program.label, []))[1].append(rank.rank)
        return list(found.values())

    @property
    def by_node(self) -> list[NodeRanks]:
        """Each node's name and ranks, for the record."""
        return [(node.name, [rank.rank for rank in node.ranks]) for node in self.nodes]

    def start(self, node: NodePlan, attempt: int, restarts: int, window: int, stdin: Stdin) -> Start:
        """The command that starts the node's ranks, for the first time or again; a spare only gets ready for it.

        `attempt`: 0 for the first. `restarts`: how many of them were counted.
        """
        count = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
        has_input = any(rank.rank == self.input_rank for rank in node.ranks)
        return Start(
            attempt=attempt,
            cwd=node.cwd,
            environ=dict(node.environ),
            defaults=dict(node.defaults),
            interfaces=_interfaces(node.interface),
            ranks=[self._entry(node, rank, count) for rank in node.ranks],
            argv=list(node.argv),
            calls=node.calls,
            # A rank's MPI settings, which the forkserver must have, are not known before it has a rank.
            preload=list(node.preload) if node.ranks or not node.mpi else [],
            window=window,
            store=node.store,
            stdin_rank=self.input_rank,
            sends_input=stdin.sent and has_input,
            typed=stdin.typed and has_input,
            terminal=list(stdin.terminal),
            watched=self.watched,
            hooks=node.hooks,
            once=node.once,
        )

    def _entry(self, node: NodePlan, rank: RankPlan, count: Mapping[str, str]) -> dict[str, Any]:
        """A rank in a Start."""
        entry = {
            "rank": rank.rank,
            "argv": list(rank.argv),
            "environ": {**rank.environ, **count},
            "python": node.python and node.hooks,
            "calls": node.calls,
            "debug": rank.rank == self.debug_rank,
            "bind": list(rank.binding or ()),
        }
        return entry if rank.program is None else rank.program.entry(entry, hooks=node.hooks)

    def as_json(self) -> dict[str, Any]:
        """The plan for machines, exactly as it is run, but without the values of the user's own variables."""
        return {
            "run_id": self.run_id,
            "world_size": self.world_size,
            "preload": list(self.nodes[0].preload),
            "forwarded": sorted(self.nodes[0].environ),
            **({"mpi": self.mpi_why} if self.mpi_why else {}),
            **({"health": self.health} if self.health else {}),
            "nodes": [
                {
                    "node": node.index,
                    "name": node.name,
                    "cwd": node.cwd,
                    "store": node.store,
                    **({"left_out": self.left_out[node.index]} if node.index in self.left_out else {}),
                    "environ_where_unset": {**node.defaults, **_interfaces(node.interface)},
                    "ranks": [
                        {
                            "rank": rank.rank,
                            "local_rank": rank.local_rank,
                            "argv": list(rank.argv),
                            "environ": dict(rank.environ),
                            **(rank.program.as_json() if rank.program else {}),
                            **({"cpus": rank.binding[0], "memory_nodes": rank.binding[1]} if rank.binding else {}),
                        }
                        for rank in node.ranks
                    ],
                }
                for node in self.nodes
            ],
        }


def make_plan(
    spec: JobSpec,
    nodes: Sequence[AgentReady],
    run_id: str,
    places: Sequence[NodePlacement] = (),
    master: Master | None = None,
    seats: Sequence[Seat] | None = None,
    topologies: Sequence[TopologyRead | None] = (),
    ports: Sequence[Sequence[int]] = (),
) -> Plan:
    """Lay out the ranks over the nodes. Raises UsageError if a node can't hold its ranks.

    `places` has an entry for each node if the user named the nodes; `master` is given for several nodes. `seats`: which
    nodes take part, and with how many ranks; None: all, with as many as `places` says. `topologies`: of the nodes whose
    ranks are bound to CPUs. `ports`: for --tf-config, those that each node holds for its ranks.
    """
    _check_environ(spec)
    places = places or [NodePlacement(node.hostname, spec.nproc, spec.python, spec.cwd) for node in nodes]
    columns = (range(len(nodes)), nodes, places, topologies or [None] * len(nodes), ports or [()] * len(nodes))
    resources = [_resources(spec, *row) for row in zip(*columns, strict=True)]
    own_port = nodes[0].port
    if own_port < 0:
        raise port_taken(spec.world.master_port, places[0].name, nodes[0].port_holder)
    if seats is None:
        seats = [Seat(node.index, node.slots) for node in resources]
    meeting = master or Master(spec.world.master_addr, spec.world.master_port or own_port)
    reserved = master is not None or (meeting.address in LOOPBACK and meeting.port == own_port)
    ranks = _all_ranks(spec, resources, seats, _job_environ(spec, run_id, seats, meeting))
    stores = {seat.node: "use" if group else "serve" for group, seat in enumerate(seats)}
    once = len(nodes) == sum(seat.ranks for seat in seats) == 1 and not spec.limits.max_restarts.most
    use_store = reserved and bool(spec.preload) and (not spec.programs or spec.programs[0].forks)
    return Plan(
        run_id,
        tuple(
            _node_plan(node, ranks.get(node.index, ()), stores.get(node.index, "") if use_store else "", spec, once)
            for node in resources
        ),
        watched=spec.limits.stall_timeout is not None,
        input_rank=spec.input_rank,
        debug_rank=spec.debug[0] if spec.debug else -1,
    )


def port_taken(port: int, name: str, holder: str) -> UsageError:
    """The error for a --master-port that the first node can't hold. `name` is the node's; `holder` has the port."""
    return UsageError(
        f"--master-port {port}: {holder or 'another program'} listens there on {name}; end it, give another port, or "
        "leave the option out to get a free one"
    )


def _interfaces(name: str) -> dict[str, str]:
    """Make gloo, NCCL and tensorpipe use the interface that the nodes reached each other by."""
    if not name:
        return {}
    # NCCL treats a name as a prefix (eth1 matches eth10) unless it starts with "=".
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "TP_SOCKET_IFNAME": name}


def _check_environ(spec: JobSpec) -> None:
    """Raise UsageError if the user sets a variable that is ours to set."""
    given = spec.environ.keys() | {name for program in spec.programs for name in program.environ}
    for name in sorted(CONTRACT & given):
        raise UsageError(f"--env {name}: launchpad sets {name} for each rank; leave it out")
    if spec.gpus and "CUDA_VISIBLE_DEVICES" in given:
        raise UsageError("--env CUDA_VISIBLE_DEVICES: --gpus sets it for each rank; leave one of them out")
    if spec.tf_config and "TF_CONFIG" in given:
        raise UsageError("--env TF_CONFIG: --tf-config sets it for each rank; leave one of them out")


def _resources(
    spec: JobSpec,
    index: int,
    ready: AgentReady,
    place: NodePlacement,
    topology: TopologyRead | None,
    ports: Sequence[int],
) -> NodeResources:
    here = place.own or spec
    files = FILES_PER_RANK + bool(here.preload) + (FILES_FOR_MPI if spec.backend == "mpi" else 0) + spec.tf_config
    slots = rank_count(place.nproc, ready, place.name)
    return NodeResources(index, ready, place, here, slots, files, topology if here.bind != "none" else None, ports)


def _job_environ(spec: JobSpec, run_id: str, seats: Sequence[Seat], master: Master) -> dict[str, str]:
    """The variables that all ranks have in common."""
    world = str(sum(seat.ranks for seat in seats))
    return {
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(len(seats)),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": master.address,
        "MASTER_PORT": str(master.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.limits.max_restarts.most),
        "TORCHELASTIC_RUN_ID": run_id,
        # True would make every rank a client, whatever the address. A forked rank asks launchpad for the store at this
        # one address (rank/store.py); at any other address rank 0 hosts the store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **({"LAUNCHPAD_BACKEND": spec.backend} if spec.backend else {}),
        **({"LAUNCHPAD_TIMELINE": "1"} if spec.timeline else {}),
    }


def _all_ranks(
    spec: JobSpec, resources: Sequence[NodeResources], seats: Sequence[Seat], job: Mapping[str, str]
) -> dict[int, tuple[RankPlan, ...]]:
    """The ranks of each node that takes part, by its index. `job`: the variables that they have in common."""
    workers = _workers(resources, seats) if spec.tf_config else []
    found = {}
    first = 0
    for group, (index, count) in enumerate(seats):
        node = resources[index]
        node.check(count)
        shared = {**job, "ROLE_NAME": node.spec.role, "GROUP_RANK": str(group), "LOCAL_WORLD_SIZE": str(count)}
        ranks = [_rank_plan(node, first + local, local, shared) for local in range(count)]
        if spec.backend == "mpi":
            ranks = _with_mpi(ranks, node.place)
        if spec.tf_config:
            ranks = [_with(rank, {"TF_CONFIG": _tf_config(workers, rank.rank)}) for rank in ranks]
        found[index] = tuple(ranks)
        first += count
    return found


def _rank_plan(node: NodeResources, rank: int, local_rank: int, shared: Mapping[str, str]) -> RankPlan:
    virtual = node.spec.virtual_local_rank
    own = {"RANK": str(rank), "LOCAL_RANK": "0" if virtual else str(local_rank), "ROLE_RANK": str(rank)}
    own |= leased_gpus(node.spec, node.ready)
    if virtual:
        own["CUDA_VISIBLE_DEVICES"] = node.visible_gpu(local_rank)
    if node.spec.programs:
        from launchpad.job import programs

        program = programs.of_local_rank(node.spec.programs, node.index, local_rank)
        argv = program.argv(node.place.python, local_rank)
        return RankPlan(rank, local_rank, argv, {**shared, **own}, program=program)
    return RankPlan(rank, local_rank, node.spec.target.argv(node.place.python, local_rank), {**shared, **own})


def _with(rank: RankPlan, more: Mapping[str, str]) -> RankPlan:
    return rank._replace(environ={**rank.environ, **more})


def _with_mpi(ranks: Sequence[RankPlan], place: NodePlacement) -> list[RankPlan]:
    from launchpad.job import mpi

    host = place.name if place.interface else ""
    return [
        _with(rank, mpi.environ(mpi.MpiSeat(rank.rank, int(rank.environ["WORLD_SIZE"]), local, len(ranks), host)))
        for local, rank in enumerate(ranks)
    ]


def _workers(resources: Sequence[NodeResources], seats: Sequence[Seat]) -> list[str]:
    """Where each rank listens, in order."""
    found = []
    for index, count in seats:
        host = resources[index].place.address or LOOPBACK[0]
        found += [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in resources[index].ports[:count]]
    return found


def _tf_config(workers: Sequence[str], index: int) -> str:
    """What TensorFlow's MultiWorkerMirroredStrategy wants to know, by which each process finds the others."""
    return json.dumps({"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}})


def _node_plan(node: NodeResources, ranks: tuple[RankPlan, ...], store: str, job: JobSpec, once: bool) -> NodePlan:
    """The node with its ranks; without any, it may get a seat, and this is the time to say that it can't have one."""
    spec, place = node.spec, node.place
    count = len(ranks) or node.slots
    threads = node.ready.cores // count
    if node.topology is not None:
        from launchpad.job import binding

        bindings = binding.bind_ranks(spec.bind, node.topology, count, place.name)
        threads = min(threads, binding.threads(bindings))
        ranks = tuple(rank._replace(binding=one) for rank, one in zip(ranks, bindings, strict=False))
    if not ranks:
        node.check(count)
        if spec.virtual_local_rank:
            node.visible_gpu(count - 1)
    target, preload = spec.target, spec.preload
    if spec.programs:
        from launchpad.job import programs

        target, preload = programs.image_of(spec.programs, node.index, preload)
    kind = target.kind
    return NodePlan(
        node.index,
        place.name,
        place.cwd,
        {name: value for name, value in defaults_for(threads).items() if name not in spec.environ},
        ranks,
        spec.environ,
        store=store if preload else "",
        once=once,
        interface=place.interface,
        address=place.address,
        preload=preload,
        python=kind != "program",
        calls=kind if kind in _CALLS else "",  # type: ignore[arg-type]
        hooks=spec.hooks,
        shown_there=place.own is not None,
        argv=target.argv(place.python, 0),
        slots=node.slots,
        most=node.most,
        ends_at=place.ends_at,
        mpi=job.backend == "mpi",
        mpi_library=job.mpi,
    )


def leased_gpus(spec: JobSpec, ready: AgentReady) -> dict[str, str]:
    """The variable by which ranks see the GPUs that their node has leased for them (--gpus), and no others."""
    return {"CUDA_VISIBLE_DEVICES": ready.visible_devices or ""} if spec.gpus else {}


def rank_count(requested: int | str, node: AgentReady, name: str) -> int:
    """How many ranks the node gets: `auto` means one per GPU, or one per usable core if there are no GPUs."""
    match requested:
        case "cpu":
            return node.cores
        case "gpu":
            if node.gpus == 0:
                raise UsageError(
                    f"--nproc gpu: {name} has no visible GPU; check CUDA_VISIBLE_DEVICES and the driver, "
                    "or give a number"
                )
            return node.gpus
        case "auto":
            return node.gpus or node.cores
        case str():
            if node.gpus <= 0:
                raise UsageError(f"--nproc {requested}: torch finds no {requested} on {name}; give a number of ranks")
            return node.gpus
    return requested
