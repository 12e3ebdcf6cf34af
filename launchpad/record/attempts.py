"""Finds the attempts of a long record without reading all of its events: only the last ones are judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from launchpad.job.outcome import exit_in_words
from launchpad.protocol.events import HeadResumed, JobPlanned, Restarted
from launchpad.record import files, job_store
from launchpad.record.event_lines import event_of
from launchpad.record.scanner import Scanner

# A record with fewer bytes of events is read as a whole.
WHOLE_BYTES = 8 << 20

# What says who takes part in an attempt.
_LAYOUT = ("JobPlanned", "Restarted", "RanksSpawned", "NodeJoined", "HeadResumed")


class PassedAttempt(NamedTuple):
    """An attempt that is not judged. Times are in ns of the head's clock."""

    began: int
    ended: int
    failed: bool
    how: str  # it ended, in a few words


class Passed(NamedTuple):
    """The attempts at the beginning of a record that are counted, but not judged."""

    offset: int = 0  # where reading goes on, in bytes
    events: tuple[Any, ...] = ()  # what is to be known of them; the last one is the Restarted before the offset
    attempts: tuple[PassedAttempt, ...] = ()
    ahead: int = 0  # by how many ns the clock of what follows is ahead of that of the first event

    @property
    def earlier(self) -> list[str]:
        """A few words about each that failed."""
        return [one.how for one in self.attempts if one.failed]


NONE = Passed()


def layout(folder: str) -> Iterator[tuple[int, Any]]:
    """The events that say which ranks and nodes there are, each with the offset of the line after it.

    Raises OSError and Unreadable.
    """
    with files.open_file(folder, job_store.EVENTS) as file:
        for after, line in Scanner(folder, file, *_LAYOUT).more():
            if (event := event_of(line)) is not None:
                yield after, event


def passed(folder: str) -> Passed:
    """What to pass over in this record; nothing of one that is short, or can't be read."""
    found = files.status(folder, job_store.EVENTS)
    if found is None or found.st_size < WHOLE_BYTES:
        return NONE
    try:
        known = list(layout(folder))
    except (OSError, files.Unreadable):
        return NONE
    begins = [at for at, (_, event) in enumerate(known) if isinstance(event, Restarted)]
    if len(begins) <= job_store.LAST_ATTEMPTS or not isinstance(known[0][1], JobPlanned):
        return NONE
    last = begins[-job_store.LAST_ATTEMPTS]
    before, ahead = [], 0
    for _, event in known[: last + 1]:
        ahead += event.ahead if isinstance(event, HeadResumed) else 0
        before.append(event._replace(time=event.time - ahead) if ahead else event)
    # A Restarted that changes nothing is of no further use.
    kept = [event for event in before[:-1] if not isinstance(event, Restarted) or event.nodes]
    restarts = [event for event in before if isinstance(event, Restarted)]
    times = [before[0].time, *(event.time for event in restarts)]
    ended = [
        PassedAttempt(began, event.time, event.counted, _in_few_words(event))
        for began, event in zip(times, restarts, strict=False)
    ]
    return Passed(known[last][0], (*kept, before[-1]), tuple(ended), ahead)


def _in_few_words(event: Restarted) -> str:
    """How the attempt before ended."""
    if not event.counted:
        return "the hosts changed"
    if event.rank >= 0:
        return f"rank {event.rank}, {exit_in_words(event.code)}"
    return f"node {event.node} was lost" if event.node >= 0 else "failed"
