"""What a job that went well spent its time on."""

from __future__ import annotations

from launchpad.diagnosis.history import History
from launchpad.diagnosis.time_spent import time_spent
from launchpad.protocol.events import ArrivalsCompared, JobOver, MilestoneReached, ModulesImported, Restarted
from tests.support.failures import at, exits, job, over, stopping

WELL = [exits(4000, 0, 0), exits(5000, 1, 0), over(5100, ""), JobOver(at(5250), 0)]


def test_what_is_known_of_any_job() -> None:
    assert time_spent(History([*job(2), *WELL])) == (
        "it took 6.25 s: 1.00 s to start the ranks, 5.00 s in the program, 0.25 s to write the rest of the output "
        "and end"
    )


def test_imports_the_first_group_and_waits_where_they_are_recorded() -> None:
    """Of several nodes and ranks the last one counts, of waits the mean."""
    planned, *started = job(1, 1)
    rows = [(0, 100, 0, 0.0, 0.0, 0.0, 5.0), (1, 100, 100, 0.03, 3.0, 0.1, 5.0)]
    known = [
        ModulesImported(at(-200), 0.6, ["torch"], 0),
        ModulesImported(at(-100), 0.8, ["torch"], 1),
        *started,
        *(MilestoneReached(at(1500 - 1000 * rank), rank, "group") for rank in range(2)),
        MilestoneReached(at(1800), 1, "torch"),
        ArrivalsCompared(at(5100), "all_reduce", rows),
    ]
    assert time_spent(History([planned, *known, *WELL])) == (
        "it took 6.25 s: 1.00 s to start the ranks (imports: 0.80 s), 5.00 s in the program (until the first process "
        "group: 1.50 s; waiting for the slowest rank: 1.50 s each, on average), 0.25 s to write the rest of the output "
        "and end"
    )


def test_of_a_job_that_was_restarted_the_last_attempt_counts() -> None:
    planned, *started = job(1)
    first = [ModulesImported(at(-100), 0.8, ["torch"], 0), *started, exits(100, 0, 1), stopping(110, []), over(120)]
    again = Restarted(at(200), 1, 3, 0, 1, -1, 1, True, [], [], 0.0)
    second = [started[0]._replace(time=at(230)), exits(400_230, 0, 0), over(400_300, ""), JobOver(at(400_300), 0)]
    assert time_spent(History([planned, *first, again, *second])) == (
        "the last attempt took 7 min: 0.03 s to start the ranks, 7 min in the program, 0.07 s to write the rest of the "
        "output and end"
    )


def test_nothing_is_said_without_a_start_or_an_end() -> None:
    assert time_spent(History(job(1))) == ""
    assert time_spent(History([job(1)[0], JobOver(at(1), 0)])) == ""
