"""The stacks of very many ranks, in the head alone: python tests/bench/stacks.py [--nodes N] [--ranks N]

Every node has --ranks ranks. They stand at hundreds of distinct call paths inside one collective; one is elsewhere,
and has not entered it. Nodes are played: their answers go as frames through the decoder to the part of the head that
collects them, and on to the sinks that tell the stall and keep the stacks. Then the job is stopped, and its record is
judged and made a page; `launchpad top` looks at it twice while it runs.

Seconds are of CPU, on one core. `told` counts from the moment at which the last answer has arrived.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from launchpad.console.stack_sink import StackSink
from launchpad.console.top_screen import RankList, ScreenSize
from launchpad.diagnosis import activity
from launchpad.diagnosis.held_sink import HeldSink
from launchpad.diagnosis.history import History
from launchpad.head.machine import TakeStacks
from launchpad.head.stack_requests import StackRequests
from launchpad.protocol import wire
from launchpad.protocol.events import (
    JobOver,
    JobPlanned,
    PhaseChanged,
    RankExited,
    RanksHeld,
    RankStarted,
    Sampled,
    SamplesTaken,
    StackDump,
    StacksTaken,
    Stalled,
)
from launchpad.protocol.stacks import together
from launchpad.record import job_store
from launchpad.record.event_lines import line_of
from launchpad.record.recorded_verdict import in_words, look_at
from launchpad.report import page

PATHS = 300
C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SOURCE = "/work/train.py"


def frames(path: int, *, odd: bool) -> list[Any]:
    """A call path: a dozen frames, the innermost first."""
    inner = (
        [(SOURCE, 7, "read_batch", "queue.get()")]
        if odd
        else [(C10D, 3252, "all_reduce", ""), (C10D, 83, "wrapper", "")]
    )
    calls = [(SOURCE, 100 + path % 5, f"layer_{path % 5}", "dist.all_reduce(t)")] if not odd else []
    between = [
        (f"/work/model_{path % 17}.py", path + step, f"call_{step}", "return self.inner(x)") for step in range(8)
    ]
    return [*inner, *calls, *between, (SOURCE, 40, "<module>", "main()")]


def answer(rank: int, path: int, ranks: int, odd: int) -> StackDump:
    """What an agent finds of a rank."""
    last = 811 if rank == odd else 812
    entries = [
        {
            "group": "0",
            "number": at,
            "what": "all_reduce",
            "sizes": [[4096, 4096]],
            "types": ["Float"],
            "done": at < last or rank == odd,
            "frames": [(C10D, 3252, "all_reduce"), (SOURCE, 100, "layer")],
        }
        for at in range(last - 9, last + 1)
    ]
    groups = {"0": ("default_pg", [(0, ranks - 1, 1)])}
    known: Any = {"counts": {"0": last}, "waiting": int(rank != odd), "entries": entries, "groups": groups}
    threads: Any = [
        {"name": "MainThread", "frames": frames(path, odd=rank == odd)},
        {"name": "pin_memory", "frames": [("/usr/lib/python3.11/threading.py", 331, "wait", "")]},
    ]
    return StackDump(
        *(time.monotonic_ns(), rank, 1, 1000 + rank, "", threads, "S", "futex_wait", 12.5, False, 4096, 7),
        *(known, ""),
    )


class Hub:
    """As much of the head's as the part needs."""

    def __init__(self, nodes: int, per_node: int) -> None:
        self.running = range(nodes * per_node)
        self.phase = "stopping"
        self.clock = SimpleNamespace(now=lambda: 0.0, waits_for_person=False)
        self.nodes = SimpleNamespace(send_all=lambda _: None)
        self.posted: list[Any] = []
        self.post = self.posted.append


def cpu() -> float:
    """This process's CPU seconds."""
    return time.process_time()


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def answers(nodes: int, per_node: int, odd: int) -> Iterator[bytes]:
    """The frames of all nodes, made in another process: what it needs is not the head's."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        with open(theirs, "wb") as line:
            for node in range(nodes):
                ranks = range(node * per_node, (node + 1) * per_node)
                told = together([answer(rank, node * 7919 % PATHS, nodes * per_node, odd) for rank in ranks])
                line.write(wire.encode(told))
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as line:
        while data := line.read(1 << 16):
            yield data
    os.waitpid(pid, 0)


def collect(nodes: int, per_node: int, odd: int) -> tuple[StacksTaken, float]:
    """The answers, as the head's part collects them; and its CPU seconds until the last one."""
    hub = Hub(nodes, per_node)
    part = StackRequests(hub, None)  # type: ignore[arg-type]
    for rank in hub.running:
        part.on(0, RankStarted(1, rank, 1000 + rank))
    part.on(-1, TakeStacks("timeout"))
    part.tick(0.0)
    decoder = wire.Decoder()
    used = 0.0
    for data in answers(nodes, per_node, odd):
        began = cpu()
        for message in decoder.feed(data):
            part.on(0, message)
        part.tick(0.0)  # as after each batch of messages
        used += cpu() - began
    (taken,) = hub.posted
    return taken, used


