"""Records what ends a Python rank, in two private files next to its `TORCHELASTIC_ERROR_FILE`.

RANK.raised: a line of JSON for each uncaught exception. RANK.crash: the stacks that faulthandler writes on SIGSEGV,
SIGABRT, SIGBUS, SIGFPE or SIGILL. The program's own output and hooks are not affected.

Every Python rank loads this at start-up, so what only a failure needs is imported then.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all the rest of an interpreter's start
if TYPE_CHECKING:
    from typing import Any

# Limits per exception: frames (both ends of a deep stack), links of a chain, members of a group, characters.
MOST_FRAMES = 40
MOST_LINKS = 8
MOST_MEMBERS = 8
MOST_KEPT = 4
MOST_TEXT = 4096
MOST_SOURCE = 200

# When there is this much, no more exceptions of threads and children are recorded. The agent reads up to 1 MiB.
MOST_BYTES = 1 << 18

# High, so that the first file that the program opens is 3, as under plain Python.
_OUR_FD = 200

_prefix = ""
_pid = 0  # of the rank, whose children may raise too


def begin() -> None:
    """Start recording, if there is a place for the files."""
    global _prefix, _pid
    _pid = os.getpid()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path.endswith(".error.json"):
        return
    _prefix = path.removesuffix(".error.json")
    try:
        _watch_threads()
        _watch_crashes()
    except Exception:  # best effort: a minimal build of Python, a full disk
        pass


def _watch_crashes() -> None:
    import faulthandler

    if faulthandler.is_enabled():  # by the user: it writes to stderr, where we read it
        return
    fd = os.open(f"{_prefix}.crash", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.fstat(_OUR_FD)
    except OSError:  # it is free
        try:
            os.dup2(fd, _OUR_FD, inheritable=False)
        except OSError:  # above the limit on open files
            pass
        else:
            os.close(fd)
            fd = _OUR_FD
    faulthandler.enable(fd)


def _watch_threads() -> None:
    import _thread

    plain = _thread._excepthook

    def _excepthook(args: Any, /) -> None:
        if args.exc_type is not SystemExit:
            keep(args.exc_value, thread=getattr(args.thread, "name", None) or "a thread")
        plain(args)

    threading: Any = sys.modules.get("threading")
    if threading is None:  # threading will take its hook from _thread when it is imported
        _thread._excepthook = _excepthook
    elif threading.excepthook is threading.__excepthook__:
        threading.excepthook = threading.__excepthook__ = _excepthook


def is_success(code: object) -> bool:
    """Whether sys.exit with this ends a program with 0. What is no integer is printed, and ends it with 1."""
    return code is None or (isinstance(code, int) and code == 0)


def keep(error: BaseException | None, thread: str = "", ours: tuple[str, ...] = ()) -> None:
    """Record an exception. `ours`: files whose frames above the program's are left out. Never raises."""
    if not _prefix or error is None:
        return
    if isinstance(error, SystemExit) and is_success(error.code):
        keep_end()
        return
    _write(error, thread, ours)


def keep_last(error: BaseException, ours: tuple[str, ...] = ()) -> None:
    """Record an exception that was caught, and nothing after it: the SystemExit that follows tells nothing new."""
    global _prefix
    keep(error, ours=ours)
    _prefix = ""


def keep_end() -> None:
    """Record that the program has ended normally, if others may still wait for it.

    Without this record, their failures would be the first that are known, and one of them would be blamed.
    """
    if _prefix and "torch.distributed" in sys.modules:
        _write(SystemExit(0), "", ())


