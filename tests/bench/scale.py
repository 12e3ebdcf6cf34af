"""The head alone, leading many simulated nodes: python tests/bench/scale.py [--nodes N,…] [--join N,…] [--lose N,…]

--nodes: another process plays the nodes; frames go to and from all of them over one connection. They go through the
supervisor's own loop with the console and the summary behind it. A node has one rank, which starts and prints, ending
in the midst of a line; then one rank fails, the others are sent TERM, obey and leave, but for the nodes that are lost
meanwhile.

--join: over TLS. All nodes dial in at the same moment, prove the secret and make their offer, as `launchpad join` does;
then they are led through the same job, of which none is lost. They are played by PLAYERS other processes.

--lose: over one connection again. When all ranks run, 1 % of the nodes are lost at once; the others' ranks are
stopped, spare nodes take the places of the lost ones, and all ranks are started again. Times count from when the head
sees the first loss: until it has decided to restart, and until the process that plays the nodes has decoded the last
Start. The head's CPU time is what it has used between the first loss and the first rank that has started again. Only a
clock listens: no console, no record.

CPU and memory are the head's alone. Each number of nodes has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import queue
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launchpad.cli.entry import collect_rarely
from launchpad.console.console import Console, StandardStreams
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.head.bringup import BringUp
from launchpad.head.planner import Planner
from launchpad.head.supervisor import Supervisor
from launchpad.job.limits import Limits
from launchpad.job.membership import Membership
from launchpad.job.offer import NodeOffer
from launchpad.job.outcome import Cause
from launchpad.job.plan import Master, Member, NodePlacement
from launchpad.job.spec import JobSpec, Target
from launchpad.job.world import Meeting
from launchpad.protocol import wire
from launchpad.protocol.commands import Command, Finish, Hello, JobEnded, Ping, Signal, Start
from launchpad.protocol.events import (
    STDOUT,
    AgentLeft,
    AgentReady,
    Drained,
    Event,
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

FAILED = 1  # this rank fails
READY = AgentReady(0, 0.0, 1, "", 8, 0, None, 1 << 20, 1 << 20, 29500)
LOST = 10  # of so many nodes one is lost while the ranks are stopped
LOST_AT_ONCE = 100  # of so many nodes one is lost with --lose
PLAYERS = 4  # processes that play nodes which join
TAG = struct.Struct("!II")  # before each frame, where nodes share a connection: the node, and the frame's length
READ_BYTES = 1 << 20
SECRET = b"of the bench"
SPEC = JobSpec(Target("program", "/bin/true"), nproc=1, limits=Limits(grace=30.0))


def batches(connection: socket.socket) -> Iterator[list[tuple[int, bytes]]]:
    """What comes over it, as it comes: nodes, and their frames; b"" for one that hangs up."""
    buffer = b""
    while data := connection.recv(READ_BYTES):
        buffer += data
        start, found = 0, []
        while len(buffer) - start >= TAG.size:
            node, size = TAG.unpack_from(buffer, start)
            end = start + TAG.size + size
            if end > len(buffer):
                break
            found.append((node, buffer[start + TAG.size : end]))
            start = end
        buffer = buffer[start:]
        yield found


class PlayedLink:
    """A Link to a node that another process plays."""

    remote = True

    def __init__(self, number: int, outbox: queue.SimpleQueue[bytes]) -> None:
        self.name = f"n{number}"
        self._number = number
        self._outbox = outbox
        self._decoder = wire.Decoder()

    def send(self, command: Command) -> None:
        """Queue a command."""
        frame = wire.encode(command)
        self._outbox.put(TAG.pack(self._number, len(frame)) + frame)

    def deliver(self, take: Callable[[Any], None]) -> None:
        """Pass each event to `take`; None at the end."""
        self._take = take

    def received(self, frame: bytes) -> None:
        """The node has sent this."""
        if not frame:
            self._take(None)
        for event in self._decoder.feed(frame):
            self._take(event)

    def messages(self) -> Iterator[Any]:
        """Unused: `deliver` is what links like this one have instead."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing: the node hangs up."""

    def abandon(self) -> None:
        """Nothing: the node has hung up."""


