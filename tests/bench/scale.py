"""The head alone, leading many simulated nodes: python tests/bench/scale.py [--nodes N,…] [--join N,…] [--lose N,…]

--nodes: on the in-memory transport. Frames are encoded and decoded as on a real link, and go through the supervisor's
own loop with the console and the summary behind it. A node has one rank, which starts and prints, ending in the midst
of a line; then one rank fails, the others are sent TERM, obey and leave, but for the nodes that are lost meanwhile.

--join: over TLS. All nodes dial in at the same moment, prove the secret and make their offer, as `launchpad join` does;
then they are led through the same job, of which none is lost. They are played by PLAYERS other processes.

--lose: in memory again, with --max-restarts. When all ranks run, 1 % of the nodes are lost at once; the others' ranks
are stopped, the lost nodes get new links, and all ranks are started again.

CPU and memory are of the whole process, which for nodes in memory includes their part (one thread): what matters is how
the figures for a node grow with their number. Each number of nodes has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launchpad.console.console import Console, StandardStreams
from launchpad.console.summary import Summary
from launchpad.head.bringup import BringUp
from launchpad.head.cluster import Cluster
from launchpad.head.supervisor import Supervisor
from launchpad.job.membership import Membership
from launchpad.job.offer import NodeOffer
from launchpad.job.outcome import Cause
from launchpad.job.plan import Master, Member, NodePlacement
from launchpad.job.spec import JobSpec, Target
from launchpad.job.world import Meeting
from launchpad.protocol.commands import Finish, Hello, JobEnded, Ping, Signal, Start
from launchpad.protocol.events import (
    STDOUT,
    AgentLeft,
    AgentReady,
    Drained,
    NodeLost,
    Output,
    Pong,
    RankExited,
    RankStarted,
    Restarted,
    SpareReady,
)
from launchpad.runner.joining import Joining
from launchpad.runner.observers import planned
from launchpad.runner.relay import RETRY_SECONDS
from launchpad.transport import Link
from launchpad.transport.join.client import HeadConnection
from launchpad.transport.memory import DirectLink

FAILED = 1  # this rank fails
READY = AgentReady(0, 0.0, 1, "", 8, 0, None, 1 << 20, 1 << 20, 29500)
LOST = 10  # of so many nodes one is lost while the ranks are stopped
LOST_AT_ONCE = 100  # of so many nodes one is lost with --lose
PLAYERS = 4  # processes that play nodes which join
SECRET = b"of the bench"
SPEC = JobSpec(Target("program", "/bin/true"), nproc=1, grace=30.0)


class Heard:
    """Stands in for a link's own queue: what all nodes are asked comes to one thread."""

    def __init__(self, node: int, queue: queue.SimpleQueue[tuple[int, Any]]) -> None:
        self._node = node
        self._queue = queue

    def put(self, command: Any) -> None:
        """The head asks this of the node."""
        self._queue.put((self._node, command))


class Agents:
    """Plays all agents, in one thread."""

    def __init__(self, count: int) -> None:
        self._heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.links = [self.link(node) for node in range(count)]
        self.taking_part = count
        self._ranks: dict[int, int] = {}  # of each node that runs one
        self.thread = threading.Thread(target=self._play, name="agents", daemon=True)

    def link(self, node: int) -> DirectLink:
        """A new link to this node."""
        link = DirectLink(f"n{node}", remote=True)
        link.heard = Heard(node, self._heard)
        return link

    def _play(self) -> None:
        left = len(self.links)
        while left:
            node, command = self._heard.get()
            left -= not self._obey(node, self.links[node], command)

    def _obey(self, node: int, link: DirectLink, command: Any) -> bool:
        now = time.monotonic_ns()
        match command:
            case Hello():
                link.say(READY._replace(time=now, wall=time.time(), hostname=link.name))
            case Ping(at):
                link.say(Pong(now, at))
            case Start(ranks=[]):
                link.say(SpareReady(now))
            case Start():
                rank = self._ranks[node] = command.ranks[0]["rank"]
                link.say(RankStarted(now, rank, 1000 + node))
                link.say(Output(now, rank, STDOUT, b"a line of rank %d\n" % rank))
                link.say(Output(now, rank, STDOUT, b"an unfinished line"))
                if len(self._ranks) == self.taking_part:
                    self._all_started()
            case Signal():
                if self._hangs_up(node):
                    link.hang_up()
                    return False
                if node != FAILED and node in self._ranks:
                    link.say(RankExited(now, self._ranks.pop(node), -15, 1 << 20, False))
            case Finish(leave) if leave:
                link.hang_up()
                return False
            case Finish():
                link.say(Drained(now))
        return True

    def _hangs_up(self, node: int) -> bool:
        return node % LOST == LOST - 1

    def _all_started(self) -> None:
        self.links[FAILED].say(RankExited(time.monotonic_ns(), FAILED, 7, 1 << 20, False))


