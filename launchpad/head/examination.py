"""Ask all nodes where their ranks are, one question after the other, and watch for a stall where that is wanted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from launchpad.commands import Examine
from launchpad.events import Output, RankExited, RankStarted, Restarted
from launchpad.head.nodes import Nodes
from launchpad.stacks import SILENT, Examined, StacksAsked, StacksTaken, Stalled

if TYPE_CHECKING:
    from launchpad.head.stall import Watch

# An agent gives its ranks 2 s (agent/examine.py); who has not answered by then is left out.
ANSWER_SECONDS = 2.5
# With native frames: a rank takes seconds, one after the other.
NATIVE_SECONDS = 10.0
NATIVE_SECONDS_PER_RANK = 6.0

SAMPLE = "sample"


class _Question(NamedTuple):
    why: str
    asker: int = 0
    native: bool = False
    full: bool = False
    insists: bool = True


class Examination:
    """What comes of a question is posted: a StacksTaken; and a Stalled after that of a stall."""

    def __init__(self, nodes: Nodes, post: Callable[[Any], None], stall_timeout: float | None, now: float) -> None:
        """Times are in seconds of the job's clock, which stands still while we do."""
        self._nodes = nodes
        self._post = post
        self._watch: Watch | None = None
        if stall_timeout is not None:
            from launchpad.head.stall import Watch

            self._watch = Watch(stall_timeout, now)
        self._waiting: deque[_Question] = deque()
        self._current: _Question | None = None
        self._number = 0
        self._ranks: Collection[int] = ()  # that were asked
        self._answers: dict[int, Examined] = {}
        self._until = 0.0

    @property
    def deadline(self) -> float | None:
        """When `tick` is to be called."""
        if self._current is not None:
            return self._until
        if self._waiting:
            return 0.0
        return self._watch.deadline if self._watch else None

    def on(self, event: Any, now: float) -> None:
        """An event of the job."""
        match event:
            case Examined() if self._current is not None and event.number == self._number:
                self._answers[event.rank] = event
            case StacksAsked(_, asker, native, full):
                self._waiting.append(_Question("asked", asker, native, full))
            case Output() | RankStarted() | RankExited() | Restarted() if self._watch:
                self._watch.moved(now)

    def ask(self, why: str) -> None:
        """Have it told why ("asked", "timeout"), and to everybody."""
        self._waiting.append(_Question(why))

    def tick(self, now: float, running: Collection[int], *, watching: bool) -> None:
        """Take what has come; ask what is to be asked. `running`: the ranks that have not ended.

        `watching`: a stall would end the job.
        """
        question = self._current
        if question is not None and (now >= self._until or all(rank in self._answers for rank in running)):
            self._current = None
            self._ended(question, now, running)
        if self._current is None and self._watch and self._watch.deadline <= now and not self._waiting:
            self._watch.asked(now)
            if watching:
                self._begin(_Question(SAMPLE, insists=False), now, running)
        if self._current is None and self._waiting:
            self._begin(self._waiting.popleft(), now, running)

    def _begin(self, question: _Question, now: float, running: Collection[int]) -> None:
        self._current = question
        self._number += 1
        self._ranks = tuple(running)
        self._answers = {}
        extra = NATIVE_SECONDS + NATIVE_SECONDS_PER_RANK * len(running) if question.native else 0.0
        self._until = now + (ANSWER_SECONDS + extra if running else 0.0)
        self._nodes.send_all(Examine(self._number, question.why != SAMPLE, question.insists, question.native))

    def _ended(self, question: _Question, now: float, running: Collection[int]) -> None:
        if question.why == SAMPLE:
            assert self._watch is not None
            if not question.insists and any(one.why == SILENT for one in self._answers.values()):
                self._waiting.appendleft(_Question(SAMPLE))
            elif self._watch.sampled(now, self._answers, running):
                self._waiting.appendleft(_Question("stall"))
            return
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        at = time.monotonic_ns()
        ranks = sorted(self._ranks)
        self._post(StacksTaken(at, question.why, question.asker, question.full, ranks, answers))
        if question.why == "stall" and self._watch:
            self._post(Stalled(at, self._watch.quiet(now)))