def _write(error: BaseException, thread: str, ours: tuple[str, ...]) -> None:
    for _ in range(2):  # a signal handler of the program may raise in here, as torch's does when a worker has died
        try:
            line = _line(error, thread, ours)
            fd = os.open(f"{_prefix}.raised", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                is_main = not thread and os.getpid() == _pid
                if is_main or os.fstat(fd).st_size < MOST_BYTES:  # a thread pool may fail for ever
                    os.write(fd, line)
            finally:
                os.close(fd)
            return
        except BaseException:  # no memory, a __str__ that raises …: must not fail the program
            pass


def _line(error: BaseException, thread: str, ours: tuple[str, ...]) -> bytes:
    import json
    import time

    now = time.monotonic_ns()
    traceback = _traceback(error, ours, MOST_LINKS)
    said = {"time": now, "pid": os.getpid(), "thread": thread, "traceback": traceback}
    if thread or os.getpid() != _pid:
        return json.dumps(said).encode() + b"\n"
    if not (isinstance(error, SystemExit) and is_success(error.code)):
        from . import killed_child

        traceback["killed_child"] = killed_child.by_sigkill()
    if "torch.distributed" in sys.modules:
        traceback["kept"] = _kept(error)
        said |= _collectives(now)
    return json.dumps(said).encode() + b"\n"


def _collectives(now: int) -> dict[str, Any]:
    from . import collective_times, milestones

    try:
        said: dict[str, Any] = {"entered": collective_times.last_news(now)}
        if "LAUNCHPAD_TIMELINE" in os.environ:
            said["milestones"] = milestones.reached
            said["collectives"] = collective_times.entered(now)
    except Exception:  # another version of torch
        return {}
    return said


def under_way(thread: int) -> dict[str, Any]:
    """The exception that this thread is handling, or is on its way out with; {} if there is none."""
    active: Any = sys._current_exceptions().get(thread)
    error = active[1] if isinstance(active, tuple) else active  # a tuple before Python 3.12
    if error is None:
        return {}
    return _traceback(error, (), MOST_LINKS) | ({"kept": _kept(error)} if "torch.distributed" in sys.modules else {})


def _kept(error: BaseException) -> list[dict[str, Any]]:
    """The exceptions that the program caught and still holds, outside of this one's chain.

    A program that lost another rank may note that, and raise its own exception later. Torch and mpi4py raise
    RuntimeErrors.
    """
    import gc

    chain: dict[int, BaseException] = {}
    links: list[BaseException | None] = [error]
    while links:
        one = links.pop()
        if one is not None and id(one) not in chain:
            chain[id(one)] = one
            links += [one.__cause__, one.__context__, *_members(one)]
    try:
        # Not isinstance, which would run the code of objects that stand for others.
        alive = [one for one in gc.get_objects() if issubclass(type(one), RuntimeError) and id(one) not in chain]
    except MemoryError:
        return []
    return [_traceback(one, (), 1) for one in [one for one in alive if one.__traceback__][:MOST_KEPT]]


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Those of a group."""
    members = getattr(error, "exceptions", None)
    return members if isinstance(members, tuple) and hasattr(error, "derive") else ()


def _traceback(error: BaseException, ours: tuple[str, ...], links: int) -> dict[str, Any]:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    found: dict[str, Any] = {
        "type": module + kind.__qualname__,
        "bases": [base.__name__ for base in kind.__mro__[1:-1]],
        "message": _text(error),
        "frames": _frames(error, ours),
    }
    from . import killed_child, misled

    if why := killed_child.explain(error) or misled.explain(error):
        found["why"] = why
    if kind is ModuleNotFoundError:
        from . import interpreter

        found["seeker"] = interpreter.seeker()
    if kind.__module__ == "subprocess":
        from . import failed_command

        found |= failed_command.said(error)
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        found["notes"] = [str(note)[:MOST_TEXT] for note in notes[:MOST_MEMBERS]]
    members = _members(error)
    if links and members:
        found["group"] = [_traceback(one, ours, links - 1) for one in members[:MOST_MEMBERS]]
        found["members"] = len(members)
    cause, context = error.__cause__, error.__context__
    if links and cause is not None:
        found["cause"] = _traceback(cause, ours, links - 1)
    if links and context is not None and context is not cause:
        if error.__suppress_context__:  # half as many links, or there would be 2 ** MOST_LINKS
            found["hidden"] = _traceback(context, ours, links // 2)
        else:
            found["context"] = _traceback(context, ours, links - 1)
    return found


def _text(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return str(error.msg)
    try:
        text = str(error)
    except Exception:
        return "<can't be shown: its __str__ raises>"
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT // 2]} … {text[-MOST_TEXT // 2 :]}"


def _frames(error: BaseException, ours: tuple[str, ...]) -> list[list[Any]]:
    import linecache

    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename not in ours:
            places.append((code.co_filename, trace.tb_lineno, code.co_name, trace.tb_frame.f_globals))
        trace = trace.tb_next
    if len(places) > MOST_FRAMES:
        places[MOST_FRAMES // 2 : -MOST_FRAMES // 2] = []
    found: list[list[Any]] = []
    for name, line, function, space in places:
        source = linecache.getline(name, line or 0, space).strip()[:MOST_SOURCE]
        found.append([name, line or 0, function, source])
    if isinstance(error, SyntaxError) and error.filename:
        found.append([error.filename, error.lineno or 0, "", (error.text or "").strip()[:MOST_SOURCE]])
    return found