class Losing(Agents):
    """Loses nodes when all ranks run, and has all ranks exit when they run again, with spares."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.taking_part = count - count // LOST_AT_ONCE
        self.lost = range(1, self.taking_part, self.taking_part // (count // LOST_AT_ONCE) + 1)
        self.attempts = 0
        self.started_at = 0.0  # when the last node got its Start of the last attempt

    def _hangs_up(self, node: int) -> bool:  # noqa: ARG002
        return False

    def _play(self) -> None:
        left = len(self.links) - len(self.lost)
        while left:
            node, command = self._heard.get()
            left -= not self._obey(node, self.links[node], command)

    def _all_started(self) -> None:
        self.started_at = time.monotonic()
        self.attempts += 1
        for node, rank in list(self._ranks.items()):
            if self.attempts > 1:
                self.links[node].say(RankExited(time.monotonic_ns(), rank, 0, 1 << 20, False))
            elif node in self.lost:
                del self._ranks[node]
                self.links[node].hang_up()


class Own(Agents):
    """Plays the node that the head of nodes that join is on."""

    def __init__(self) -> None:
        super().__init__(1)

    def _all_started(self) -> None:
        """Nothing: one of the others fails."""


class Clock:
    """A sink that notes when the first node was lost and when the ranks were started again."""

    deadline = None

    def __init__(self) -> None:
        self.lost_at = self.restarted_at = 0.0

    def on(self, event: object) -> bool:
        """Note the time."""
        if isinstance(event, NodeLost):
            self.lost_at = self.lost_at or time.monotonic()
        elif isinstance(event, Restarted):
            self.restarted_at = time.monotonic()
        return False

    def tick(self, now: float) -> None:
        """Nothing is ever due."""

    def close(self) -> None:
        """Nothing is held open."""


def lead(links: Sequence[Link], say: Callable[[str], None]) -> tuple[int, Cause | None]:
    """Run a job on these nodes; `say` gets a line for each phase. Returns the exit code and the cause."""
    marks = [(time.monotonic(), time.process_time())]

    def mark(what: str) -> None:
        marks.append((time.monotonic(), time.process_time()))
        (wall, cpu), (before, cpu_before) = marks[-1], marks[-2]
        say(f"{what}: {wall - before:.3f} s, CPU {cpu - cpu_before:.3f} s")

    head = BringUp()
    cluster = _greet(head, links, mark)
    console = Console(SPEC, cluster.plan, StandardStreams(len(cluster.plan.ranks), {}, head.post))
    summary = Summary(lambda _: None, False)
    summary.on(planned("scale", SPEC, cluster.plan, ""))
    code, cause = Supervisor(head).run(cluster, [console, summary])
    mark("run")
    if cause is not None:
        summary.report(summary.verdict())
    console.close()
    mark("report")
    return code, cause


def _member(offer: NodeOffer) -> Member:
    return Member(offer.name, 1, "")


def _greet(
    head: BringUp, links: Sequence[Link], mark: Callable[[str], None], membership: Membership | None = None
) -> Cluster:
    ready = head.connect(links, count_gpus=False, silence=60.0)
    head.measure_clocks()
    mark("greet")
    places = [NodePlacement(link.name, 1, sys.executable, "/", "eth0") for link in links]
    cluster = Cluster(SPEC, "scale", ready, places, master=Master("192.0.2.1", 29500), membership=membership)
    mark("plan")
    return cluster


def measure(count: int) -> str:
    """Lead so many nodes in memory; returns a table's row."""
    base, cpu, start = _memory(), time.process_time(), time.monotonic()
    agents = Agents(count)
    agents.thread.start()
    code, cause = lead(agents.links, _say)
    agents.thread.join()
    assert (code, cause and cause.rank) == (7, FAILED), (code, cause)
    return _row(count, [time.monotonic() - start], time.process_time() - cpu, base)


