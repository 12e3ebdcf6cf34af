"""Clocks that stand still while a person looks into a rank, and profiles of several."""

from __future__ import annotations

from typing import Any

from launchpad.console.notes import Notes
from launchpad.diagnosis.diagnosis import Diagnosis
from launchpad.diagnosis.speedscope import merge
from launchpad.head.clock import Clock
from launchpad.protocol.events import AtPrompt, JobPlanned

# Time limits that are paused.


def test_the_limits_stand_still_while_anything_waits() -> None:
    now = 5.0
    clock = Clock(lambda: now)

    def at(seconds: float) -> Clock:
        nonlocal now
        now = seconds
        return clock

    assert clock.limits() == 5.0
    at(10.0).note_wait("prompt", begins=True)
    at(12.0).note_wait("debugger", begins=True)
    assert at(14.0).limits() == 10.0
    at(15.0).note_wait("prompt", begins=False)
    assert clock.waits_for_person
    assert at(16.0).limits() == 10.0
    at(18.0).note_wait("debugger", begins=False)
    assert not clock.waits_for_person
    assert clock.limits() == 10.0
    assert at(20.0).limits() == 12.0
    at(21.0).note_wait("debugger", begins=False)
    at(22.0).note_wait("prompt", begins=True)
    at(25.0).end_waits()
    assert at(26.0).limits() == 15.0
    at(27.0).end_waits()
    assert (clock.limits(), clock.now()) == (16.0, 27.0)


def test_the_job_s_time_stands_still_with_the_head() -> None:
    clock = Clock(lambda: 100.0)
    clock.note_wait("prompt", begins=True)
    clock.stood_still(30.0)
    assert (clock.monotonic(), clock.now()) == (100.0, 70.0)


def test_whoever_is_long_at_a_prompt_is_reminded_of_torchs_time_outs() -> None:
    notes: list[str] = []
    diagnosis = Diagnosis()
    one = Notes(diagnosis, notes.append, quiet=False)
    diagnosis.on(JobPlanned(0, 1.7e9, "0a1b", 1, "id", ["true"], "/work", [["h", [0, 1, 2]]], {}, 0.0, ""))
    one.on(AtPrompt(1, 2, True))
    assert one.deadline is not None
    one.on(AtPrompt(2, 2, False))
    assert one.deadline is None
    one.on(AtPrompt(3, 2, True))
    assert one.deadline is not None
    one.tick(one.deadline)
    assert one.deadline is None
    assert [note.partition(":")[0] for note in notes] == ["rank 2 has been at a prompt for 5 minutes"]


# Profiles.


def speedscope(*threads: tuple[str, list[list[int]]]) -> dict[str, Any]:
    """What py-spy writes about these threads."""
    frames = [{"name": name, "file": f"/work/{name}.py", "line": 1, "col": None} for name in "abc"]
    frames.append({"name": "_answer", "file": "/opt/launchpad/rank/stack_server.py", "line": 9, "col": None})
    frames.append({"name": 'process 1:"python t.py"', "file": "", "line": 0, "col": None})
    frames.append({"name": "run", "file": "/opt/launchpad/rank/program.py", "line": 9, "col": None})
    profiles = [{"type": "sampled", "name": name, "samples": samples, "weights": [1.0]} for name, samples in threads]
    return {"shared": {"frames": frames}, "profiles": profiles}


def test_profiles_share_one_table_of_frames() -> None:
    one = speedscope(("Thread 7", [[3, 3]]), ('Thread 8 "Loader"', [[2]]), ('Thread 1 "MainThread"', [[4, 5, 0, 1]]))
    made = merge({4: (1, one), 0: (1, speedscope(('Thread 1 "MainThread"', [[1]])))}, "job x")
    assert [(profile["name"], profile["samples"]) for profile in made["profiles"]] == [
        ("rank 0", [[0]]),
        ("rank 4", [[1, 0]]),
        ('rank 4, Thread 8 "Loader"', [[2]]),
    ]
    assert [frame["name"] for frame in made["shared"]["frames"]] == ["b", "a", "c"]
    assert made["name"] == "job x"


def test_the_processes_below_a_rank_come_after_its_threads() -> None:
    one = speedscope(
        ('Process 9 Thread 10 "pin"', [[2]]),
        ('Process 9 Thread 9 "MainThread"', [[1]]),
        ('Process 71 Thread 72 "writer"', [[1]]),
        ('Process 71 Thread 71 "MainThread"', [[0]]),
    )
    names = [profile["name"] for profile in merge({2: (71, one)}, "job x")["profiles"]]
    assert names == [
        *("rank 2", 'rank 2, Thread 72 "writer"', "rank 2, process 9", 'rank 2, process 9, Thread 10 "pin"'),
    ]
