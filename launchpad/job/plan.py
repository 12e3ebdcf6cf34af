"""From what was asked for and what the nodes have to what is run: every rank's node, command line and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from launchpad.commands import Start
from launchpad.errors import UsageError
from launchpad.events import AgentReady
from launchpad.job.spec import JobSpec

# Descriptors of an agent: three for each rank (stdout, stderr, exec status), and some of its own. Ranks that wait to be
# forked have four (both ends of stdout and stderr).
FILES_PER_RANK = 3
FILES_OF_AGENT = 32
FILES_FOR_MPI = 2  # both ends of a rank's PMI connection

# Addresses at which the agent of a single node holds the port.
LOOPBACK = ("127.0.0.1", "localhost")

# torchrun's contract (2.13: torch/distributed/elastic/agent/server/local_elastic_agent.py), which a user's --env may
# not break.
CONTRACT = frozenset(
    (
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
        "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE"
    ).split()
)


class Elsewhere(NamedTuple):
    """The ranks of a world that other launchpads start, each on its node (`--nnodes`, `--node-rank`)."""

    before: int = 0  # on nodes with a smaller node rank
    after: int = 0


class Place(NamedTuple):
    """One of several nodes that are started from here, or one that is not this machine."""

    name: str  # as the user gave it
    nproc: int | str  # a number of ranks, or auto, cpu, gpu
    python: str  # the ranks' interpreter there
    cwd: str  # the ranks' working folder there
    interface: str = ""  # by which the nodes reach each other; "" for one node


class Master(NamedTuple):
    """Where several nodes meet: what all of them were seen to reach."""

    address: str
    port: int


@dataclass(frozen=True)
class RankPlan:
    """One rank."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]  # its part of the contract


@dataclass(frozen=True)
class NodePlan:
    """One node and its ranks."""

    index: int
    name: str  # as the user gave it, or its own
    cwd: str
    defaults: Mapping[str, str]  # for every rank, where the node's environment leaves them unset
    ranks: tuple[RankPlan, ...]
    store: str = ""  # torch's store at MASTER_ADDR: "serve", "use", or "" where rank 0 is to serve it
    interface: str = ""  # by which the nodes reach each other; "" for one node


