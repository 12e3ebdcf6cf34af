"""Finds the cause of a failure in what a launcher inside the rank has said: torchrun, launchpad, pytest, … Pure."""

from __future__ import annotations

import itertools
import re

from launchpad.diagnosis import secondary, tracebacks
from launchpad.diagnosis.tracebacks import Traceback

# What only says that a process has failed.
_OF_A_CHILD = ("ChildFailedError", "CalledProcessError")

# Where an uncaught exception of a program's main thread begins: in a script, and with `-m`.
_OUTERMOST = ("<module>", "_run_module_as_main")

_TORCHRUN = re.compile(
    r"Root Cause.*?rank +: (?P<rank>\d+).*?exitcode +: (?P<code>-?\d+).*?traceback +: (?P<text>.*)", re.DOTALL
)
_LAUNCHPAD = re.compile(r"^launchpad: (?P<who>rank \d+.*?) failed first: (?P<how>.*?)(?: \([^()]*\))?$", re.MULTILINE)
_EVIDENCE = re.compile(r"^launchpad:(?:     | *$)")  # before each line that the verdict shows of the rank
_PYTEST = re.compile(r"^(?:FAILED|ERROR) (?P<test>\S+(?:\[.*?\])?)(?: - (?P<how>.*))?$", re.MULTILINE)
_PYTEST_ENDED = re.compile(r"^=+ .*\b(?:failed|errors?)\b.* in [\d.]+s.* =+$", re.MULTILINE)


def cause_inside(ended: Traceback | None, errors: str, output: str) -> Traceback | None:
    """The exception with which a rank ended, with what happened inside as its cause; None if nothing is known of that.

    `ended`: the rank's own exception, if any. `errors` and `output`: the last it wrote to stderr and stdout.
    """
    root = ended.roots[0] if ended is not None else None
    if root is not None and root.kind == "ChildFailedError":
        return _of_torchrun(root, errors)
    if root is not None and root.kind == "CalledProcessError":
        # If it was not captured, it is in the rank's output, before the rank's own traceback.
        said = root.printed or tracebacks.before_report(errors, root)
        child = tracebacks.ending(said, 1)
        if said == errors and child is not None and child.roots[0].kind == root.kind:
            child = None  # it is the same
        found = cause_inside(child, said, output) or next(reversed(_own(said)), None)
        known = found is None or found.inside or root.printed or _is_of_child(found, root)
        return _with_cause(root, found) if known else None
    if root is not None and root.kind != "SystemExit":
        return None
    return _of_launchpad(errors) or _of_pytest(output)


def _of_torchrun(ended: Traceback, errors: str) -> Traceback:
    said = _TORCHRUN.search(ended.message)
    if said is None:
        return ended
    inside = f"rank {said['rank']} of the torchrun that it ran"
    marked = "\n".join(line for line in tracebacks.lines_of(errors) if line.startswith(f"[rank{said['rank']}]:"))
    found = tracebacks.from_text(said["text"]) or tracebacks.from_text(marked) or next(iter(_own(errors)), None)
    if found is None:
        code = int(said["code"])
        found = Traceback("", tracebacks.lines_of(said["text"])[0] if code < 0 else f"exit code {code}")
    return Traceback("", "torchrun failed", before=found, is_cause=True, inside=inside)


def _of_launchpad(errors: str) -> Traceback | None:
    """The verdict of a launchpad, if that is the last that was said."""
    said = list(_LAUNCHPAD.finditer(errors))
    rest = tracebacks.lines_of(errors[said[-1].end() :])[1:] if said else []
    if not said or any(not line.startswith("launchpad: ") for line in rest if line.strip()):
        return None
    shown = itertools.takewhile(_EVIDENCE.match, rest)  # what follows is about other ranks, and where the logs are
    inner = tracebacks.from_text("\n".join(_EVIDENCE.sub("", line) for line in shown))
    found = inner if inner is not None and said[-1]["how"].startswith(inner.type) else _titled(said[-1]["how"])
    inside = f"{said[-1]['who']} of the launchpad that it ran"
    return Traceback("", "launchpad run failed", before=found, is_cause=True, inside=inside)


def _of_pytest(output: str) -> Traceback | None:
    said = _PYTEST.search(output)
    if said is None or not _PYTEST_ENDED.search(output, said.end()):
        return None
    found = _titled(said["how"] or "failed")
    return Traceback("", "pytest failed", before=found, is_cause=True, inside=said["test"])


def _titled(title: str) -> Traceback:
    kind, colon, message = title.partition(": ")
    return Traceback(kind, message) if colon and kind.replace(".", "").isidentifier() else Traceback("", title)


def _own(errors: str) -> list[Traceback]:
    """The tracebacks with which the output ends; without those that are mere consequences, if there are others."""
    if tracebacks.ending(errors, 1) is None:
        return []
    found = [one for one in tracebacks.all_in(errors) if one.roots[0].kind not in _OF_A_CHILD]
    return [one for one in found if not secondary.secondary_kind(one)] or found


def _is_of_child(found: Traceback, ended: Traceback) -> bool:
    """Whether a traceback that was printed ended another program, and is not one that this one had handled before."""
    if not found.frames or found.frames[0].function not in _OUTERMOST:
        return False
    return not ended.frames or found.frames[0].file != ended.frames[0].file


def _with_cause(ended: Traceback, found: Traceback | None) -> Traceback | None:
    if found is None:
        return None
    if found.inside:  # it is known which part of the child failed
        return ended._replace(before=found.before, is_cause=True, inside=found.inside)
    return ended._replace(before=found, is_cause=True, inside="the command that it ran")
