"""In a rank: what answers when somebody asks where it is, also while its program waits in C++ or in MPI.

Three things, none of which costs anything until it is asked:
- a thread, begun with the first process group (the launcher may ask for it from the start), tells by a Unix socket of
  the agent where all threads are, and which collectives this rank has entered: torch's own flight recorder and the mpi
  frontend's know. C code that waits has let go of the GIL, as a rule;
- where there is no such thread, or C code keeps the GIL, faulthandler's C code writes the stacks to a memory file of
  ours when a signal comes. It needs nothing, but interrupts a system call that is under way (poll, connect …);
- a Python handler of the same number, which the interpreter runs between two bytecodes, counts: what has been counted
  since the last question tells whether the main thread has left C code. No signal is sent for this.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# The agent finds the file among the rank's descriptors by its name: a program that has closed it is not asked.
FILE = "launchpad-stacks"
# Programs expect the low numbers to be free.
LOWEST = 250

# The last collectives of each group that are told, and the frames of each; the threads, and the frames of each.
TAIL = 40
ENTRY_FRAMES = 12
THREADS = 100
FRAMES = 100

# What the agent takes in one message.
MOST_BYTES = 150_000

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep

_GROUPS = "torch.distributed.distributed_c10d"

_path = ""
_begun = False
_beats = 0
_main = 0  # the main thread's number


def signal_number() -> int:
    """The signal that asks for the stacks: one that no program is known to use."""
    number: int = __import__("_signal").SIGRTMIN + 5  # `signal` itself takes milliseconds to import
    return number


def prepare(path: str, eager: bool) -> None:
    """Be ready to be asked; to be called by the main thread. `path`: of the agent's socket; "" for none.

    `eager`: begin the thread now.
    """
    global _path, _main
    import _thread
    import faulthandler

    _path = path
    _main = _thread.get_ident()
    signum = signal_number()
    try:
        opened = os.memfd_create(FILE)
        try:
            file = _moved(opened)
        finally:
            os.close(opened)
    except OSError:  # no descriptor is left, or a kernel forbids it: then nobody can ask
        return
    __import__("_signal").signal(signum, _beat)
    faulthandler.register(signum, file)
    if eager:
        begin()


def _moved(fd: int) -> int:
    import fcntl

    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    except OSError:  # the limit of open files is lower than that
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    fcntl.fcntl(moved, fcntl.F_SETFL, os.O_APPEND)  # the agent empties it
    return moved


def _beat(*_: object) -> None:
    global _beats
    _beats += 1


def install() -> None:
    """Begin the thread with the first process group, in a process that has imported torch.distributed, or its fork."""
    groups: Any = sys.modules.get(_GROUPS)
    check = getattr(groups, "_check_valid_timeout", None)  # every making of a group calls it, and returns from it
    if groups is None or check is None:
        return

    def check_valid_timeout(timeout: object) -> object:
        begin()
        return check(timeout)

    groups._check_valid_timeout = check_valid_timeout


class Watch:
    """Among the finders of modules: it finds none, and installs us when torch.distributed is there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Nothing."""
        # What torch.distributed imports after the module that makes groups.
        if name.startswith("torch.distributed.") and hasattr(sys.modules.get(_GROUPS), "destroy_process_group"):
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            install()


def watch() -> None:
    """The same in a process that may import torch later."""
    sys.meta_path.insert(0, Watch())


def begin() -> None:
    """Begin the thread, once in this process; a fork of it has none."""
    global _begun
    if _begun or not _path:
        return
    import _thread

    _begun = True
    try:
        _thread.start_new_thread(_answer, (_path,))
    except RuntimeError:  # no room for a thread
        pass


def _answer(path: str) -> None:
    import json
    import socket
    import zlib

    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # By way of /proc, as a socket's path may have 107 bytes at most.
        line.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    except OSError:
        return
    finally:
        os.close(folder)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
    while True:
        try:
            asked = line.recv(1000)
            if not asked:
                return
            try:
                request = json.loads(asked)
                everything = request["all"]
                answer = {"number": request["number"], "beats": _beats, "threads": threads(everything)}
                answer |= told(everything)
            except Exception as error:
                answer = {"number": -1, "problem": f"{type(error).__name__}: {error}"[:200]}
            data = zlib.compress(json.dumps(answer).encode(), 1)
            if len(data) > MOST_BYTES:
                answer |= {"entries": [], "threads": answer["threads"][:1]}
                data = zlib.compress(json.dumps(answer).encode(), 1)
            line.send(data)
        except OSError:
            return
        _beat_later()


def _beat_later() -> None:
    """Have the main thread count when it next runs Python code. No system call is interrupted by this."""
    import _thread

    try:
        _thread.interrupt_main(signal_number())  # type: ignore[arg-type]
    except Exception:  # the interpreter is on its way out
        pass


def threads(everything: bool) -> list[Any]:
    """Where this process's Python threads are, the main one first, or alone; each one's innermost frame first."""
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


def told(everything: bool) -> dict[str, Any]:
    """What is known of collectives: `counts` by group, and with `everything` the last `entries` and the `groups`."""
    entries: list[dict[str, Any]] = []
    for read in (_of_torch, _of_mpi):
        try:
            entries += read(everything)
        except Exception:  # another version of torch: the stacks must do
            continue
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


def _groups() -> dict[str, Any]:
    """By name: the description and the members' ranks."""
    module = sys.modules.get(_GROUPS)
    if module is None:
        return {}
    world = module._world
    found = {}
    for group, ranks in world.pg_group_ranks.items():
        description = str(getattr(group, "group_desc", ""))
        found[str(world.pg_names[group])] = [description, sorted(map(int, ranks))]
    return found


def _of_torch(everything: bool) -> list[dict[str, Any]]:
    """From the flight recorder: without `everything` the last of each group, and those under way, without frames."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump: Callable[..., bytes] | None = getattr(module, "_dump_fr_trace", None)
    if dump is None or _GROUPS not in sys.modules:
        return []
    import pickle

    found = []
    if not everything:
        status = pickle.loads(dump(False, False, False)).get("pg_status") or {}
        for place, group in status.items():
            number, done = int(group["last_enqueued_collective"]), int(group["last_completed_collective"])
            found.append({"group": f"#{place}", "number": number, "done": done >= number})
        return found
    with _NoInductor():
        dumped = dump(True, True, False)
    for entry in pickle.loads(dumped).get("entries") or ():
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
    """While we dump, `torch._inductor` is there for us and has nothing, unless it is there already.

    Torch looks there for sources of generated code, and its __getattr__ would import it all: seconds, and 100 MB.
    """

    def __enter__(self) -> None:
        import _thread

        self._torch = vars(sys.modules["torch"])
        own = _thread.get_ident()

        class Stand:
            def __getattr__(self, name: str) -> object:
                if _thread.get_ident() == own:
                    raise AttributeError(name)
                import importlib

                return getattr(importlib.import_module("torch._inductor"), name)

        self._stand = None if "_inductor" in self._torch else Stand()
        if self._stand is not None:
            self._torch["_inductor"] = self._stand

    def __exit__(self, *_: object) -> None:
        if self._stand is not None and self._torch.get("_inductor") is self._stand:
            del self._torch["_inductor"]


def _of_mpi(everything: bool) -> list[dict[str, Any]]:
    recorder: Any = sys.modules.get("launchpad.collectives.mpi.recorder")
    return [] if recorder is None else list(recorder.entries(everything))
