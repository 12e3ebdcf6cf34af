"""diagnosis/awaited: what a rank waits for, in words."""

from __future__ import annotations

from typing import Any

import pytest

from launchpad.diagnosis.awaited import in_words
from launchpad.diagnosis.stack_summary import full, held, merged
from launchpad.protocol.events import StackDump, StacksTaken
from tests.support.stacks import dumps

READ = ["/w/data.py", 10, "__getitem__", "time.sleep(1000)"]
LOOP = ["/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", 349, "_worker_loop", ""]
FORKED = ["/w/train.py", 30, "<module>", "for batch in loader:"]
IDLE = ["/v/lib/python3.11/selectors.py", 415, "select", ""]
GET = ["/v/lib/python3.11/multiprocessing/queues.py", 113, "get", ""]
MAIN = [["/v/lib/python3.11/selectors.py", 415, "select", ""], FORKED]


def child(pid: int, *frames: list[Any], parent: int = 101, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "parent": parent, "command": "", "state": "S", "sleeps_in": "", "frames": [*frames]} | more


def waiting(awaits: dict[str, Any], *children: dict[str, Any], threads: dict[str, Any] | None = None) -> StackDump:
    one = dumps(1, MAIN)
    more = [{"name": name, "frames": frames} for name, frames in (threads or {}).items()]
    return one._replace(awaits=awaits, children=list(children), threads=[*one.threads, *more])


AT = "in __getitem__ at data.py:10: time.sleep(1000)"
WORKER = {"what": "its DataLoader worker 1", "pids": [4711]}
POOL = {"what": "its pool", "near": [4711, 4712, 4713, 4714]}
MAKE = {"what": "its child `make`", "pids": [4711]}
SAVE = [["/w/ckpt.py", 8, "save", "os.fsync(fd)"]]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (waiting({}), ""),
        (waiting({"server": "pid 71 (serve)"}), "data from pid 71 (serve)"),
        (
            waiting(WORKER, child(4711, READ, LOOP, FORKED), child(4712, IDLE, GET, LOOP, FORKED)),
            f"its DataLoader worker 1 (pid 4711), which is {AT}",
        ),
        (waiting(WORKER, child(4711, IDLE, GET, LOOP, FORKED)), "its DataLoader worker 1 (pid 4711), which is idle"),
        (waiting(WORKER), "its DataLoader worker 1 (pid 4711), which is gone"),
        (waiting(MAKE, child(4711, state="Z")), "its child `make` (pid 4711), which has ended"),
        (waiting(MAKE, child(4711, state="T")), "its child `make` (pid 4711), which is stopped by a signal"),
        (waiting(MAKE, child(4711, state="R")), "its child `make` (pid 4711), which is running"),
        (waiting(MAKE, child(4711, sleeps_in="nfs_wait")), "its child `make` (pid 4711), which sleeps in nfs_wait"),
        (
            waiting(
                MAKE,
                child(4711, sleeps_in="do_wait"),
                child(4712, parent=4711, command="cc x.c", sleeps_in="hrtimer_nanosleep"),
            ),
            "its child `make` (pid 4711), which waits for `cc x.c` (pid 4712), which is asleep",
        ),
        (
            waiting(
                POOL, *[child(pid, READ, LOOP) for pid in (4711, 4712, 4713)], child(4714, IDLE, GET, LOOP, FORKED)
            ),
            f"its pool; process 4711 is {AT}; process 4712 is {AT}; 1 more are at work",
        ),
        (
            waiting(POOL, child(4711, IDLE, GET, LOOP, FORKED), child(4712, IDLE, GET, LOOP, FORKED)),
            "its pool; its 2 processes are idle",
        ),
        (
            waiting(POOL | {"lost": "its worker 9 was killed by SIGKILL"}, child(4711, IDLE, GET, LOOP)),
            "its pool; its worker 9 was killed by SIGKILL, and what it had to do is lost",
        ),
        (
            waiting(
                {
                    "what": "its task runs",
                    "chain": [{"name": "runs", "frames": SAVE}],
                    "pids": [4711],
                },
                child(4711, command="make", sleeps_in="hrtimer_nanosleep"),
            ),
            "its task runs, which is in save at ckpt.py:8: os.fsync(fd); its child `make` (pid 4711) is asleep",
        ),
        (
            waiting({"what": "an item in a multiprocessing.Queue", "near": [4711]}, child(4711, READ)),
            f"an item in a multiprocessing.Queue; process 4711 is {AT}",
        ),
        (
            waiting({"what": "a threading.Lock", "held": True}, threads={"writer": SAVE, "idle": [IDLE]}),
            "a threading.Lock; thread 'writer' is in save at ckpt.py:8: os.fsync(fd)",
        ),
        (
            waiting({"what": "a threading.Lock", "held": True}),
            "a threading.Lock; no other thread is in the program's code: it may have the lock itself",
        ),
        (
            waiting({"what": "a threading.RLock", "held": True, "thread": "writer"}, threads={"writer": SAVE}),
            "a threading.RLock that thread 'writer' has, which is in save at ckpt.py:8: os.fsync(fd)",
        ),
        (
            waiting({"what": "its thread 'writer'", "thread": "writer"}, threads={"writer": SAVE}),
            "its thread 'writer', which is in save at ckpt.py:8: os.fsync(fd)",
        ),
        (
            waiting({"what": "its pool of threads", "pool": ["a", "b"]}, threads={"a": [IDLE], "b": [IDLE]}),
            "its pool of threads; its 2 threads are idle",
        ),
        (
            waiting({"what": "the file lock /w/x", "path": "/w/x", "holder": "rank 3 (pid 12)"}),
            "the file lock /w/x, which rank 3 (pid 12) has",
        ),
        (
            waiting({"what": "", "path": "/w/x.db", "holder": "pid 12 (sqlite3)"}),
            "x.db, which it has open and pid 12 (sqlite3) has locked",
        ),
        (
            waiting(
                {
                    "what": "its task fetch-3",
                    "chain": [{"name": "main", "frames": [FORKED]}, {"name": "fetch-3", "frames": SAVE}],
                    "tasks": [{"name": name, "frames": [READ]} for name in ("a", "b", "c")],
                }
            ),
            "its task main, which awaits task fetch-3, which is in save at ckpt.py:8: os.fsync(fd); "
            f"task a is {AT}; task b is {AT}; 1 more wait elsewhere",
        ),
    ],
)
def test_what_a_rank_waits_for_is_told(one: StackDump, words: str) -> None:
    assert in_words(one, "/w") == words


