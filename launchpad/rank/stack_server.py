"""Answers requests for a rank's stacks, even while its program is blocked in C++ or MPI; and starts its debugger.

There are three mechanisms, which cost nothing until used:
- A thread, started with the first process group (or from the start, if the launcher wants it), reports over a Unix
  socket to the agent the stacks of all threads, the exception that the main thread is handling, and the collectives
  this rank has entered, from the flight recorders of torch and of the mpi frontend. C code that waits usually releases
  the GIL. If it doesn't, the connected socket stays silent, which the agent notices; so the caller connects it, as the
  thread itself might never get the GIL.
- If there is no such thread, or C code holds the GIL, the agent sends a signal, and faulthandler's C code writes the
  stacks to a memory file of ours. That always works, but interrupts a system call in progress (poll, connect …).
- A Python handler for the same signal, which the interpreter runs between bytecodes, counts beats. The count since the
  last request shows whether the main thread has left C code. No signal is sent for this.

A second signal starts the thread, for a debugger in a rank that has none.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

# The agent finds the file by name among the rank's descriptors. If the program has closed it, no signal is sent.
FILE = "launchpad-stacks"
# Programs expect the low numbers to be free.
LOWEST = 250

# Limits of a report: last collectives per group, frames of each; threads, frames of each.
TAIL = 40
ENTRY_FRAMES = 12
THREADS = 100
FRAMES = 100

# Largest message that the agent takes.
MOST_BYTES = 150_000

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = (os.path.join(_ROOT, "rank", ""), os.path.join(_ROOT, "forkserver", ""))

_GROUPS = "torch.distributed.distributed_c10d"

_path = ""
_installed = False
_started = False
_runs = False
_holder = 0  # the process that has the thread, whose forks don't
_line: Any = None  # the thread's connection to the agent
_ended: Any = None  # a lock that the thread holds
_beats = 0
_main = 0  # the main thread's number
_wait: tuple[str, int, int, bool] = ("", 0, 0, True)  # a collective in progress: group, number, since when, is exact


def signal_number() -> int:
    """The signal that requests the stacks: one that no program is known to use."""
    number: int = __import__("_signal").SIGRTMIN + 5  # `signal` itself takes milliseconds to import
    return number


def starting_signal() -> int:
    """The signal that starts the thread."""
    return signal_number() + 1


def prepare(path: str, eager: bool) -> None:
    """Get ready for requests; call this in the main thread. `path`: the agent's socket, or "".

    `eager`: start the thread now.
    """
    global _path, _main
    import _thread
    import faulthandler
    import fcntl

    _path = path
    _main = _thread.get_ident()
    signum = signal_number()
    try:
        file = _moved(os.memfd_create(FILE))
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the agent empties it
    except OSError:  # out of descriptors, or not allowed: no signals then
        return
    __import__("_signal").signal(signum, _beat)
    __import__("_signal").signal(starting_signal(), _start_for_debugger)
    faulthandler.register(signum, file)
    __import__("atexit").register(retire)
    if eager:
        start()


def retire() -> None:
    """End the thread and ignore the signals from here on: the interpreter is about to go, which may take long.

    MPI_Finalize, which mpi4py calls at the very end, waits for other ranks. CPython would restore default actions, and
    then its own handler, with no interpreter left to run it: the signal would kill the rank. A thread that is left to
    an interpreter that goes is ended wherever it stands, which can crash the process.
    """
    import faulthandler

    end_thread()
    signal = __import__("_signal")
    signal.signal(starting_signal(), signal.SIG_IGN)
    faulthandler.unregister(signal_number())
    signal.signal(signal_number(), signal.SIG_IGN)


def end_thread() -> None:
    """End the thread, if there is one; from here on the signal is what is left to ask this process by."""
    if _runs and _holder == os.getpid():
        try:
            _line.shutdown(2)  # both ways: it waits there, or sees it after what it does now
        except OSError:  # the agent is gone
            pass
        _ended.acquire(timeout=1)


def _moved(fd: int) -> int:
    """Move the descriptor to a high number."""
    import fcntl

    try:
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
        except OSError:  # above the limit on open files
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _beat(*_: object) -> None:
    global _beats
    _beats += 1


def _start_for_debugger(*_: object) -> None:
    import threading  # noqa: F401  # takes the thread that first imports it for the main one

    start()


def install() -> bool:
    """Start the thread with the first process group. Returns False as long as torch.distributed is not imported."""
    global _installed
    groups: Any = sys.modules.get(_GROUPS)
    # Before `destroy_process_group` is defined, torch is still importing the module.
    if _installed or not hasattr(groups, "destroy_process_group"):
        return _installed
    _installed = True
    check = getattr(groups, "_check_valid_timeout", None)  # called whenever a group is created
    if check is None:
        return True

    def check_valid_timeout(timeout: object) -> object:
        from . import milestones

        start()
        milestones.reach("group")
        return check(timeout)

    groups._check_valid_timeout = check_valid_timeout
    return True


def start() -> bool:
    """Start the thread, once per process; forks don't have it. Returns whether there is one."""
    global _started, _runs, _holder, _line, _ended
    if _started or not _path:
        return _runs
    import _thread

    _started = True
    _ended = _thread.allocate_lock()
    _ended.acquire()
    try:
        _line = _connected(_path)
        _thread.start_new_thread(_serve, (_line, _ended))
    except (OSError, RuntimeError):  # out of descriptors or threads, or nobody listens
        return False
    _runs, _holder = True, os.getpid()
    if sys.version_info >= (3, 12):
        os.register_at_fork(before=_before_fork)
    return True