class Played:
    """Nodes that another process plays: a thread writes to all of them, and another one reads."""

    def __init__(self, part: str, count: int) -> None:
        self._connection, other = socket.socketpair()
        argv = [sys.executable, __file__, "--agents", part, str(count), str(other.fileno())]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=[other.fileno()])
        other.close()
        assert self._process.stdout is not None
        self._said = self._process.stdout
        self._said.readline()  # it is ready
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.links = [PlayedLink(node, self._outbox) for node in range(count)]
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    def _write(self) -> None:
        while True:
            waiting = [self._outbox.get()]
            while not self._outbox.empty():
                waiting.append(self._outbox.get())
            self._connection.sendall(b"".join(waiting))

    def _read(self) -> None:
        for batch in batches(self._connection):
            for node, frame in batch:
                self.links[node].received(frame)

    def end(self) -> list[float]:
        """Wait until all nodes have left. Returns when the last one had its Start, for each attempt."""
        with self._process:
            return [float(line) for line in self._said]


class Agents:
    """Plays all agents, in a process of its own."""

    def __init__(self, count: int, connection: socket.socket) -> None:
        self.taking_part = count
        self.ranks: dict[int, int] = {}  # of each node that runs one
        self._connection = connection
        self._decoders = {node: wire.Decoder() for node in range(count)}  # of those that have not hung up
        self._said: list[bytes] = []  # but not sent yet

    def play(self) -> None:
        """Obey until all have hung up."""
        print("ready", flush=True)
        for batch in batches(self._connection):
            for node, frame in batch:
                if node in self._decoders:
                    for command in self._decoders[node].feed(frame):
                        self._obey(node, command)
            self._connection.sendall(b"".join(self._said))
            self._said.clear()
            if not self._decoders:
                return

    def say(self, node: int, event: Event) -> None:
        """Send the head an event."""
        frame = wire.encode(event)
        self._said += (TAG.pack(node, len(frame)), frame)

    def hang_up(self, node: int) -> None:
        """The node is gone."""
        self._said.append(TAG.pack(node, 0))
        del self._decoders[node]

    def _obey(self, node: int, command: Any) -> None:
        now = time.monotonic_ns()
        match command:
            case Hello():
                self.say(node, READY._replace(time=now, wall=time.time(), hostname=f"n{node}"))
            case Ping(at):
                self.say(node, Pong(now, at))
            case Start(ranks=[]):
                self.say(node, SpareReady(now))
            case Start():
                rank = self.ranks[node] = command.ranks[0]["rank"]
                self.say(node, RankStarted(now, rank, 1000 + node))
                self.say(node, Output(now, rank, STDOUT, b"a line of rank %d\n" % rank))
                self.say(node, Output(now, rank, STDOUT, b"an unfinished line"))
                if len(self.ranks) == self.taking_part:
                    print(time.monotonic())
                    self.all_started()
            case Signal() if self.hangs_up(node):
                self.hang_up(node)
            case Signal() if node in self.ranks and node != FAILED:
                self.say(node, RankExited(now, self.ranks.pop(node), -15, 1 << 20, False))
            case Finish(leave) if leave:
                self.hang_up(node)
            case Finish():
                self.say(node, Drained(now))

    def hangs_up(self, node: int) -> bool:
        """Whether the node is lost when its rank is to stop."""
        return node % LOST == LOST - 1

    def all_started(self) -> None:
        """All ranks run."""
        self.say(FAILED, RankExited(time.monotonic_ns(), FAILED, 7, 1 << 20, False))


