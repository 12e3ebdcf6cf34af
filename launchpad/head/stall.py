"""Decides whether a job hangs, by comparing two samples of its ranks. Pure.

A job has stalled if it has written nothing for a while, and every rank either

- has the same stack as before, and neither it nor its children have used the CPU, moved bytes or been woken by what
  they receive; or
- waits for other ranks in the same collective as before. Such a wait may burn CPU (MPI and NCCL poll), so the
  criterion is that the main thread has run no Python code and has entered no other collective. If C code holds the GIL
  while it waits, no thread runs any Python, and the rank does not answer at all; or
- runs no Python, and is in the same call of MPI as before. That is known from a few glimpses of its threads only
  (agent/stacks/spinning.py), so it takes more samples.

A rank that computes, or that sleeps in a loop that makes progress, has not stalled, and then neither has the job. Nor
has it if each rank is in one long sleep for a given time (or its child is): nobody waits for any of them.

A rank that other processes keep from running makes no progress either. So a rank that wants to run is judged only once
it has used some CPU since the older sample.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launchpad.protocol.events import StackDump
from launchpad.protocol.stacks import main_frames, where

# The share of a CPU below which a rank is idle; helper threads that wake now and then use less.
IDLE_SHARE = 0.03
# The kernel counts CPU time in units of 10 ms, and a sample costs a rank a few milliseconds.
LEAST_SECONDS = 0.03
# A rank that moves fewer bytes than this is idle; to answer a sample, it writes a few KB.
MOVED_BYTES = 64 << 10

# A main thread that receives may be woken this often by a sample, which may be a signal.
SAMPLE_WAKES = 1
# Other threads, and children, may be woken by heartbeats, up to this often a second.
HEARTBEATS = 2.0

# So many times in a row no rank may have made progress if some seem to spin in MPI.
SPIN_SAMPLES = 4

# The file whose functions poll in Python code.
_POLLS = "launchpad/collectives/mpi/work.py"


class StallWatch:
    """Holds the last sample, and decides when to take the next one. Times are in seconds of one clock."""

    found = ""  # the world that has stalled, where there are several

    def __init__(self, timeout: float, now: float) -> None:
        """`timeout`: seconds without output or progress that count as a stall."""
        self._timeout = timeout
        self._since = now  # when there was output last
        self._last: Mapping[int, StackDump] = {}
        self._last_at = now
        self._stuck = 0  # how many times in a row no rank had made progress
        self.deadline = now + timeout / 2

    def moved(self, now: float, rank: int = -1) -> None:  # noqa: ARG002
        """A rank has written something, started or exited; -1: each may have."""
        self._since = now
        self._last = {}
        self._stuck = 0
        self.deadline = now + self._timeout / 2

    def quiet(self, now: float) -> float:
        """How long there has been no output."""
        return now - self._since

    def asked(self, now: float) -> None:
        """The ranks are being sampled."""
        self.deadline = now + self._timeout / (SPIN_SAMPLES if self._spins else 2)

    @property
    def _spins(self) -> bool:
        """Whether a rank seemed to spin in MPI."""
        return any("spins" in one.collectives for one in self._last.values())

    def sampled(self, now: float, sample: Mapping[int, StackDump], running: Collection[int]) -> bool:
        """Take a sample. Returns whether the ranks have stalled."""
        stuck = stalled(self._last, sample, running, now - self._last_at)
        if stuck and any(_starves(self._last[rank], sample[rank]) for rank in running):
            return False  # the older sample is kept, so that what little CPU the rank gets adds up
        self._last, self._last_at = sample, now
        self._stuck = self._stuck + 1 if stuck else 0
        # A sample taken less than half the timeout after the last output says nothing yet.
        return self.quiet(now) >= self._timeout and self._stuck >= (SPIN_SAMPLES if self._spins else 1)


def stalled(
    before: Mapping[int, StackDump], after: Mapping[int, StackDump], running: Collection[int], seconds: float
) -> bool:
    """Whether no running rank has made progress between two samples, `seconds` apart."""
    if not running or any(rank not in before or rank not in after for rank in running):
        return False
    pairs = [(before[rank], after[rank]) for rank in running]
    return all(is_stuck(*pair, seconds) for pair in pairs) and not all(_sleeps(*pair) for pair in pairs)


def is_stuck(before: StackDump, after: StackDump, seconds: float) -> bool:
    """Whether this rank has made no progress between two samples."""
    if before.pid != after.pid or before.collectives.get("counts") != after.collectives.get("counts"):
        return False
    unmoved = (
        min(before.cpu, after.cpu, before.moved, after.moved) >= 0
        and abs(after.moved - before.moved) <= MOVED_BYTES  # a connection that is closed no longer counts
        and not _receives(before, after, seconds)
    )
    spins = before.collectives.get("spins")
    if unmoved and spins and spins == after.collectives.get("spins"):
        return True
    idle = (
        unmoved
        and after.cpu - before.cpu <= max(LEAST_SECONDS, IDLE_SHARE * seconds)
        and not (before.busy or after.busy)
    )
    frames = [[frame[:3] for frame in main_frames(sample)] for sample in (before, after)]
    if idle and frames[0] == frames[1] and before.state == after.state:
        return True
    return _waits(before, after)


def _receives(before: StackDump, after: StackDump, seconds: float) -> bool:
    """Whether a thread that waited for data both times has got some in between."""
    earlier = {(thread, descriptor): wakes for thread, descriptor, wakes, _ in before.collectives.get("receives", ())}
    for thread, descriptor, wakes, patience in after.collectives.get("receives", ()):
        by_itself = 2 * seconds / patience if patience else 0.0
        idle = SAMPLE_WAKES if thread == after.pid else max(SAMPLE_WAKES, HEARTBEATS * seconds)
        if wakes - earlier.get((thread, descriptor), wakes) > idle + by_itself:
            return True
    return False


def _starves(before: StackDump, after: StackDump) -> bool:
    """Whether the rank wants to run, and has hardly been let."""
    return after.busy and min(before.cpu, after.cpu) >= 0 and after.cpu - before.cpu < LEAST_SECONDS


def _sleeps(before: StackDump, after: StackDump) -> bool:
    """Whether the rank is still in the same sleep."""
    return bool(asleep := before.collectives.get("asleep")) and asleep == after.collectives.get("asleep")


def _waits(before: StackDump, after: StackDump) -> bool:
    """Whether the rank is waiting for other ranks in the same operation as before."""
    places = [where(main_frames(sample), bool(sample.collectives.get("mpi"))) for sample in (before, after)]
    silent = before.collectives.get("unanswered")
    # The main thread has been in C code the whole time.
    unmoved = 0 <= before.beats == after.beats or (bool(silent) and silent == after.collectives.get("unanswered"))
    waiting = bool(before.collectives.get("waiting") and after.collectives.get("waiting"))
    if places[0].waits_in and places[0][:5] == places[1][:5]:
        polls = any(frame[0].endswith(_POLLS) for frame in main_frames(after))
        return unmoved or (polls and waiting and bool(after.collectives.get("counts")))
    # With NCCL, a program waits wherever it needs a result, not inside the operation.
    return unmoved and waiting
