"""Says what a command that failed has written, or where that went, for an exception of subprocess's."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# So much of the end of it is told.
MOST_TEXT = 4096

# Values of subprocess.STDOUT and subprocess.DEVNULL, which may not be imported.
_STDOUT, _DEVNULL = -2, -3


def said(error: BaseException) -> dict[str, str]:
    """`printed` and `printed_to`: the end of what the command wrote, and its stream or file.

    `shared`: the stream of this process to which its error messages went; they are among what this process wrote.
    `printed_to` is "nowhere" if nobody can read them. {} if this is no such exception.
    """
    if type(error).__module__ != "subprocess" or not hasattr(error, "cmd"):
        return {}
    errors, output = _text(getattr(error, "stderr", None)), _text(getattr(error, "output", None))
    if errors:
        return {"printed": errors, "printed_to": "stderr"}
    known = {"printed": output, "printed_to": "stdout"} if output else {}
    given = _options(error)
    if given is None:  # the program raised it by itself
        return {**known, "shared": "stderr"}
    target, stream = given.get("stderr"), "stderr"
    if target == _STDOUT:
        target, stream = given.get("stdout"), "stdout"
    if given.get("capture_output") or target == -1:  # a pipe, on which nothing came
        return known
    if target is None:
        return {**known, "shared": stream}
    if target == _DEVNULL:
        return known or {"printed_to": "nowhere"}
    path, text = _of_file(target)
    return {"printed": text, "printed_to": path} if text else known


def _options(error: BaseException) -> dict[str, Any] | None:
    """What subprocess.run or check_call was given, from the variables of its frame."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__") == "subprocess" and isinstance(frame.f_locals.get("kwargs"), dict):
            captures = {"capture_output": frame.f_locals.get("capture_output", False)}
            found: dict[str, Any] = frame.f_locals["kwargs"] | captures
            if frame.f_code.co_name != "check_output":  # which calls run
                return found
        trace = trace.tb_next
    return None


def _text(printed: Any) -> str:
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else str(printed or "")
    return text[-MOST_TEXT:]


def _of_file(target: Any) -> tuple[str, str]:
    """The path of a file that was given for a stream, and its end; empty if it can't be read any more."""
    path = getattr(target, "name", target)
    try:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return "", ""
            file.seek(max(0, found.st_size - MOST_TEXT))
            return str(path), file.read(MOST_TEXT).decode(errors="replace")
    except (OSError, TypeError, ValueError):
        return "", ""
