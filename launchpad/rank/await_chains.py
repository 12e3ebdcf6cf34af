"""Says where the tasks of a running event loop are: the main one, what that awaits, and so on; then the others."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Limits: tasks of a chain, other tasks, frames of each.
MOST_LINKS = 8
MOST_OTHERS = 50
MOST_FRAMES = 40


def waits(loop: Any, main: Any) -> dict[str, Any] | None:
    """What the loop's main task awaits: `chain`, and where the other `tasks` are; None if none is known.

    `main`: that of run_until_complete, if it is known.
    """
    asyncio: Any = sys.modules.get("asyncio")
    if asyncio is None or loop is None:
        return None
    tasks = asyncio.all_tasks(loop)
    if main not in tasks:
        main = next((task for task in tasks if not any(task in _awaited(other) for other in tasks)), None)
    if main is None:
        return None
    chain = [main]
    while len(chain) < MOST_LINKS:
        after = [task for task in _awaited(chain[-1]) if task not in chain and not task.done()]
        if not after:
            break
        chain.append(after[0])
    command = _command(chain[-1])
    others = sorted((task for task in tasks if task not in chain), key=lambda task: str(task.get_name()))
    return {
        "what": f"its task {_name(chain[-1])}",
        "chain": [_stack(task) for task in chain],
        "tasks": [_stack(task) for task in others[:MOST_OTHERS]],
        **({"pids": [command]} if command else {}),
    }


def _awaited(task: Any) -> list[Any]:
    """The tasks that this one awaits: one, or those of gather, wait or a TaskGroup."""
    waiter = getattr(task, "_fut_waiter", None)
    found = [waiter, *(getattr(waiter, "_children", None) or ())]
    innermost = next(iter(_frames(task)), None)
    if innermost is not None and innermost.f_globals.get("__name__", "").startswith("asyncio."):
        variables = innermost.f_locals
        found += _some(variables.get("fs")) + _some(variables.get("pending"))
        found += _some(getattr(variables.get("self"), "_tasks", None))
    return [one for one in found if hasattr(one, "get_coro")]


def _command(task: Any) -> int:
    """The pid of the subprocess that a task waits for, or 0."""
    for frame in _frames(task)[:3]:
        if frame.f_globals.get("__name__", "") in ("asyncio.base_subprocess", "asyncio.subprocess"):
            of = frame.f_locals.get("self")
            pid = getattr(of, "_pid", None) or getattr(of, "pid", None)
            return pid if isinstance(pid, int) else 0
    return 0


def _some(value: Any) -> list[Any]:
    return list(value) if isinstance(value, set | list | tuple | frozenset) else []


def _frames(task: Any) -> list[Any]:
    """The frames of its coroutines, innermost first."""
    found: list[Any] = []
    coroutine = task.get_coro()
    while coroutine is not None and len(found) < MOST_FRAMES:
        for prefix in ("cr", "ag", "gi"):
            frame = getattr(coroutine, f"{prefix}_frame", None)
            if frame is not None:
                found.append(frame)
                after = getattr(coroutine, f"{prefix}_await", None) or getattr(coroutine, f"{prefix}_yieldfrom", None)
                break
        else:
            break
        coroutine = after
    return found[::-1]


def _stack(task: Any) -> dict[str, Any]:
    frames = [[frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name, ""] for frame in _frames(task)]
    return {"name": _name(task), "frames": frames}


def _name(task: Any) -> str:
    """Its name; a number says nothing, so with the function that it runs."""
    name = str(task.get_name())
    function = getattr(task.get_coro(), "__qualname__", "")
    return f"{name} ({function})" if function and name.startswith("Task-") else name
