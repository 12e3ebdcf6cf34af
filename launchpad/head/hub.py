"""What a part knows of its job, and what it may do: all that it has of the supervisor."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from launchpad.head.clock import Clock
from launchpad.head.machine import Machine, Phase
from launchpad.head.nodes import Node, Nodes
from launchpad.head.part import Take
from launchpad.job.plan import Plan
from launchpad.protocol.commands import Command, Start
from launchpad.protocol.message import Message

if TYPE_CHECKING:
    from launchpad.head.worlds import Worlds


# What another head needs to go on.
_STATE = ("_machine", "_held", "_ranks_of", "node_of", "plan", "lost", "dismissed", "gone")


class StandsStill(Message):
    """The head is about to be suspended (Ctrl-Z)."""


class GoesOn(Message):
    """The head has been continued."""


class Hub:
    """Used by the loop alone, but for `post`."""

    def __init__(
        self,
        nodes: Nodes,
        machine: "Machine | Worlds",
        clock: Clock,
        plan: Plan,
        *,
        post: Callable[[Any], None],
        tell: Callable[[Any], None],
        happened: Take,
        lose: Callable[[int, str], None],
        again: Callable[[Collection[int], int, int], None],
    ) -> None:
        """`post` puts a message into the loop's inbox, from any thread. `tell` shows an event to the sinks.

        `happened` gives it to the state machine too. `lose` counts a node as lost, for this reason. `again` starts the
        ranks of these nodes again: for which time, and after how many restarts.
        """
        self.nodes = nodes
        self.clock = clock
        self.post = post
        self.tell = tell
        self.happened = happened
        self.lose = lose
        self.again = again
        self.lost: set[int] = set()  # nodes whose messages don't count any more
        self.dismissed: set[int] = set()  # ranks that were stopped because they are needed no more
        self.gone: set[int] = set()  # ranks that have exited in this attempt
        self._held: dict[int, Start | None] = {}  # by node whose ranks must not start yet: what would start them
        self._machine = machine
        self.place(plan)

    def state(self) -> dict[str, Any]:
        """What another head needs to go on from here."""
        return {name: vars(self)[name] for name in _STATE}

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on where another head was."""
        assert isinstance(self._machine, Machine)  # jobs with roles have no checkpoints
        self._machine.go_on(state["_machine"])
        vars(self).update({name: value for name, value in state.items() if name != "_machine"})

    def place(self, plan: Plan) -> None:
        """The ranks of the next attempt run where this plan says."""
        self.plan = plan
        self._ranks_of = {node.index: [rank.rank for rank in node.ranks] for node in plan.nodes}
        self.node_of = {rank: node for node, ranks in self._ranks_of.items() for rank in ranks}
        self._roles = {self.node_of[rank]: name for name, ranks in plan.roles for rank in ranks}  # by node

    def hold(self, nodes: Iterable[int]) -> None:
        """The ranks of these nodes don't start before `release`."""
        self._held = dict.fromkeys(nodes)

    def begin(self, node: int, start: Start) -> None:
        """Start the ranks of a node, unless it is held."""
        if node in self._held:
            self._held[node] = start
        else:
            self.nodes.send(node, start)

    def release(self, node: int) -> None:
        """Its ranks may start."""
        start = self._held.pop(node, None)
        if start is not None:
            self.nodes.send(node, start)

    def drop_held(self) -> list[int]:
        """The nodes whose ranks have not started, and are not started any more."""
        held, self._held = list(self._held), {}
        return held

    def ranks_of(self, node: int) -> Sequence[int]:
        """The ranks that run on a node."""
        return self._ranks_of.get(node, ())

    def role_of(self, rank: int) -> str:
        """The role or replica that a rank, or whoever has spawned it, belongs to; "" if there is none."""
        return self._roles.get(self.node_of.get(rank, -1), "")

    def join(self, node: int, ranks: Sequence[int]) -> None:
        """Ranks of this node have spawned these."""
        self.node_of.update(dict.fromkeys(ranks, node))
        self._ranks_of[node] += ranks
        self._machine.join(ranks, node)

    def adopt(self, number: int, node: Node) -> None:
        """A node can take part from now on."""
        self.lost.discard(number)
        self.nodes.adopt(number, node)

    def send(self, rank: int, command: Command) -> None:
        """Send a command to a rank's node."""
        if rank in self.node_of:
            self.nodes.send(self.node_of[rank], command)

    @property
    def running(self) -> Collection[int]:
        """The ranks that have not exited."""
        return self._machine.running

    @property
    def phase(self) -> Phase:
        """The job's."""
        return self._machine.phase

    @property
    def stops_at(self) -> float | None:
        """When the ranks will be asked to stop, or killed if they have been; see Machine.stops_at."""
        return self._machine.stops_at

    @property
    def attempt(self) -> int:
        """The job's; 0 is the first."""
        return self._machine.attempt

    @property
    def restarts(self) -> int:
        """How many of the restarts that the user allows have been used."""
        return self._machine.restarts

    @property
    def ends(self) -> bool:
        """Whether there is a reason to end this attempt."""
        return self._machine.cause is not None
