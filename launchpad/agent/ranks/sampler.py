"""Takes samples of this node's ranks: what they use, and what they wait for.

The figures come from /proc and the GPUs' driver. What a rank waits for, only the rank itself can say: it is asked only
while somebody looks, and one that doesn't answer in time is left alone until it does. For the record, ranks are asked
when they have entered their collectives; who answers late is heard as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from ...protocol.commands import Sample
from ...protocol.events import ArrivalTimes, Hindered, Hindrances, Sampled
from ...protocol.stacks import is_library, where
from ..host import processes, procfs
from ..host.gpus import Gpu, GpuReader
from ..host.hindrances import HindranceReader, of_host
from ..host.process_trees import ProcessTrees, TreeUse
from ..part import AgentHub, AgentPart
from ..stacks.debug_channel import EnteredAnswer, SampleAnswer
from ..stacks.source_lines import SourceLines

# How long the ranks and the driver have to answer, at least.
ANSWER_SECONDS = 0.3

# So many processes of each rank are told of, and so much of their commands.
MOST_CHILDREN = 16
MOST_COMMAND = 200

# This many source lines are remembered.
_MOST_LINES = 1000


class Sampler(AgentPart):
    """Handles one request at a time; when a new one comes, the old one is answered."""

    deadline: float | None = None  # when to report, if not everybody has answered by then

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._outbox = hub.outbox
        self._channel = hub.channel
        self._trees = ProcessTrees()
        self._hindrances = HindranceReader()
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        hub.poll.watch(wake, self._on_wake)
        self._gpus = GpuReader(wake)
        self._ranks: dict[int, int] = {}  # by pid: those that the request is about
        self._number = 0
        self._asks = False  # somebody looks
        self._compares = False  # whether there are ranks with collectives, whose hindrances may explain who is slow
        self._untold: set[int] = set()  # pids of ranks that have not answered what they have entered
        self._open: set[int] = set()  # pids of ranks that have not answered the last question
        self._awaited: set[int] = set()  # those that were asked in this request
        self._answers: dict[int, SampleAnswer] = {}  # by pid
        self._lines: dict[tuple[str, int], str] = {}  # of the sources
        self._channel.on_sample = self._take
        self._channel.on_entered = self._entered

    def on(self, command: Sample) -> None:
        """Take a sample of the ranks that run."""
        if self.deadline is not None:
            self._report()
        self._ranks = {rank.pid: rank.rank for rank in self._hub.ranks.values()}
        self._number = command.number
        self._asks = command.asks
        self._answers = {}
        self._open &= self._ranks.keys()
        self._gpus.begin()
        asked = []
        if command.asks:
            asked = [pid for pid in self._ranks if pid not in self._open]
            self._open.update(pid for pid in asked if self._channel.ask_for_sample(pid, command.number))
        else:
            self._untold &= self._ranks.keys()
            due = [pid for pid in self._ranks if pid not in self._untold]
            self._untold.update(pid for pid in due if self._channel.ask_what_it_entered(pid))
        self._compares = not command.asks and bool(self._untold)
        self.deadline = time.monotonic() + ANSWER_SECONDS * procfs.slack()
        self._awaited = self._open.intersection(asked)
        self._report_if_complete()

    def _on_wake(self, wake: int) -> None:
        """The GPUs have been read."""
        try:
            os.eventfd_read(wake)
        except BlockingIOError:
            pass
        self._report_if_complete()

    def _take(self, pid: int, answer: SampleAnswer) -> None:
        self._open.discard(pid)
        if answer["sample"] == self._number:
            self._answers[pid] = answer
        self._report_if_complete()

    def _entered(self, pid: int, answer: EnteredAnswer) -> None:
        self._untold.discard(pid)
        if pid in self._ranks and answer["entered"]:
            self._outbox.say(ArrivalTimes(answer["now"], self._ranks[pid], answer["entered"]))

    def tick(self, now: float) -> None:
        """Report what there is."""
        self._report()

    def _report_if_complete(self) -> None:
        """Report, if everybody has answered."""
        if self.deadline is not None and not (self._awaited & self._open or self._gpus.busy):
            self._report()

    def _report(self) -> None:
        self.deadline = None
        trees = self._trees.read(self._ranks)
        waits = [
            (self._ranks[pid], *wait) for pid, answer in self._answers.items() if (wait := self._wait(pid, answer))
        ]
        # One without memory is exiting.
        figures = [(self._ranks[pid], *use) for pid, use in trees.items() if use.memory]
        children = self._children(trees) if self._asks else []
        self._outbox.say(Sampled(time.monotonic_ns(), self._number, figures, waits, self._use_of_gpus(), children))
        if self._compares:
            self._outbox.say(Hindrances(time.monotonic_ns(), self._hindered(trees), of_host()))

    def _children(self, roots: Iterable[int]) -> list[tuple[int, int, str, str, float, int, int]]:
        """The processes below the ranks, without Python's own helpers. A fork has the rank's command."""
        commands = {root: processes.name_of(root) for root in roots}
        counts = dict.fromkeys(commands, 0)
        found = []
        for pid, root in sorted(self._trees.root_of.items()):
            if pid == root or counts[root] == MOST_CHILDREN:
                continue
            command, one = processes.name_of(pid), self._trees.found[pid]
            if not processes.is_helper(command):
                counts[root] += 1
                command = "" if command == commands[root] else command[:MOST_COMMAND]
                found.append((self._ranks[root], pid, command, one.state, one.cpu, one.memory, one.threads))
        return found

    def _hindered(self, trees: dict[int, TreeUse]) -> list[Hindered]:
        members: dict[int, list[int]] = {root: [] for root in trees}
        for pid, root in self._trees.root_of.items():
            members[root].append(pid)
        slowed = {rank for gpu in self._gpus.gpus if gpu.slowed for rank in self._users_of(gpu)}
        found = self._hindrances.read(members)
        ranks = {root: self._ranks[root] for root in trees}
        return [(ranks[root], use.cpu, *found[root], int(ranks[root] in slowed)) for root, use in trees.items()]

    def _wait(self, pid: int, answer: SampleAnswer) -> tuple[str, int, float] | None:
        """The operation in which a rank waits for others, the collective's number, and since when it does."""
        frames = [(*frame, "") for frame in answer["frames"]]
        if frames and not is_library(frames[0][0]):
            file, line, function, _ = frames[0]
            frames[0] = (file, line, function, self._line(pid, file, line))
        operation = where(frames, answer["mpi"]).waits_in
        number, seconds = answer["wait"] or (-1, -1.0)
        return (operation, number, round(seconds, 1)) if operation else None

    def _line(self, pid: int, path: str, number: int) -> str:
        if (path, number) not in self._lines:
            if len(self._lines) >= _MOST_LINES:
                self._lines.clear()
            self._lines[path, number] = SourceLines(f"/proc/{pid}/cwd").line(path, number)
        return self._lines[path, number]

    def _use_of_gpus(self) -> list[tuple[str, int, int, int, dict[str, int]]]:
        users = [{str(rank): size for rank, size in self._users_of(gpu).items()} for gpu in self._gpus.gpus]
        return [(*gpu[:4], own) for gpu, own in zip(self._gpus.gpus, users, strict=True)]

    def _users_of(self, gpu: Gpu) -> dict[int, int]:
        """The ranks that use a GPU: by their pids or, where the driver has others, by its UUID."""
        users: dict[int, int] = {}
        for pid, memory in gpu.by_pid.items():
            if pid in self._trees.root_of:
                rank = self._ranks[self._trees.root_of[pid]]
                users[rank] = users.get(rank, 0) + memory if memory >= 0 else -1
        for pid, answer in self._answers.items():
            if gpu.uuid in answer["gpus"]:
                users.setdefault(self._ranks[pid], -1)
        return users