def test_a_lock_is_seen_by_its_line_where_only_the_signal_handler_has_answered() -> None:
    one = waiting({}, threads={"0x7f": SAVE})._replace(wchan="futex_do_wait")
    for text, words in (("with lock:", "a lock; thread '0x7f' is in save at ckpt.py:8: os.fsync(fd)"), ("step()", "")):
        one.threads[0]["frames"] = [("/w/train.py", 9, "f", text)]
        assert in_words(one, "/w") == words


def test_the_rank_that_waits_for_its_child_is_told_with_it() -> None:
    one = waiting(WORKER, child(4711, READ, LOOP, FORKED), child(4712, command="make -j", sleeps_in="do_wait"))
    taken = StacksTaken(0, "stall", 0, False, [1, 2], [one, one._replace(rank=2)])
    told = f"its DataLoader worker 1 (pid 4711), which is {AT}"
    assert held(taken, "/w", {}).lines[0] == (
        f"ranks 1-2 are in <module> at train.py:30 (in select): for batch in loader:; rank 1 waits for {told}"
    )
    alone = StacksTaken(0, "stall", 0, False, [1], [one])
    lines = merged(alone, "/w", {}).splitlines()
    assert lines[1] == f"  rank 1 waits for {told}; the rank is in <module> at train.py:30: for batch in loader:"
    assert lines[-2:] == [f"    process 4711 is {AT}", "    process 4712 (make -j) sleeps in do_wait"]
    assert f"  process 4711, child of 101:\n    data.py:10 in {AT[3:14]}" in full(alone, "/w", {})


def test_ranks_that_wait_for_different_things_at_one_place_are_told_apart() -> None:
    one = waiting({"what": "the lock on /w/x", "path": "/w/x", "holder": "rank 2 (pid 102)"})
    taken = StacksTaken(0, "stall", 0, False, [1, 2], [one, one._replace(rank=2, awaits={})])
    assert [line.partition(" at ")[0] for line in held(taken, "/w", {}).lines] == [
        "rank 1 waits for the lock on /w/x, which rank 2 (pid 102) has; the rank is in <module>",
        "rank 2 is in <module>",
    ]