def _before_fork() -> None:
    """Have no warning of our thread: Python 3.12 and later warn of a fork where there is a thread beside the main one.

    Where the program has one of its own, they do.
    """
    import warnings

    text = rf"This process \(pid={os.getpid()}\) is multi-threaded"
    try:
        ours_alone = os.getpid() == _holder and len(os.listdir("/proc/self/task")) == 2
    except OSError:
        ours_alone = False
    if ours_alone:  # again each time, because the program may have put filters before it
        warnings.filterwarnings("ignore", text, DeprecationWarning)
    else:
        filters: Any = warnings.filters
        filters[:] = [one for one in filters if getattr(one[1], "pattern", "") != text]


def _connected(path: str) -> Any:
    import _socket  # `socket` takes milliseconds to import

    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        opened = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        line = _socket.socket(fileno=_moved(opened.detach()))
        # Via /proc, because a socket's path is limited to 107 bytes.
        line.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    line.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 2 * MOST_BYTES)
    return line


def _serve(line: Any, ended: Any) -> None:
    try:
        _answer(line)
    finally:
        ended.release()


def _answer(line: Any) -> None:
    import _thread
    import json
    import zlib

    while True:
        try:
            message = line.recv(1000)
            if not message:
                return
            try:
                request = json.loads(message)
                if "debug" in request:
                    from . import debugger

                    line.send(
                        zlib.compress(
                            json.dumps({"debugger": debugger.listen(request["debug"], starting_signal())}).encode()
                        )
                    )
                    continue
                if "sample" in request:
                    line.send(zlib.compress(json.dumps({"sample": request["sample"], **sample()}).encode(), 1))
                    continue
                if "entered" in request:
                    line.send(zlib.compress(json.dumps(entered()).encode(), 1))
                    continue
                everything = request["all"]
                answer = {"number": request["number"], "thread": _thread.get_native_id(), "beats": _beats}
                answer["threads"] = threads(everything)
                answer["collectives"] = known = collectives(everything)
                if everything:
                    from . import alone, exceptions

                    known["alone"] = alone.is_alone(_main, _thread.get_ident())
                    known["raising"] = exceptions.under_way(_main)
                    answer["awaits"] = awaited()
            except Exception as error:
                answer = {"number": -1, "problem": f"{type(error).__name__}: {error}"[:200]}
            data = zlib.compress(json.dumps(answer).encode(), 1)
            if len(data) > MOST_BYTES:
                answer["threads"] = answer["threads"][:1]
                answer["collectives"] |= {"entries": [], "raising": {}}
                answer["awaits"] = {}
                data = zlib.compress(json.dumps(answer).encode(), 1)
            line.send(data)
        except OSError:
            return
        _beat_later()


def _beat_later() -> None:
    """Have the main thread count a beat when it next runs Python code. This interrupts no system call."""
    import _thread

    try:
        _thread.interrupt_main(signal_number())  # type: ignore[arg-type]
    except Exception:  # the interpreter is shutting down
        pass


def threads(everything: bool) -> list[Any]:
    """The stacks of the main thread and, with `everything`, then of all other threads; innermost frame first."""
    import _thread

    own = _thread.get_ident()
    active = getattr(sys.modules.get("threading"), "_active", {})
    found = []
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != _main):
        if number == own or (number != _main and not everything):
            continue
        frames: list[list[object]] = []
        place = frame
        while place is not None and len(frames) < FRAMES:
            code = place.f_code
            if not code.co_filename.startswith(_OURS):
                frames.append([code.co_filename, place.f_lineno or 0, code.co_name])
            place = place.f_back  # type: ignore[assignment]
        found.append({"name": getattr(active.get(number), "name", hex(number)), "frames": frames})
        del frame, place
    return found[:THREADS]


def awaited() -> dict[str, Any]:
    """What the main thread waits for; {} if unknown."""
    from . import awaits

    try:
        return awaits.awaited(_main)
    except Exception:  # objects of the program, or of other versions of libraries
        return {}


def sample() -> dict[str, Any]:
    """The main thread's frames, the collective in progress and since when it is, and the GPUs that are used."""
    return {
        "frames": threads(False)[0]["frames"],
        "mpi": "mpi4py" in sys.modules,
        "wait": _waits_in(),
        "gpus": _gpus(),
    }


def entered() -> dict[str, Any]:
    """The collectives that were entered since the last time, and the time to which theirs relate."""
    import time

    from . import collective_times

    now = time.monotonic_ns()
    return {"entered": collective_times.news_if_due(now), "now": now}