def measure_joins(count: int) -> str:
    """Lead so many nodes that dial in; returns a table's row."""
    shares = [len(range(player, count, PLAYERS)) for player in range(PLAYERS)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, __file__, "--play", str(port)]
    players = [
        subprocess.Popen([*argv, str(share)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for share in shares
        if share
    ]
    for player in players:
        assert player.stdout is not None
        assert player.stdout.readline() == b"ready\n"
    base, cpu, start = _memory(), time.process_time(), time.monotonic()
    joining = Joining(Meeting("127.0.0.1", port, count + 1), SPEC, SECRET, _say, _member)
    for player in players:
        assert player.stdin is not None
        player.stdin.write(b"go\n")
        player.stdin.flush()
    nodes = joining.wait()
    joined = time.monotonic() - start
    _say(f"join: {joined:.3f} s, CPU {time.process_time() - cpu:.3f} s")
    own = Own()
    own.thread.start()
    code, cause = lead([*own.links, *(link for link, _ in nodes)], _say)
    row = _row(count, [joined, time.monotonic() - start], time.process_time() - cpu, base)
    joining.tell(["over"], code)
    joining.leave()
    assert code != 0
    assert cause is not None
    for player in players:
        with player:
            assert player.wait(60) == 0
    return row


def play(port: int, count: int) -> None:
    """Play so many nodes that join."""
    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=_play_node, args=(port, place)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _play_node(port: int, place: int) -> None:
    offer = NodeOffer(f"n{os.getpid()}-{place}", sys.executable).as_json()
    while True:
        try:
            head = HeadConnection(("127.0.0.1", port), SECRET, offer)
            break
        except OSError:
            time.sleep(RETRY_SECONDS)
    ended = threading.Event()
    rank = 0

    def obey(command: Any) -> None:
        nonlocal rank
        now = time.monotonic_ns()
        match command:
            case None | JobEnded():
                ended.set()
            case Hello():
                head.send(READY._replace(time=now, wall=time.time(), hostname=offer["name"]))
            case Ping(at):
                head.send(Pong(now, at))
            case Start():
                rank = command.ranks[0]["rank"]
                head.send(RankStarted(now, rank, 1000 + rank))
                head.send(Output(now, rank, STDOUT, b"a line of rank %d\n" % rank))
                if rank == FAILED:
                    head.send(RankExited(now, rank, 7, 1 << 20, False))
            case Signal() if rank != FAILED:
                head.send(RankExited(now, rank, -15, 1 << 20, False))
            case Finish():
                head.send(AgentLeft(now))

    head.begin(obey)
    ended.wait()
    head.close()


def measure_losses(count: int) -> str:
    """Lead so many nodes in memory, and lose some; returns a table's row."""
    base, cpu, start = _memory(), time.process_time(), time.monotonic()
    agents = Losing(count)
    agents.thread.start()
    head = BringUp()
    membership = Membership(agents.taking_part, agents.taking_part, changes=True)
    cluster = _greet(head, agents.links, lambda _: None, membership)
    clock = Clock()
    code, cause = Supervisor(head).run(cluster, [clock], reopen=lambda _: None)
    agents.thread.join()
    assert (code, cause, agents.attempts) == (0, None, 2), (code, cause, agents.attempts)
    until = [clock.restarted_at - clock.lost_at, agents.started_at - clock.lost_at]
    _say(f"all: {time.monotonic() - start:.3f} s")
    return _row(count, until, time.process_time() - cpu, base)


def _row(count: int, seconds: Sequence[float], cpu: float, base: int) -> str:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
    times = " | ".join(f"{one:.2f} s" for one in seconds)
    return f"| {count} | {times} | {cpu / count * 1e3:.2f} ms | {grown / count / 1e3:.0f} KB |\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


PARTS = {
    "nodes": (measure, "10,100,1000,10000", ["start, run, fail, stop"]),
    "join": (measure_joins, "100,500,2000", ["all have joined", "and run, fail, stop"]),
    "lose": (measure_losses, "100,1000,10000", ["1 % lost: decided to restart", "all have their Start"]),
}


def main() -> None:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, (_, counts, _) in PARTS.items():
        parser.add_argument(f"--{part}", help=f"how many, separated by commas; {counts} if no part is given")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--play", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.write(3, PARTS[options.one[0]][0](int(options.one[1])).encode())
        return
    if options.play:
        play(*options.play)
        return
    wanted = {part: getattr(options, part) for part in PARTS}
    for part, (_, counts, columns) in PARTS.items():
        if wanted[part] is None and any(wanted.values()):
            continue
        print(f"| nodes | {' | '.join(columns)} | CPU, for each node | peak memory, for each node |")
        print("|---" * (len(columns) + 3) + "|")
        for count in (wanted[part] or counts).split(","):
            # The ranks' lines are for nobody; the figures come by a descriptor of their own.
            reader, writer = os.pipe()
            argv = ["sh", "-c", f'exec "$@" 3>&{writer} >/dev/null', "sh", sys.executable, __file__]
            subprocess.run([*argv, "--one", part, count], pass_fds=[writer], check=True)
            os.close(writer)
            with open(reader) as file:
                print(file.read(), end="", flush=True)


if __name__ == "__main__":
    main()