@dataclass(frozen=True)
class Plan:
    """The whole job: what `--dry-run` prints and what is run."""

    run_id: str
    nodes: tuple[NodePlan, ...]
    environ: Mapping[str, str] = field(repr=False)  # the user's own variables; their values may be secret
    elsewhere: Elsewhere = Elsewhere()
    preload: tuple[str, ...] = ()  # imported once per node, before the ranks are forked; none: they are executed
    mpi: bool = False  # the ranks are an MPI_COMM_WORLD
    python: bool = False  # they are Python programs
    watched: bool = False  # they will be asked again and again where they are (--stall-timeout)

    @property
    def world_size(self) -> int:
        """How many ranks the world has, here and elsewhere."""
        return self.elsewhere.before + len(self.ranks) + self.elsewhere.after

    @property
    def ranks(self) -> list[RankPlan]:
        """All ranks, in order."""
        return [rank for node in self.nodes for rank in node.ranks]

    def start(
        self, node: NodePlan, attempt: int, window: int, terminal: Sequence[int], *, sends_input: bool = False
    ) -> Start:
        """The command that starts the node's ranks, for the first time (attempt 0) or again.

        `sends_input`: rank 0 gets the head's standard input in frames.
        """
        count = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return Start(
            cwd=node.cwd,
            environ=dict(self.environ),
            defaults=dict(node.defaults),
            ranks=[
                {"rank": r.rank, "argv": list(r.argv), "environ": {**r.environ, **count}, "python": self.python}
                for r in node.ranks
            ],
            preload=list(self.preload),
            window=window,
            store=node.store,
            stdin_rank=0,
            sends_input=sends_input and node.ranks[0].rank == 0,
            terminal=list(terminal),
            watched=self.watched,
        )

    def as_json(self) -> dict[str, Any]:
        """The plan for machines: as it is run, the values of the user's own variables masked."""
        return {
            "run_id": self.run_id,
            "world_size": self.world_size,
            "preload": list(self.preload),
            "forwarded": sorted(self.environ),
            "nodes": [
                {
                    "node": node.index,
                    "name": node.name,
                    "cwd": node.cwd,
                    "store": node.store,
                    "environ_where_unset": dict(node.defaults),
                    "ranks": [
                        {
                            "rank": rank.rank,
                            "local_rank": rank.local_rank,
                            "argv": list(rank.argv),
                            "environ": dict(rank.environ),
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
    elsewhere: Elsewhere = Elsewhere(),
    places: Sequence[Place] = (),
    master: Master | None = None,
) -> Plan:
    """Lay the ranks out over the nodes. Raises UsageError where a node can't hold them.

    `places` says for each node what is its own, where it was named by the user; `master` is given for several nodes.
    """
    for name in sorted(CONTRACT & spec.environ.keys()):
        raise UsageError(f"--env {name}: {name} is launchpad's to set, from the ranks' places; leave it out")
    places = places or [Place(node.hostname, spec.nproc, spec.python, spec.cwd) for node in nodes]
    counts = [rank_count(place.nproc, node, place.name) for place, node in zip(places, nodes, strict=True)]
    if nodes[0].port < 0:
        raise UsageError(
            f"--master-port {spec.world.master_port}: another program listens there on {places[0].name}; end it, "
            "give another port, or leave the option out to get a free one"
        )
    world = elsewhere.before + sum(counts) + elsewhere.after
    address, port = master or (spec.world.master_addr, spec.world.master_port or nodes[0].port)
    job = {
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": str(max(spec.world.nnodes, len(nodes))),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # True would make every rank a client, at whatever address. A forked rank asks launchpad for the store of this
        # one address (nursery/store.py); everywhere else rank 0 hosts it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **({"LAUNCHPAD_BACKEND": spec.backend} if spec.backend else {}),
    }
    held = master is not None or (spec.world.nnodes == 1 and address in LOOPBACK and port == nodes[0].port)
    planned = []
    first = elsewhere.before
    for index, (node, place, count) in enumerate(zip(nodes, places, counts, strict=True)):
        wanted = FILES_PER_RANK + bool(spec.preload) + (FILES_FOR_MPI if spec.backend == "mpi" else 0)
        _check_limits(node, place.name, count, wanted)
        group = {**job, "GROUP_RANK": str(spec.world.node_rank + index), "LOCAL_WORLD_SIZE": str(count)}
        ranks = tuple(_rank_plan(spec, first + local, local, node, place.python, group) for local in range(count))
        if spec.backend == "mpi":
            from launchpad.job import mpi

            host = place.name if place.interface else ""
            seats = [mpi.Seat(rank.rank, world, rank.local_rank, count, host) for rank in ranks]
            ranks = tuple(
                replace(rank, environ={**rank.environ, **mpi.environ(seat)})
                for rank, seat in zip(ranks, seats, strict=True)
            )
        defaults = {
            "OMP_NUM_THREADS": str(max(1, node.cores // count)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **_interfaces(place.interface),
        }
        unset = {name: value for name, value in defaults.items() if name not in spec.environ}
        store = ("use" if index else "serve") if held and spec.preload else ""
        planned.append(
            NodePlan(spec.world.node_rank + index, place.name, place.cwd, unset, ranks, store, place.interface)
        )
        first += count
    is_mpi, is_python, watched = spec.backend == "mpi", spec.target.kind != "program", spec.stall_timeout is not None
    return Plan(run_id, tuple(planned), dict(spec.environ), elsewhere, spec.preload, is_mpi, is_python, watched)


def _interfaces(name: str) -> dict[str, str]:
    """Have gloo, NCCL and tensorpipe use the interface by which the nodes were seen to reach each other."""
    if not name:
        return {}
    # NCCL takes a name for the beginning of one (eth1 for eth10 too) unless "=" stands before it.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "TP_SOCKET_IFNAME": name}


def _rank_plan(
    spec: JobSpec, rank: int, local_rank: int, node: AgentReady, python: str, group: Mapping[str, str]
) -> RankPlan:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if spec.virtual_local_rank else str(local_rank),
        "ROLE_RANK": str(rank),
    }
    if spec.virtual_local_rank:
        own["CUDA_VISIBLE_DEVICES"] = _own_gpu(spec, node, local_rank)
    return RankPlan(rank, local_rank, spec.target.argv(python, local_rank), {**group, **own})


def _own_gpu(spec: JobSpec, node: AgentReady, local_rank: int) -> str:
    """The one GPU that a rank sees under --virtual-local-rank: the one at its place in the node's list."""
    listed = spec.environ.get("CUDA_VISIBLE_DEVICES", node.visible_devices)
    if listed is None:
        return str(local_rank)
    devices = [device.strip() for device in listed.split(",")]
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU in CUDA_VISIBLE_DEVICES={listed}; start fewer "
            "ranks, or list more devices"
        )
    return devices[local_rank]


def rank_count(asked: int | str, node: AgentReady, name: str) -> int:
    """How many ranks the node gets: `auto` is a rank per GPU where there are GPUs, else one per usable core."""
    match asked:
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
    return int(asked)


def _check_limits(node: AgentReady, name: str, count: int, per_rank: int) -> None:
    files = count * per_rank + FILES_OF_AGENT
    if files > node.open_files:
        most = max(0, (node.open_files - FILES_OF_AGENT) // per_rank)
        raise UsageError(
            f"--nproc {count} needs {files} open files, and the limit on {name} is {node.open_files}: "
            f"raise it (ulimit -Hn) or start at most {most}"
        )
    if count >= node.processes:
        raise UsageError(
            f"--nproc {count} can't be had where {name} allows {node.processes} processes in all: "
            "start fewer, or raise the limit (ulimit -u, the cgroup's pids.max, kernel.pid_max)"
        )
