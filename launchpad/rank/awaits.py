"""Says what a thread waits for, from the variables of the functions that it is in: a child process, a lock, a task.

The frames name the function that waits; its variables have the object: which DataLoader worker, which thread.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType
    from typing import Any

# So many children and threads are named.
MOST = 16
# Characters of a command, and of other words.
MOST_TEXT = 200

# Whose code is not the program's own.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "<frozen ")


def awaited(thread: int) -> dict[str, Any]:
    """What this thread waits for, in words, and the pids, threads, tasks or file that it is about; {} if unknown.

    Of several functions that wait, the one counts that the program has called.
    """
    found: dict[str, Any] = {}
    frame = sys._current_frames().get(thread)
    innermost = True
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        own = not any(part in frame.f_code.co_filename for part in _LIBRARIES)
        if own and innermost:
            found = _lock(frame)
        else:
            look = _of_file_lock if name.startswith("filelock.") else _LOOKS.get((name, frame.f_code.co_name))
            found = (look(frame.f_locals) if look is not None else None) or found
        if own:
            break
        innermost = False
        frame = frame.f_back
    return found


# Children


def _of_loader(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which worker has the next batch."""
    loader = variables.get("self")
    workers = list(getattr(loader, "_workers", ()))
    task = getattr(loader, "_task_info", {}).get(getattr(loader, "_rcvd_idx", None))
    if task is not None and len(task) == 1 and 0 <= task[0] < len(workers):
        return {"what": f"its DataLoader worker {task[0]}", "pids": _pids([workers[task[0]]])}
    return {"what": "its DataLoader workers", "near": _pids(workers)} if workers else None