def record(folder: str, planned: JobPlanned, held: RanksHeld) -> None:
    """Write the record of a job that hung."""
    ranks = [rank for _, own in planned.nodes for rank in own]
    events: list[Any] = [planned, *(RankStarted(2, rank, 1000 + rank) for rank in ranks), held, Stalled(2, 300.0)]
    events.append(PhaseChanged(3, "stopping", "stall", 15, 5.0, ranks))
    events += [RankExited(4 + rank, rank, -15, 900 << 20, None) for rank in ranks]
    events += [PhaseChanged(10**9, "over", "stall", 0, 0.0, []), JobOver(10**9, 124)]
    with open(os.path.join(folder, job_store.EVENTS), "w", encoding="utf-8") as file:
        file.writelines(f"{line_of(event)}\n" for event in events)


def top(history: History, ranks: int) -> list[str]:
    """What `launchpad top` shows of two looks at the job, which come from the head as JSON."""
    looks = []
    for number in (1, 2):
        figures: Any = [(rank, "S", 0.9 * number, 1 << 30, 12, 4096, 4096) for rank in range(ranks)]
        waits: Any = [(rank, "all_reduce", 812, 60.0) for rank in range(ranks) if rank != ranks // 3]
        sampled = SamplesTaken(number * 10**9, [1], [Sampled(number * 10**9, 1, figures, waits, [])], [])
        look = json.dumps(activity.look_at(history, sampled, {}, -1, {}))
        looks.append(activity.JobLook(*json.loads(look)))
    rows = activity.rows(*looks)
    hosts = activity.host_rows(looks[1], rows)
    return RankList().lines(
        looks[1], rows, hosts, lambda room: activity.folded(rows, room), ScreenSize(40, 120), [], ""
    )


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    nodes, per_node = options.nodes, options.ranks
    ranks = nodes * per_node
    odd = ranks // 3
    taken, used = collect(nodes, per_node, odd)
    print(f"{len(taken.dumps)} ranks on {nodes} nodes, {PATHS} call paths")
    print(f"until the last answer: {used:.2f} s")
    names = [(f"node{node}", list(range(node * per_node, (node + 1) * per_node))) for node in range(nodes)]
    plan: Any = SimpleNamespace(by_node=names, nodes=[SimpleNamespace(cwd="/work")], roles=())
    with tempfile.TemporaryDirectory() as folder:
        said: list[str] = []
        told: list[RanksHeld] = []
        began = cpu()
        HeldSink(plan, told.append).on(taken)
        StackSink(said.append, folder, plan, lambda *_: None).on(taken)
        print(f"told: {cpu() - began:.2f} s, {peak():.0f} MiB")
        print(*said[0].splitlines()[:4], sep="\n")
        size = os.path.getsize(os.path.join(folder, "stacks_1.txt"))
        if told[0].ranks != [odd]:
            print(f"the odd one is rank {odd}; told: {told[0].ranks[:10]}")
            return 1
        planned = JobPlanned(1, 1.7e9, "0a1b", 1, "id", ["train.py"], "/work", names, {}, 60.0, "")
        record(folder, planned, told[0])
        began = cpu()
        lines = in_words(folder, *look_at(folder))
        print(f"why: {cpu() - began:.2f} s", lines[0], sep="\n")
        began = cpu()
        page.write(os.path.join(folder, "job.html"), folder, folder)
        written = os.path.getsize(os.path.join(folder, "job.html"))
        print(f"page: {cpu() - began:.2f} s, {written / 1e6:.1f} MB; the file of all stacks {size / 1e6:.1f} MB")
    history = History([planned, *(RankStarted(1, rank, 1000 + rank) for rank in range(ranks))])
    began = cpu()
    shown = top(history, ranks)
    print(f"top: {cpu() - began:.2f} s for two looks, {peak():.0f} MiB")
    print(*shown[:3], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