class Losing(Agents):
    """Loses nodes when all ranks run, and has all ranks exit when they run again, with spares."""

    def __init__(self, count: int, connection: socket.socket) -> None:
        super().__init__(count, connection)
        self.taking_part = taking_part(count)
        self._lost = range(1, self.taking_part, self.taking_part // (count // LOST_AT_ONCE) + 1)
        self._again = False

    def hangs_up(self, node: int) -> bool:  # noqa: ARG002
        """None is."""
        return False

    def all_started(self) -> None:
        """Lose nodes the first time, and end the second time."""
        if self._again:
            for node, rank in self.ranks.items():
                self.say(node, RankExited(time.monotonic_ns(), rank, 0, 1 << 20, False))
        else:
            self._again = True
            for node in self._lost:
                del self.ranks[node]
                self.hang_up(node)


class Own(Agents):
    """Plays the node that the head of nodes that join is on."""

    def all_started(self) -> None:
        """Nothing: one of the others fails."""


def taking_part(count: int) -> int:
    """How many of these nodes are no spares with --lose."""
    return count - count // LOST_AT_ONCE


class Clock:
    """A sink that notes when the first node was lost and when the ranks were started again."""

    deadline = None

    def __init__(self) -> None:
        self.lost_at = self.restarted_at = 0.0
        self.cpu = 0.0  # what the head has used from then to then

    def on(self, event: object) -> bool:
        """Note the time."""
        if isinstance(event, NodeLost) and not self.lost_at:
            self.lost_at, self.cpu = time.monotonic(), -time.process_time()
        elif isinstance(event, Restarted):
            self.restarted_at = time.monotonic()
        elif isinstance(event, RankStarted) and self.restarted_at and self.cpu < 0:
            self.cpu += time.process_time()
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
    planner = _greet(head, links, mark)
    console = Console(SPEC, planner.plan, StandardStreams(len(planner.plan.ranks), {}, head.post))
    diagnosis = Diagnosis()
    diagnosis.on(planned("scale", SPEC, planner.plan, ""))
    code, cause = Supervisor(head, planner, [console, diagnosis]).run()
    mark("run")
    if cause is not None:
        diagnosis.report(diagnosis.verdict())
    console.close()
    mark("report")
    return code, cause


def _member(offer: NodeOffer) -> Member:
    return Member(offer.name, 1, "")


def _greet(
    head: BringUp, links: Sequence[Link], mark: Callable[[str], None], membership: Membership | None = None
) -> Planner:
    ready = head.connect(links, count_gpus=False, silence=60.0)
    head.measure_clocks()
    mark("greet")
    places = [NodePlacement(link.name, 1, sys.executable, "/", "eth0") for link in links]
    planner = Planner(SPEC, "scale", ready, places, master=Master("192.0.2.1", 29500), membership=membership)
    mark("plan")
    return planner


def measure(count: int) -> str:
    """Lead so many nodes; returns a table's row."""
    base, played = _memory(), Played("nodes", count)
    cpu, start = time.process_time(), time.monotonic()
    code, cause = lead(played.links, _say)
    played.end()
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
    own = Played("own", 1)
    code, cause = lead([*own.links, *(link for link, _ in nodes)], _say)
    row = _row(count, [joined, time.monotonic() - start], time.process_time() - cpu, base)
    own.end()
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
    """Lead so many nodes, and lose some; returns a table's row."""
    base, played = _memory(), Played("lose", count)
    cpu, start = time.process_time(), time.monotonic()
    head = BringUp()
    most = taking_part(count)
    planner = _greet(head, played.links, lambda _: None, Membership(most, most, changes=True))
    clock = Clock()
    code, cause = Supervisor(head, planner, [clock], reopen=lambda _: None).run()
    _, started_at = played.end()
    assert (code, cause) == (0, None), (code, cause)
    until = [clock.restarted_at - clock.lost_at, started_at - clock.lost_at, clock.cpu]
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


AGENTS = {"nodes": Agents, "lose": Losing, "own": Own}

PARTS = {
    "nodes": (measure, "10,100,1000,10000", ["start, run, fail, stop"]),
    "join": (measure_joins, "100,500,2000", ["all have joined", "and run, fail, stop"]),
    "lose": (
        measure_losses,
        "100,1000,10000",
        ["1 % lost: decided to restart", "all have their Start", "head's CPU time for that"],
    ),
}


def main() -> None:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, (_, counts, _) in PARTS.items():
        parser.add_argument(f"--{part}", help=f"how many, separated by commas; {counts} if no part is given")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--play", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agents", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    collect_rarely()
    if options.one:
        os.write(3, PARTS[options.one[0]][0](int(options.one[1])).encode())
        return
    if options.play:
        play(*options.play)
        return
    if options.agents:
        part, count, connection = options.agents
        AGENTS[part](int(count), socket.socket(fileno=int(connection))).play()
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
