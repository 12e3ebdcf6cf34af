"""Plans each attempt: keeps what is known of the job's nodes and where they meet. Brings up those that come later."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.errors import NodeError, UsageError
from launchpad.head.bringup import BringUp
from launchpad.head.machine import Judgement, Machine
from launchpad.head.nodes import Node
from launchpad.head.requester import Requester
from launchpad.job.membership import Membership, Seat, seated
from launchpad.job.plan import Master, Member, NodePlacement, Plan, Stdin, leased_gpus, make_plan, rank_count
from launchpad.job.spec import JobSpec
from launchpad.named import NamedTuple
from launchpad.protocol.commands import CheckHealth, HoldPorts, Probe, ReadTopology
from launchpad.protocol.events import AgentReady, NodeFacts, PortsHeld, SpareReady, TopologyRead
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.head.environment_source import EnvironmentSource
    from launchpad.head.folder_listing import SyncedFile
    from launchpad.head.health import Unwell
    from launchpad.head.worlds import Worlds
    from launchpad.job.succession import Roster

# An import on a node may have to be loaded over a network.
SPARE_SECONDS = 600.0

# For one that looks into some thousand small files.
TOPOLOGY_SECONDS = 30.0

# A node may be busy with an import.
PORTS_SECONDS = 30.0


def read_topologies(
    requester: Requester, specs: Sequence[JobSpec], ready: Sequence[AgentReady]
) -> list[TopologyRead | None]:
    """The topologies of the nodes whose ranks are to be bound. `specs`: of each node's ranks. Raises NodeError."""
    asked = {
        node: ReadTopology({**spec.environ, **leased_gpus(spec, ready[node])})
        for node, spec in enumerate(specs)
        if spec.bind != "none"
    }
    found = dict(zip(asked, requester.ask(asked, TopologyRead, TOPOLOGY_SECONDS), strict=True))
    return [found.get(node) for node in range(len(specs))]


class Supplies(NamedTuple):
    """What nodes on other machines are given before their ranks start."""

    files: "Sequence[SyncedFile] | None" = None  # those of the working folder, with --sync
    environment: "EnvironmentSource | None" = None  # the one that the ranks run in, with --sync-env


class Unhealthy(NodeError):
    """A node that comes while the job runs has failed its health check."""


class Newcomer(NamedTuple):
    """A node that can take part."""

    node: Node
    ready: AgentReady
    facts: NodeFacts | None  # None without hosts
    place: NodePlacement
    topology: TopologyRead | None  # where its ranks are bound
    slots: int  # how many ranks it takes
    ports: Sequence[Sequence[int]]  # see hold_ports
    requester: Requester  # what it has said since is in there


class NodeRecord(NamedTuple):
    """What is known of a node, for the plans that it is part of."""

    ready: AgentReady
    place: NodePlacement | None  # None without hosts
    facts: NodeFacts | None  # likewise
    topology: TopologyRead | None  # where its ranks are bound
    ports: Sequence[int]  # see hold_ports


class Rendezvous(NamedTuple):
    """Where some nodes meet."""

    master: Master
    interfaces: dict[int, str]  # through which each node reaches it
    addresses: dict[int, str]  # each node's own there


