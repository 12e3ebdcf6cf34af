"""The head alone, leading simulated nodes on the in-memory transport: python tests/bench/scale.py [--nodes N,N,…]

Frames are encoded and decoded as on a real link, and go through the supervisor's own loop with the console and the
summary behind it. A node has one rank, which starts and prints, ending in the midst of a line; then one rank fails,
the others are sent TERM, obey and leave, but for the nodes that are lost meanwhile.

CPU and memory are of the whole process, the simulated nodes' part (one thread) included: what matters is how the
figures for a node grow with their number. Each number of nodes has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launchpad.console.console import Console
from launchpad.console.summary import Summary
from launchpad.head.bringup import BringUp
from launchpad.head.supervisor import Supervisor
from launchpad.job.outcome import Cause
from launchpad.job.plan import Master, NodePlacement, make_plan
from launchpad.job.spec import JobSpec, Target
from launchpad.protocol.commands import Finish, Hello, Ping, Signal, Start
from launchpad.protocol.events import STDOUT, AgentReady, Output, Pong, RankExited, RankStarted
from launchpad.runner.observers import planned
from launchpad.transport.memory import DirectLink

FAILED = 1  # this rank fails
READY = AgentReady(0, 0.0, 1, "", 8, 0, None, 1 << 20, 1 << 20, 29500)
LOST = 10  # of so many nodes one is lost while the ranks are stopped


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
        self.links = [DirectLink(f"n{node}", remote=True) for node in range(count)]
        for node, link in enumerate(self.links):
            link.heard = Heard(node, self._heard)
        self._started = 0
        self.thread = threading.Thread(target=self._play, name="agents", daemon=True)

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
            case Start():
                link.say(RankStarted(now, node, 1000 + node))
                link.say(Output(now, node, STDOUT, b"a line of rank %d\n" % node))
                link.say(Output(now, node, STDOUT, b"an unfinished line"))
                self._started += 1
                if self._started == len(self.links):
                    self.links[FAILED].say(RankExited(now, FAILED, 7, 1 << 20, False))
            case Signal():
                if node % LOST == LOST - 1:
                    link.hang_up()
                    return False
                if node != FAILED:
                    link.say(RankExited(now, node, -15, 1 << 20, False))
            case Finish():
                link.hang_up()
                return False
        return True


def lead(count: int, say: Callable[[str], None]) -> tuple[int, Cause | None]:
    """Run a job on so many nodes; `say` gets a line for each phase. Returns the exit code and the cause."""
    agents = Agents(count)
    agents.thread.start()
    marks = [(time.monotonic(), time.process_time())]

    def mark(what: str) -> None:
        marks.append((time.monotonic(), time.process_time()))
        (wall, cpu), (before, cpu_before) = marks[-1], marks[-2]
        say(f"{what}: {wall - before:.3f} s, CPU {cpu - cpu_before:.3f} s")

    head = BringUp()
    spec = JobSpec(Target("program", "/bin/true"), nproc=1)
    ready = head.connect(agents.links, count_gpus=False, silence=60.0)
    head.measure_clocks()
    mark("greet")
    places = [NodePlacement(link.name, 1, sys.executable, "/", "eth0") for link in agents.links]
    plan = make_plan(spec, ready, "scale", places=places, master=Master("192.0.2.1", 29500))
    mark("plan")
    console = Console(spec, plan, {}, head.post)
    summary = Summary(lambda _: None, False)
    summary.on(planned("scale", spec, plan, ""))
    code, cause = Supervisor(head).run(plan, [console, summary], grace=30.0, timeout=None)
    mark("run")
    if cause is not None:
        summary.report(summary.verdict())
    console.close()
    mark("report")
    agents.thread.join()
    return code, cause


def measure(count: int) -> None:
    """Lead so many nodes in this process; print a line with what it took."""
    base = _memory()
    cpu, start = time.process_time(), time.monotonic()
    code, cause = lead(count, lambda text: print(text, file=sys.stderr))
    assert (code, cause and cause.rank) == (7, FAILED), (code, cause)
    seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
    os.write(3, f"| {count} | {seconds:.2f} s | {cpu / count * 1e3:.2f} ms | {grown / count / 1e3:.0f} KB |\n".encode())


def _memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,100,1000,10000", help="how many, separated by commas")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one)
        return
    print("| nodes | start, run, fail, stop | CPU, for each node | peak memory, for each node |\n|---|---|---|---|")
    for count in options.nodes.split(","):
        # The ranks' lines are for nobody; the figures come by a descriptor of their own.
        reader, writer = os.pipe()
        argv = ["sh", "-c", f'exec "$@" 3>&{writer} >/dev/null', "sh", sys.executable, __file__, "--one", count]
        subprocess.run(argv, pass_fds=[writer], check=True)
        os.close(writer)
        with open(reader) as file:
            print(file.read(), end="", flush=True)


if __name__ == "__main__":
    main()
