"""Shows and files the output of a joined node's own ranks; the head gets the end of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from launchpad.console.console import Console, StandardStreams, terminal_size
from launchpad.console.prefix import template_of
from launchpad.head.flow import Flow
from launchpad.head.sink import Sink
from launchpad.job.plan import NodePlan, Plan, RankPlan
from launchpad.job.spec import FoldChoice, JobSpec
from launchpad.protocol.commands import Credit, Start
from launchpad.protocol.events import STDERR, STDOUT, Output, RankExited, RankRaised, Restarted

# How much of the end of each stream the head gets, for the verdict and the record.
TAIL_BYTES = 64 << 10


class OwnOutput:
    """Shows and files the output of the ranks here, and gives the agent credit for it."""

    def __init__(
        self,
        spec: JobSpec,
        start: Start,
        post: Callable[[Any], None],
        fold: FoldChoice | None,
    ) -> None:
        """Raises UsageError for a --log-dir that can't be written."""
        plan = _plan(start)
        self._sinks: list[Sink] = []
        if spec.log_dir is not None or spec.redirects or spec.tee or any(spec.filters.values()):
            from launchpad.record.log_dir import Files, temporary_folder

            folder = spec.log_dir or temporary_folder()
            self._sinks.append(Files(spec, plan, folder, post, os.urandom(4).hex(), start.attempt))
        template = template_of(spec.line_prefix, spec.role)
        self._console = Console(spec, plan, StandardStreams(len(plan.ranks), os.environ, post, fold, template=template))
        self._sinks.append(self._console)
        self.terminal = list(terminal_size(os.environ, self._console.margin))  # what ours leaves for a rank's text
        self.give: Callable[[Credit], None] = lambda _: None  # to the agent
        self._flow = Flow(len(plan.ranks), lambda rank, stream, size: self.give(Credit(rank, stream, size)))
        self._begin(start)

    def _begin(self, start: Start) -> None:
        self._flow.window = start.window
        self._flow.start(start.attempt)
        self._tails: dict[tuple[int, int], bytes] = {}
        self._left = dict.fromkeys(((one["rank"], stream) for one in start.ranks for stream in (STDOUT, STDERR)), -1)

    def restart(self, start: Start) -> None:
        """The ranks are started again."""
        nodes = [(os.uname().nodename, [one["rank"] for one in start.ranks])]
        for sink in self._sinks:
            sink.on(Restarted(time.monotonic_ns(), start.attempt, 0, -1, 0, -1, nodes=nodes))
        self._begin(start)

    def take(self, event: Any) -> list[Any]:
        """Show an event of the agent's. Returns what the head is to have."""
        if type(event) is not Output:
            if type(event) is RankRaised:
                for sink in self._sinks:
                    sink.on(event)
            return [*self._last(event.rank), event] if type(event) is RankExited else [event]
        self._flow.shown(event, sum(sink.on(event) for sink in self._sinks))
        key = event.rank, event.stream
        left = self._left.get(key, 0)
        if left < 0:  # it still runs
            self._tails[key] = (self._tails.get(key, b"") + event.data)[-TAIL_BYTES:]
            return []
        self._left[key] = max(0, left - len(event.data))
        return [event._replace(data=event.data[:left])] if left else []

    def _last(self, rank: int) -> list[Output]:
        """The last output of a rank that has ended."""
        found = []
        for stream in (STDOUT, STDERR):
            tail = self._tails.pop((rank, stream), b"")
            self._left[rank, stream] = TAIL_BYTES - len(tail)
            found += [Output(time.monotonic_ns(), rank, stream, tail)] if tail else []
        return found

    def written(self, output: Output) -> None:
        """A sink has written what it held."""
        self._flow.written(output)

    def waits(self, now: float) -> list[float]:
        """The seconds until sinks are due, after doing what is."""
        for sink in self._sinks:
            if sink.deadline is not None and sink.deadline <= now:
                sink.tick(now)
        return [sink.deadline - now for sink in self._sinks if sink.deadline is not None]

    def say(self, text: str) -> None:
        """Show a message of the launcher's own."""
        self._console.say(text)

    def end(self, lines: list[str]) -> None:
        """Finish writing, and show why the job ended."""
        self._console.flush()
        if lines:
            self._console.say("\n".join(lines), bad=True)
        for sink in self._sinks:
            sink.close()


def _plan(start: Start) -> Plan:
    """The ranks here, as a plan for the sinks."""
    ranks = tuple(
        RankPlan(one["rank"], local, tuple(one["argv"]), one["environ"]) for local, one in enumerate(start.ranks)
    )
    first = ranks[0].environ
    node = NodePlan(int(first["GROUP_RANK"]), os.uname().nodename, start.cwd, start.defaults, ranks, start.environ)
    return Plan(first["TORCHELASTIC_RUN_ID"], (node,))