class Planner:
    """Plans for nodes by their numbers. `prepare` and `find_rendezvous` are for threads; all else is the loop's."""

    def __init__(
        self,
        spec: JobSpec,
        run_id: str,
        ready: Sequence[AgentReady],
        places: Sequence[NodePlacement] = (),
        facts: Sequence[NodeFacts | None] = (),
        master: Master | None = None,
        *,
        ports: Sequence[Sequence[int]] = (),
        membership: Membership | None = None,
        supplies: Supplies | None = None,
        silence: float = 0.0,
        topologies: Sequence[TopologyRead | None] = (),
        job: str = "",
        left_out: "Mapping[int, Unwell] | None" = None,
    ) -> None:
        """`places`, `facts`: of each node if the user named them; `master`: of several nodes; `ports`: see hold_ports.

        `supplies`: for nodes that come later; `silence`: the heartbeat timeout in seconds; `topologies`: as
        `read_topologies` returns them; `job`: its id; `left_out`: nodes that are not healthy, of which neither facts
        nor topologies are known. Raises UsageError if a node can't hold its ranks.
        """
        self.membership = membership
        self.spec = spec
        self._run_id = run_id
        self.job = job
        columns = [part or [None] * len(ready) for part in (places, facts, topologies)]
        own_ports = ports or [()] * len(ready)
        self._nodes = [NodeRecord(*row) for row in zip(ready, *columns, own_ports, strict=True)]
        self._master = master
        self._supplies = supplies or Supplies()
        self._silence = silence
        self._left_out = dict(left_out or {})  # from the first attempt
        self._out = set(self._left_out)  # the nodes that have not been healthy yet
        self._reach = set(range(len(ready))) - self._out  # the nodes that reach the master's address
        self._first = min(self._reach)  # the node that it belongs to
        self._changed = False  # the last plan knows less than we do
        self._names = NodeNames(place.name for place in places)
        self.before: Roster | None = None  # the last one of the head before us, whose nodes have come to us
        self.amend: Callable[[Plan], Plan] | None = None  # what whoever runs the job adds to a later plan
        self.supply: Callable[[BringUp], None] | None = None  # gives a node on another machine what its ranks will need
        self.plan = self._lay_out(self._first_seats())
        self._check_rank("--input-rank", spec.input_rank)
        if spec.debug:
            self._check_rank("--debug", spec.debug[0])
        if spec.faults is not None:
            from launchpad.job.faults import check_targets

            check_targets(spec.faults, self.plan.world_size, [node.name for node in self.plan.nodes])

    def __getstate__(self) -> dict[str, Any]:
        """For another head: what nodes that come later are given stays here."""
        return {**vars(self), "_supplies": Supplies(), "amend": None, "supply": None}

    def ruled(self, machine: Machine, judge: Callable[..., Judgement], now: float) -> "Machine | Worlds":  # noqa: ARG002
        """The state machine of the job: this one, unless there are several worlds."""
        return machine

    def _check_rank(self, option: str, rank: int) -> None:
        size = self.plan.world_size
        if rank >= size:
            there = "its only rank is 0" if size == 1 else f"its ranks are 0 to {size - 1}"
            raise UsageError(f"{option} {rank}: the job has no such rank; {there}")

    def _lay_out(self, seats: Sequence[Seat] | None) -> Plan:
        ready = [node.ready for node in self._nodes]
        places = [
            node.place._replace(nproc=1) if number in self._out else node.place
            for number, node in enumerate(self._nodes)
            if node.place is not None
        ]
        topologies = [node.topology for node in self._nodes]
        ports = [node.ports for node in self._nodes]
        return make_plan(self.spec, ready, self._run_id, places, self._master, seats, topologies, ports)

    def _first_seats(self) -> tuple[Seat, ...] | None:
        if self.membership is None:
            return None
        counts = {
            number: rank_count(node.place.nproc, node.ready, node.place.name)
            for number, node in enumerate(self._nodes)
            if node.place is not None and number not in self._out
        }
        seats = seated(self.membership, (), counts)
        largest = max(seats, key=lambda seat: seat.ranks)
        for node in counts.keys() - {seat.node for seat in seats}:
            if not self.membership.elastic and counts[node] < largest.ranks:
                spare, host = self._name(node), self._name(largest.node)
                raise UsageError(
                    f"{spare} is a spare for {counts[node]} ranks, and {host} has {largest.ranks}: a spare must have "
                    "room for the ranks of any host"
                )
        return seats

    def number_of(self, name: str, lost: Iterable[int]) -> int:
        """The number of a machine that has joined: that of a lost node of this name, or else a new one."""
        same = [node for node in sorted(lost) if name in (self._name(node), _base(self._name(node)))]
        return same[0] if same else len(self._nodes)

    def _name(self, node: int) -> str:
        place = self._nodes[node].place
        return place.name if place is not None else ""

    @property
    def brings_environment(self) -> bool:
        """Whether nodes on other machines get this machine's environment (--sync-env)."""
        return self._supplies.environment is not None

    # Health (--health).

    def take_left_out(self) -> "dict[int, Unwell]":
        """The nodes that the first attempt leaves out, and why; once."""
        left_out, self._left_out = self._left_out, {}
        return left_out

    def check_request(self, node: int) -> CheckHealth:
        """What has this node check itself."""
        return self._request_to(self._nodes[node].place)

    def _request_to(self, place: NodePlacement | None) -> CheckHealth:
        from launchpad.head.health import check_request

        assert self.spec.health is not None
        spec = place.own if place is not None and place.own is not None else self.spec
        return check_request(self.spec.health, self.spec.cwd if place is None else place.cwd, spec.environ)

    def _examine(self, requester: Requester, place: NodePlacement) -> None:
        """Raise NodeError if a newcomer is not healthy."""
        from launchpad.head.health import examine

        unwell, _ = examine(requester, {0: self._request_to(place)})
        if unwell:
            raise Unhealthy(requester.of(0, unwell[0].short))

    # From one attempt to the next.

    def must_meet(self, seats: Sequence[Seat]) -> bool:
        """Whether these nodes need another rendezvous address than the last one."""
        nodes = [seat.node for seat in seats]
        return self._master is not None and (nodes[0] != self._first or not self._reach.issuperset(nodes))

    def find_rendezvous(self, requester: Requester, seats: Sequence[Seat]) -> Rendezvous:
        """Find an address at which these nodes can meet. Blocks; for a thread. Raises what find_master raises."""
        from launchpad.head.node_facts import address_at, find_master  # few jobs need it

        nodes = [seat.node for seat in seats]
        facts = self._nodes[nodes[0]].facts
        assert facts is not None
        chosen, port = self.spec.world.master_addr, self.spec.world.master_port
        wanted = "" if nodes[0] or chosen == "127.0.0.1" else chosen
        master, interfaces = find_master(requester, nodes, facts.addresses, wanted, port, "")
        known = {node: self._nodes[node].facts for node in nodes}
        own = {node: address_at(interfaces[node], one, master) for node, one in known.items() if one is not None}
        return Rendezvous(master, interfaces, own)

    def set_rendezvous(self, seats: Sequence[Seat], rendezvous: Rendezvous) -> None:
        """These nodes meet there."""
        self._master = rendezvous.master
        for node, interface in rendezvous.interfaces.items():
            place = self._nodes[node].place
            assert place is not None  # nodes that meet were named
            place = place._replace(interface=interface, address=rendezvous.addresses[node])
            self._nodes[node] = self._nodes[node]._replace(place=place)
        self._first, self._reach, self._changed = seats[0].node, {seat.node for seat in seats}, True

    def seat(self, seats: Sequence[Seat]) -> Plan:
        """The plan for these nodes."""
        if tuple(seats) != self.plan.seats or self._changed:
            plan = self._lay_out(seats)
            self.plan = self.amend(plan) if self.amend is not None else plan
            self._changed = False
        return self.plan

    # Newcomers.

    def prepare(self, link: Link, member: Member | None = None, node: int | None = None) -> Newcomer:
        """Bring up a node that joins late as `member`, or is back as number `node`. Blocks; for a thread.

        Raises LaunchpadError if it can't take part.
        """
        requester = BringUp()
        place = self._place(member, node)
        counts, wanted = place.nproc in ("auto", "gpu"), [(place.nproc, place.python)]
        port = self.spec.world.master_port if self._master is None else 0
        (ready,) = requester.connect([link], count_gpus=counts, port=port, silence=self._silence, accelerators=wanted)
        first = self._nodes[0].place
        if first is not None and link.remote and place.own is None:
            place = self._supplied(requester, place, comes_back=node is not None)
        if self.spec.health is not None:
            self._examine(requester, place)
        if (place.own or self.spec).gpus:
            from launchpad.head.gpu_leases import with_leases

            (ready,) = with_leases(requester, [ready], [place.own or self.spec], self.job)
        facts = None
        if first is not None:
            from launchpad.head.node_facts import check_nodes, probe_nodes

            own = place.own or self.spec
            probe = Probe(place.cwd, self.spec.torch, place.python, dict(own.environ), list(own.target.needs))
            facts = probe_nodes(requester, {0: probe}, lambda _: None, apart=False)[0]
            known = next(node.facts for node in self._nodes if node.facts is not None)
            names = NodeNames([first.name])
            check_nodes([first.name, names.take(place.name)], [known, facts], torch=self.spec.torch)
            place = place._replace(python=facts.python)
        topologies = read_topologies(requester, [place.own or self.spec], [ready])
        places = [place] if first is not None else []
        plan = make_plan(self.spec, [ready], self._run_id, places, seats=(), topologies=topologies)
        ports = hold_ports(requester, [plan.nodes[0].slots]) if self.spec.tf_config else []
        if self.supply is not None and link.remote:
            self.supply(requester)
        requester.ask({0: plan.start(plan.nodes[0], 0, 0, 1, Stdin())}, SpareReady, SPARE_SECONDS)
        return Newcomer(requester.nodes[0], ready, facts, place, topologies[0], plan.nodes[0].slots, ports, requester)

    def _supplied(self, requester: BringUp, place: NodePlacement, *, comes_back: bool) -> NodePlacement:
        """Give the newcomer what the other nodes were given."""
        files, environment = self._supplies
        if files is not None and not comes_back:
            from launchpad.head.sync import sync

            place = place._replace(cwd=sync(requester, [0], self.spec.cwd, files, _ignore)[0])
        if environment is not None:
            from launchpad.head.environment_sync import sync_environment

            place = place._replace(python=sync_environment(requester, [0], environment, _ignore, _ignore)[0])
        return place

    def _place(self, member: Member | None, node: int | None) -> NodePlacement:
        if member is not None:
            cwd = (member.own or self.spec).cwd
            return NodePlacement(member.name, member.nproc, member.python, cwd, own=member.own, ends_at=member.ends_at)
        known = self._nodes[node].place if node is not None else None
        if known is not None:
            return known
        return NodePlacement("", self.spec.nproc, self.spec.python, self.spec.cwd)

    def add(self, number: int, newcomer: Newcomer) -> None:
        """Take the node into the plans to come, as this number. Its link gets the name that it has there."""
        self._out.discard(number)
        known = self._nodes[number].place if number < len(self._nodes) else None
        name = known.name if known is not None else self._names.take(newcomer.place.name)
        newcomer.node.link.name = name
        self._changed = True
        self._reach.discard(number)
        if number == self._first:
            self._first = -1
        named = newcomer.place._replace(name=name) if newcomer.facts is not None else None
        ports = newcomer.ports[0] if newcomer.ports else ()
        record = NodeRecord(newcomer.ready, named, newcomer.facts, newcomer.topology, ports)
        self._nodes[number : number + 1] = [record]


def hold_ports(requester: Requester, counts: Sequence[int]) -> list[list[int]]:
    """Have each node hold this many ports, for --tf-config one for each rank that it takes. Raises NodeError."""
    answers = requester.ask({node: HoldPorts(count) for node, count in enumerate(counts)}, PortsHeld, PORTS_SECONDS)
    for node, held in enumerate(answers):
        if held.problem:
            raise NodeError(requester.of(node, f"can't hold {counts[node]} ports for the ranks: {held.problem}"))
    return [held.ports for held in answers]


def _ignore(*_: object) -> None:
    """Used where nobody is shown the progress."""


class NodeNames:
    """Gives each node a name of its own."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._last = dict.fromkeys(taken, 1)  # by name: the last number added to it

    def take(self, name: str) -> str:
        """The name, with a number if another node has it."""
        number, made = self._last.get(name, 1), name
        while made in self._last:
            number += 1
            made = f"{name}.{number}"
        self._last[name] = number
        self._last.setdefault(made, 1)
        return made


def _base(name: str) -> str:
    """The name without such a number."""
    base, _, number = name.rpartition(".")
    return base if base and number.isdecimal() else name