def _of_popen(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    popen: Any = variables.get("self") or variables.get("process") or variables.get("p")
    words = getattr(popen, "args", None)
    if popen is None or words is None:
        return None
    if isinstance(words, str | bytes | os.PathLike):
        words = [words]
    command = " ".join(map(os.fsdecode, words))
    short = command if len(command) <= MOST_TEXT else command[:MOST_TEXT] + "…"
    return {"what": f"its child `{short}`", "pids": [popen.pid]}


def _of_process(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    process: Any = variables.get("self")
    pids = _pids([process])
    return {"what": f"its child process {process.name!r}", "pids": pids} if pids else None


def _of_spawned(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    pids = _pids(getattr(variables.get("self"), "processes", ()))
    return {"what": "the processes that it spawned", "near": pids} if pids else None


def _of_pool(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """A pool of multiprocessing, or what is to come from it."""
    waits = variables.get("self")
    pool = waits if hasattr(waits, "_worker_handler") else getattr(waits, "_pool", None)
    workers = list(getattr(pool, "_pool", ()))
    threads = [worker.name for worker in workers if not hasattr(worker, "_popen")]
    if threads:
        return {"what": "its pool of threads", "pool": threads[:MOST]}
    found: dict[str, Any] = {"what": "its pool", "near": _pids(workers)}
    # A worker that dies takes its task with it; the pool starts another one, and waits for ever.
    from . import killed_child

    if lost := killed_child.last_noted():
        found["lost"] = f"its worker {lost}"
    return found if workers else None


def _of_executor(_: Mapping[str, Any]) -> dict[str, Any] | None:
    """What executors have at work: the processes of theirs, or else the threads."""
    threading: Any = sys.modules["threading"]
    pids: list[int] = []
    names: list[str] = []
    pools: Any = sys.modules.get("concurrent.futures.thread")
    workers = list(getattr(pools, "_threads_queues", ()))
    for thread in list(threading._active.values()):
        if type(thread).__name__.lstrip("_") == "ExecutorManagerThread":
            pids += _pids((getattr(thread, "processes", None) or {}).values())
        elif thread in workers:
            names.append(thread.name)
    if pids:
        return {"what": "its process pool", "near": pids[:MOST]}
    return {"what": "its pool of threads", "pool": names[:MOST]} if names else {"what": "a future"}


def _of_children(what: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Something that any of multiprocessing's children may be about to do."""

    def look(variables: Mapping[str, Any]) -> dict[str, Any]:
        module: Any = sys.modules.get("multiprocessing.process")
        own = type(variables.get("self")).__name__
        return {"what": what.format(own), "near": _pids(getattr(module, "_children", ()))}

    return look


def _pids(processes: Iterable[Any]) -> list[int]:
    popens: list[Any] = [getattr(one, "_popen", None) for one in list(processes)]
    return sorted(one.pid for one in popens if getattr(one, "pid", 0))[:MOST]


# Threads and locks


def _of_thread(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    name = getattr(variables.get("self"), "name", None)
    return {"what": f"its thread {name!r}", "thread": name} if isinstance(name, str) else None


def _of_type(what: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def look(variables: Mapping[str, Any]) -> dict[str, Any]:
        kind = type(variables.get("self"))
        return {"what": what.format(f"{kind.__module__.removeprefix('_').partition('.')[0]}.{kind.__name__}")}

    return look


def _of_condition(variables: Mapping[str, Any]) -> dict[str, Any]:
    """It wants the condition's lock."""
    return _owned(getattr(variables.get("self"), "_lock", None))


def _of_file_lock(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """A lock of the package filelock."""
    return _of_path(getattr(variables.get("self"), "lock_file", None), "the file lock {}")


def _of_baton(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """What torch makes while it compiles an extension."""
    return _of_path(getattr(variables.get("self"), "lock_file_path", None), "the lock file {} to be removed")


def _of_path(path: Any, what: str) -> dict[str, Any] | None:
    if not isinstance(path, str | os.PathLike):
        return None
    path = os.path.abspath(os.fspath(path))
    return {"what": what.format(path), "path": path}


def _of_rpc(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call of gRPC, or the next message of one."""
    state: Any = variables.get("state") or getattr(variables.get("self"), "_state", None)
    method, target = getattr(state, "method", None), getattr(state, "target", None)
    return {"what": f"gRPC's {method} at {target}"} if method and target else None


def _lock(frame: FrameType) -> dict[str, Any]:
    """The lock or queue that this line of the program waits for: C code has no frames."""
    value = _object_of_call(frame)
    kind = type(value)
    if kind.__name__ in ("lock", "RLock") and kind.__module__ in ("_thread", "builtins"):
        return _owned(value)
    if kind.__module__ == "multiprocessing.synchronize":
        return _of_children("a multiprocessing.{}")({"self": value})
    if kind.__name__ == "SimpleQueue" and kind.__module__ == "_queue":
        return {"what": "an item in a queue.SimpleQueue"}
    return {}


def _owned(lock: Any) -> dict[str, Any]:
    """An RLock knows its owner, and says so in its text."""
    kind = type(lock).__name__
    _, found, owner = repr(lock).partition(" owner=") if kind == "RLock" else ("", "", "")
    number = int(owner.split()[0]) if found else 0
    threading: Any = sys.modules.get("threading")
    holder = getattr(threading, "_active", {}).get(number)
    holders = {"thread": holder.name} if holder is not None else {}
    return {"what": f"a threading.{'RLock' if kind == 'RLock' else 'Lock'}", "held": True, **holders}


def _object_of_call(frame: FrameType) -> Any:
    """The object whose method is being called, or whose `with` block is entered; None if it is no plain name.

    Its attributes are looked up in instances and modules only, so that no code of the program is run.
    """
    import dis

    names: list[str] = []
    for one in reversed([one for one in dis.get_instructions(frame.f_code) if one.offset <= frame.f_lasti]):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(one.argval)
        elif one.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            base = one.argval
            break
        elif one.opname.startswith(("STORE_", "RETURN_", "POP_", "JUMP_", "BINARY_")):
            return None
    else:
        return None
    if names and names[0] in ("acquire", "get", "put", "__enter__"):
        del names[0]
    space = {**frame.f_globals, **frame.f_locals}
    value = space.get(base)
    for name in reversed(names):
        value = getattr(value, "__dict__", {}).get(name)
    return value


# Tasks


def _of_loop(variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tasks of an event loop that has nothing to do."""
    from . import await_chains

    return await_chains.waits(variables.get("self"), variables.get("future"))


_LOOKS: dict[tuple[str, str], Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    **{("torch.utils.data.dataloader", name): _of_loader for name in ("_next_data", "_get_data", "_shutdown_workers")},
    **{("subprocess", name): _of_popen for name in ("wait", "_wait", "communicate", "_communicate", "run", "call")},
    ("multiprocessing.process", "join"): _of_process,
    ("torch.multiprocessing.spawn", "join"): _of_spawned,
    **{("multiprocessing.pool", name): _of_pool for name in ("get", "wait", "next", "join")},
    **{("concurrent.futures._base", name): _of_executor for name in ("result", "exception", "wait", "result_iterator")},
    ("concurrent.futures._base", "as_completed"): _of_executor,
    ("joblib.parallel", "_retrieve"): _of_executor,
    **{
        ("multiprocessing.connection", name): _of_children("a message over a multiprocessing.Connection")
        for name in ("_recv", "_send", "recv", "recv_bytes", "wait")
    },
    ("multiprocessing.queues", "get"): _of_children("an item in a multiprocessing.{}"),
    ("multiprocessing.queues", "put"): _of_children("room in a multiprocessing.{}"),
    **{
        ("multiprocessing.synchronize", name): _of_children("a multiprocessing.{}")
        for name in ("__enter__", "wait", "wait_for", "acquire")
    },
    ("threading", "join"): _of_thread,
    ("threading", "__enter__"): _of_condition,
    **{("threading", name): _of_type("a {}") for name in ("wait", "wait_for", "acquire", "_wait")},
    ("queue", "get"): _of_type("an item in a {}"),
    ("queue", "put"): _of_type("room in a {}"),
    ("queue", "join"): _of_type("all items of a {} to be done"),
    ("torch.utils.file_baton", "wait"): _of_baton,
    **{("grpc._channel", name): _of_rpc for name in ("_blocking", "_next", "result")},
    **{("asyncio.base_events", name): _of_loop for name in ("run_forever", "run_until_complete")},
}
