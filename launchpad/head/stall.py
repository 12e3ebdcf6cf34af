"""Whether a job hangs: a pure decision over two looks at its ranks.

A job has stalled when it has written nothing for a while, and every rank either

- shows the same stack as before, and neither it nor its children have used the processor or moved bytes; or
- waits for other ranks in a collective, as before, and has not got on meanwhile. Such a wait may burn the processor
  (MPI and NCCL poll), so what tells is that the main thread has run no Python code and has entered no collective.
  Where C code keeps the interpreter's lock in such a wait, no thread has run any: it answers no question.

A rank that computes, or that sleeps in the wait of a loop which gets on, has not stalled; nor has, then, the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launchpad.stacks import Examined, main_frames, where

# Of a processor; helper threads that wake now and then use less.
IDLE_SHARE = 0.03
# The kernel counts in hundredths of a second, and a look at a rank costs it a few milliseconds.
LEAST_SECONDS = 0.03
# Bytes; a look at a rank has it write a few kilobytes.
MOVED_BYTES = 64 << 10

# The file whose functions wait in Python code of their own.
_POLLS = "launchpad/collectives/mpi/work.py"


class Watch:
    """When to look next, and what was seen. Times in seconds of one clock."""

    def __init__(self, timeout: float, now: float) -> None:
        """`timeout`: so long without output or progress is a stall."""
        self._timeout = timeout
        self._since = now  # nothing was written
        self._seen: Mapping[int, Examined] = {}
        self._seen_at = now
        self.deadline = now + timeout / 2

    def moved(self, now: float) -> None:
        """A rank has written something, has started or has ended."""
        self._since = now
        self._seen = {}
        self.deadline = now + self._timeout / 2

    def quiet(self, now: float) -> float:
        """For how long nothing was written."""
        return now - self._since

    def asked(self, now: float) -> None:
        """The ranks are being looked at."""
        self.deadline = now + self._timeout / 2

    def sampled(self, now: float, seen: Mapping[int, Examined], running: Collection[int]) -> bool:
        """They were; whether they have stalled."""
        before, self._seen = self._seen, seen
        window, self._seen_at = now - self._seen_at, now
        # What was seen before it was quiet for half the time says nothing yet.
        return self.quiet(now) >= self._timeout and stalled(before, seen, running, window)


def stalled(
    before: Mapping[int, Examined], after: Mapping[int, Examined], running: Collection[int], seconds: float
) -> bool:
    """Whether none of the running ranks has got on between two looks, `seconds` apart."""
    return bool(running) and all(
        rank in before and rank in after and is_stuck(before[rank], after[rank], seconds) for rank in running
    )


def is_stuck(before: Examined, after: Examined, seconds: float) -> bool:
    """Whether this rank has not got on between two looks."""
    if before.pid != after.pid or before.collectives.get("counts") != after.collectives.get("counts"):
        return False
    idle = (
        after.cpu - before.cpu <= max(LEAST_SECONDS, IDLE_SHARE * seconds)
        and after.moved - before.moved <= MOVED_BYTES
        and not (before.busy or after.busy)
    )
    frames = [[frame[:3] for frame in main_frames(look)] for look in (before, after)]
    if idle and frames[0] == frames[1] and before.state == after.state:
        return True
    return _waits(before, after)


def _waits(before: Examined, after: Examined) -> bool:
    """Whether it waits for other ranks, in the same operation as before."""
    places = [where(main_frames(look), bool(look.collectives.get("mpi"))) for look in (before, after)]
    silent = before.collectives.get("unanswered")
    # The main thread has been in C code all the time.
    unmoved = 0 <= before.beats == after.beats or (bool(silent) and silent == after.collectives.get("unanswered"))
    waiting = bool(before.collectives.get("waiting") and after.collectives.get("waiting"))
    if places[0].waits_in and places[0][:5] == places[1][:5]:
        polls = any(frame[0].endswith(_POLLS) for frame in main_frames(after))
        return unmoved or (polls and waiting and bool(after.collectives.get("counts")))
    # NCCL's operations are waited for wherever the program needs their results.
    return unmoved and waiting
