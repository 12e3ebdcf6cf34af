"""GitHub annotations: a workflow command that makes Actions show the error at the failing line. Pure.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions#setting-an-error-message
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launchpad.diagnosis.candidates import Candidate
from launchpad.diagnosis.history import History
from launchpad.diagnosis.tracebacks import Frame
from launchpad.diagnosis.verdict import Verdict
from launchpad.diagnosis.verdict_json import place_of


def annotation(history: History, verdict: Verdict, lines: Sequence[str], environ: Mapping[str, str]) -> str:
    """`::error file=…,line=…,title=…::…`; without file and line if the failure is not in the workspace."""
    title, _, _ = lines[0].partition(" (") if lines else ("", "", "")
    properties = {}
    place = _in_workspace(history, verdict.cause, environ) if verdict.cause else None
    if place is not None:
        properties = {"file": place[0], "line": str(place[1])}
    properties["title"] = title
    said = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {said}::{_data(chr(10).join(lines))}"


def _in_workspace(history: History, cause: Candidate, environ: Mapping[str, str]) -> tuple[str, int] | None:
    workspace = environ.get("GITHUB_WORKSPACE", "")
    if not workspace:
        return None
    frames: list[Frame] = list(cause.traceback.frames[::-1]) if cause.traceback else []
    place = place_of(cause)
    for frame in [place, *frames] if place else frames:
        path = os.path.join(history.planned.cwd, frame.file)
        for base in {workspace, os.path.realpath(workspace)}:
            relative = os.path.relpath(path, base)
            if frame.own and not relative.startswith("..") and not frame.file.startswith("<"):
                return relative, frame.line
    return None


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
