"""Says what a rank waits for: a child and where that is, a lock and who has it, a task of an event loop. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launchpad.diagnosis.mismatch import short_path
from launchpad.protocol.events import ChildStack, StackDump, ThreadStack
from launchpad.protocol.stacks import is_library, main_frames, where

# Of several processes, threads or tasks so many are told of.
MOST = 2

# Kernel functions and system calls in which a process waits for what another one does.
_WAITS_FOR_ANOTHER = ("do_wait", "wait", "pipe", "anon_pipe", "read", "do_select", "do_poll", "poll_schedule")

# Functions of libraries in which a child runs what it was given.
_GIVES_WORK = ("worker", "_process_worker", "_worker_loop", "run")

# Where one waits for something to do.
_QUEUES = ("/queues.py", "/connection.py")

# What kernel functions mean, by a part of their names.
_KERNEL = {"nanosleep": "is asleep", "futex": "waits for a lock or a thread", "pipe_read": "waits for data from a pipe"}

_LOCKS = ("with ", "async with ")


def in_words(one: StackDump, cwd: str) -> str:
    """What the rank waits for and where that is: `its child `make` (pid 4711), which …`; "" if unknown."""
    awaits = one.awaits
    what = awaits.get("what", "") or _lock_by_its_line(one)
    if holder := awaits.get("holder", ""):
        path = short_path(awaits.get("path", "") or "a file", cwd)
        return f"{what}, which {holder} has" if what else f"{path}, which it has open and {holder} has locked"
    if server := awaits.get("server"):
        return f"data from {server}"
    if chain := awaits.get("chain"):
        return _of_tasks(chain, awaits.get("tasks", []), cwd) + _of_task(awaits.get("pids", []), one.children, cwd)
    if near := awaits.get("near"):
        return f"{what}{_of_processes(near, awaits.get('lost', ''), one.children, cwd)}"
    if pids := awaits.get("pids"):
        child = next((child for child in one.children if child["pid"] == pids[0]), None)
        return f"{what} (pid {pids[0]}), which {process(child, one.children, cwd)}"
    if not what:
        return ""
    if pool := awaits.get("pool"):
        told = _of_threads([thread for thread in one.threads if thread["name"] in pool], cwd)
        return "; ".join([what, *(told or [f"its {len(pool)} threads are idle"])])
    if name := awaits.get("thread", ""):
        of = f" that thread {name!r} has" if awaits.get("held") else ""
        its = next((thread["frames"] for thread in one.threads if thread["name"] == name), [])
        return f"{what}{of}" + (f", which is {place(its, cwd)}" if its else "")
    return f"{what}{_of_others(one, cwd, held='held' in awaits or not awaits.get('what'))}"


def _lock_by_its_line(one: StackDump) -> str:
    """A rank that only its signal handler has told of may be seen to wait for a lock."""
    frames = main_frames(one)
    if not frames or is_library(frames[0][0]) or not one.wchan.startswith("futex"):
        return ""
    text = frames[0][3]
    return "a lock" if text.startswith(_LOCKS) or ".acquire(" in text else ""


def place(frames: Sequence[Sequence[Any]], cwd: str) -> str:
    """Where a thread is: `in save at ckpt.py:8: time.sleep(100)`."""
    at = where(frames, False)
    inside = f" (in {at.innermost})" if at.innermost else ""
    text = f": {at.text}" if at.text else ""
    return f"in {at.function} at {short_path(at.file, cwd)}:{at.line}{inside}{text}"


def _is_own(frames: Sequence[Sequence[Any]]) -> bool:
    """Whether the thread is in the program's own code, or was called from it."""
    return any(not is_library(frame[0]) for frame in frames)