def _waits_in() -> list[float] | None:
    """The number of a collective that this rank has entered and not completed, and since how many seconds."""
    global _wait
    import time

    entry = next((entry for entry in _entries(False) if not entry["done"]), None)
    if entry is None:
        return None
    now = time.time_ns()
    group, number, since, exact = _wait
    if (group, number) != (entry["group"], entry["number"]):
        group, number, since, exact = entry["group"], entry["number"], now, False
    elif not exact:  # it was there at the last sample: now it is worth while to look up when it began
        since, exact = min(since, _begun(group, number) or since), True
    _wait = (group, number, since, exact)
    return [number, (now - since) / 1e9]


def _begun(group: str, number: int) -> int:
    """When a collective was entered, by torch's flight recorder, in ns since 1970; 0 if unknown."""
    if not group.startswith("#"):  # one of launchpad's mpi frontend
        return 0
    from . import flight_recorder

    times = [
        int(entry["time_created_ns"])
        for entry in flight_recorder.entries(active=True)
        if entry["collective_seq_id"] == number and not entry["is_p2p"] and not entry["retired"]
    ]
    return min(times, default=0)


def _gpus() -> list[str]:
    """The UUIDs of the GPUs on which torch has allocated memory."""
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return []
    used = [device for device in range(cuda.device_count()) if cuda.memory_reserved(device)]
    return [f"GPU-{cuda.get_device_properties(device).uuid}" for device in used]


def collectives(everything: bool) -> dict[str, Any]:
    """What is known about collectives: `counts` by group; with `everything`, the last `entries` and the `groups`."""
    entries = _entries(everything)
    counts: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for entry in entries:
        counts[entry["group"]] = max(counts.get(entry["group"], 0), entry["number"])
        waiting[entry["group"]] = waiting.get(entry["group"], 0) + (not entry["done"])
    if not everything:
        return {"counts": counts, "waiting": sum(waiting.values())}
    by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_group.setdefault(entry["group"], []).append(entry)
    kept = [entry for group in by_group.values() for entry in group[-TAIL:]]
    return {"counts": counts, "waiting": sum(waiting.values()), "entries": kept, "groups": _groups()}


def _entries(everything: bool) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for read in (_of_torch, _of_mpi):
        try:
            entries += read(everything)
        except Exception:  # another version of torch: report stacks only
            continue
    return entries


def _groups() -> dict[str, Any]:
    """The description and the members' ranks of each group, by name."""
    from . import groups

    return {
        name: [str(getattr(group, "group_desc", "")), groups.in_steps(ranks)] for group, name, ranks in groups.known()
    }


def _of_torch(everything: bool) -> list[dict[str, Any]]:
    """Entries from torch's flight recorder; without `everything`, only the last one of each group, without frames."""
    if _GROUPS not in sys.modules:
        return []
    from . import flight_recorder

    found: list[dict[str, Any]] = []
    if not everything:
        dumped = flight_recorder.dumps(False, False, False)
        for place, group in (row for one in dumped for row in (one.get("pg_status") or {}).items()):
            number, done = int(group["last_enqueued_collective"]), int(group["last_completed_collective"])
            found.append({"group": f"#{place}", "number": number, "done": done >= number})
        return found
    with _NoInductor():
        entries = list(flight_recorder.entries(frames=True))
    for entry in entries:
        if entry["is_p2p"]:
            continue
        frames = [[one["filename"], one["line"], one["name"]] for one in entry["frames"][:ENTRY_FRAMES]]
        found.append(
            {
                "group": str(entry["process_group"][0]),
                "number": entry["collective_seq_id"],
                "what": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
                "sizes": entry["input_sizes"],
                "types": list(entry["input_dtypes"]),
                "done": bool(entry["retired"]) or entry["state"] == "completed",
                "frames": frames,
            }
        )
    return found


class _NoInductor:
    """Replaces `torch._inductor` by an empty stand-in for this thread during a dump, unless it is already loaded.

    torch looks there for the source of generated code, and would import all of it: seconds, and 100 MB.
    """

    def __enter__(self) -> None:
        import _thread

        self._torch = vars(sys.modules["torch"])
        own = _thread.get_ident()

        class StandIn:
            def __getattr__(self, name: str) -> object:
                if _thread.get_ident() == own:
                    raise AttributeError(name)
                import importlib

                return getattr(importlib.import_module("torch._inductor"), name)

        self._stand_in = None if "_inductor" in self._torch else StandIn()
        if self._stand_in is not None:
            self._torch["_inductor"] = self._stand_in

    def __exit__(self, *_: object) -> None:
        if self._stand_in is not None and self._torch.get("_inductor") is self._stand_in:
            del self._torch["_inductor"]


def _of_mpi(everything: bool) -> list[dict[str, Any]]:
    recorder: Any = sys.modules.get("launchpad.collectives.mpi.recorder")
    return [] if recorder is None else list(recorder.entries(everything))
