"""GitHub annotations: the failing line, as a workflow command that Actions shows at the place. Pure.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions#setting-an-error-message
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launchpad.report.accounts import Frame
from launchpad.report.conclusion import place_of
from launchpad.report.story import Story
from launchpad.report.suspects import Suspect
from launchpad.report.verdict import Verdict


def annotation(story: Story, verdict: Verdict, lines: Sequence[str], environ: Mapping[str, str]) -> str:
    """`::error file=…,line=…,title=…::…`; without file and line where the failure is at none in the workspace."""
    title, _, _ = lines[0].partition(" (") if lines else ("", "", "")
    properties = {}
    place = _in_workspace(story, verdict.cause, environ) if verdict.cause else None
    if place is not None:
        properties = {"file": place[0], "line": str(place[1])}
    properties["title"] = title
    said = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {said}::{_data(chr(10).join(lines))}"


def _in_workspace(story: Story, cause: Suspect, environ: Mapping[str, str]) -> tuple[str, int] | None:
    workspace = environ.get("GITHUB_WORKSPACE", "")
    if not workspace:
        return None
    frames: list[Frame] = list(cause.account.frames[::-1]) if cause.account else []
    place = place_of(cause)
    for frame in [place, *frames] if place else frames:
        path = os.path.join(story.planned.cwd, frame.file)
        for base in {workspace, os.path.realpath(workspace)}:
            relative = os.path.relpath(path, base)
            if frame.own and not relative.startswith("..") and not frame.file.startswith("<"):
                return relative, frame.line
    return None


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