def _of_tasks(chain: Sequence[ThreadStack], others: Sequence[ThreadStack], cwd: str) -> str:
    names = ", which awaits task ".join(str(task["name"]) for task in chain)
    last = f", which is {place(chain[-1]['frames'], cwd)}" if chain[-1]["frames"] else ""
    shown = [task for task in others if _is_own(task["frames"])]
    more = [f"task {task['name']} is {place(task['frames'], cwd)}" for task in shown[:MOST]]
    if len(shown) > MOST:
        more.append(f"{len(shown) - MOST} more wait elsewhere")
    return "; ".join([f"its task {names}{last}", *more])


def _of_task(pids: Sequence[int], children: Sequence[ChildStack], cwd: str) -> str:
    """The child that the last task of the chain waits for."""
    found = [child for child in children if child["pid"] in pids]
    return "".join(
        f"; its child `{child['command']}` (pid {child['pid']}) {process(child, children, cwd)}" for child in found
    )


def _of_processes(pids: Sequence[int], lost: str, children: Sequence[ChildStack], cwd: str) -> str:
    known = {child["pid"]: child for child in children}
    if lost:
        return f"; {lost}, and what it had to do is lost"
    found = [known[pid] for pid in pids if pid in known]
    busy = [child for child in found if _is_at_work(child)]
    if not busy:
        return (
            f"; its {len(found)} processes are idle"
            if len(found) > 1
            else "; its child process is idle"
            if found
            else ""
        )
    told = [f"process {child['pid']} {process(child, children, cwd)}" for child in busy[:MOST]]
    more = [f"{len(busy) - MOST} more are at work"] if len(busy) > MOST else []
    return "; ".join(["", *told, *more])


def _is_at_work(child: ChildStack) -> bool:
    """Whether it is in a function of the program, not in a pool's wait for tasks; one that can't be asked may be."""
    frames = child["frames"]
    if not frames:
        return child["state"] not in ("Z", "X")
    given = _given(frames)
    return _is_own(given) if given is frames else not (given and given[-1][0].endswith(_QUEUES))


def _given(frames: Sequence[Any]) -> Sequence[Any]:
    """The frames of what a child of multiprocessing was given to do; around these is what had forked it."""
    outer = [place for place, frame in enumerate(frames) if frame[2] in _GIVES_WORK and is_library(frame[0])]
    return frames[: outer[0]] if outer else frames


def process(child: ChildStack | None, children: Sequence[ChildStack], cwd: str) -> str:
    """What a child does, after its name."""
    if child is None:
        return "is gone"
    if child["state"] in ("Z", "X"):
        return "has ended"
    if child["state"] == "T":
        return "is stopped by a signal"
    if child["frames"]:
        return f"is {place(_given(child['frames']), cwd)}" if _is_at_work(child) else "is idle"
    below = [one for one in children if one["parent"] == child["pid"]]
    if len(below) == 1 and child["sleeps_in"].startswith(_WAITS_FOR_ANOTHER):
        return f"waits for `{below[0]['command']}` (pid {below[0]['pid']}), which {process(below[0], children, cwd)}"
    if child["state"] == "R":
        return "is running"
    known = next((words for name, words in _KERNEL.items() if name in child["sleeps_in"]), "")
    return known or "sleeps" + (f" in {child['sleeps_in']}" if child["sleeps_in"] else "")


def _of_threads(threads: Sequence[ThreadStack], cwd: str) -> list[str]:
    """Where those of the threads are that are in the program's own code."""
    found = [thread for thread in threads if _is_own(thread["frames"])]
    told = [f"thread {thread['name']!r} is {place(thread['frames'], cwd)}" for thread in found[:MOST]]
    return [*told, *([f"{len(found) - MOST} more threads are in the program's code"] if len(found) > MOST else [])]


def _of_others(one: StackDump, cwd: str, *, held: bool) -> str:
    """The other threads that are in the program's own code: one of them may have the lock, or what is waited for."""
    if told := _of_threads(one.threads[1:], cwd):
        return "; ".join(["", *told])
    return "; no other thread is in the program's code" + (": it may have the lock itself" if held else "")
