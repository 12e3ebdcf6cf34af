"""What CI systems show of a job besides its log: the end of each rank's output in a section, and GitHub's summary page.

What ranks print can't forge a command there: each line stands behind its rank, without control characters.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
https://docs.gitlab.com/ci/jobs/job_logs/#custom-collapsible-sections
https://www.jetbrains.com/help/teamcity/service-messages.html
https://buildkite.com/docs/pipelines/configure/managing-log-output
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from launchpad.diagnosis.history import History
from launchpad.diagnosis.output_tail import OutputTail
from launchpad.diagnosis.verdict import Verdict
from launchpad.job.outcome import exit_in_words
from launchpad.protocol.printable import printable

CiSystem = Literal["", "github", "gitlab", "teamcity", "buildkite"]

# How much of each rank's end is shown, and of how many ranks.
LAST_BYTES = 16 << 10
LAST_LINES = 50
MOST_RANKS = 64

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def system_of(environ: Mapping[str, str]) -> CiSystem:
    """The CI system that the environment says this is."""
    if environ.get("GITHUB_ACTIONS") == "true":
        return "github"
    if environ.get("GITLAB_CI") == "true":
        return "gitlab"
    if environ.get("TEAMCITY_VERSION"):
        return "teamcity"
    return "buildkite" if environ.get("BUILDKITE") == "true" else ""


def last_lines(tail: OutputTail) -> list[str]:
    """A rank's last lines, of each progress bar the last state, fit to be shown."""
    end = tail.last(LAST_BYTES)
    lines = end.decode(errors="replace").removesuffix("\n").split("\n") if end else []
    if len(end) < tail.written and len(lines) > 1:
        del lines[0]  # its beginning is missing
    return [_harmless(line.rstrip("\r").rpartition("\r")[2]) for line in lines[-LAST_LINES:]]


def sections(system: CiSystem, history: History, verdict: Verdict) -> list[str]:
    """The lines of the log that show the end of each rank in a section; the rank that failed first comes first."""
    blamed = verdict.cause.rank if verdict.cause else -1
    found: list[str] = []
    for rank in sorted(history.ranks, key=lambda rank: (rank != blamed, rank))[:MOST_RANKS]:
        who = f"{history.role(rank)} {history.own_rank(rank)}".strip()
        lines = [f"[{who}] {line}" for line in last_lines(history.of(rank).tail)]
        title = printable(f"{history.name(rank)}: {_ended(history, rank)}")
        found += _section(system, f"launchpad_rank_{rank}", title, lines) if lines else []
    if found and system == "buildkite":
        found.append("+++ launchpad")  # ends the last section, and is open itself
    return found


def _section(system: CiSystem, name: str, title: str, lines: list[str]) -> list[str]:
    now = int(time.time())
    match system:
        case "github":
            return [f"::group::{title}", *lines, "::endgroup::"]
        case "gitlab":
            begin = f"\x1b[0Ksection_start:{now}:{name}[collapsed=true]\r\x1b[0K{title}"
            return [begin, *lines, f"\x1b[0Ksection_end:{now}:{name}\r\x1b[0K"]
        case "teamcity":
            said = re.sub(r"['|\[\]]", r"|\g<0>", title)
            return [f"##teamcity[blockOpened name='{said}']", *lines, f"##teamcity[blockClosed name='{said}']"]
        case "buildkite":
            return [f"--- {title}", *lines]
        case "":
            return []


def page(history: History, verdict: Verdict, lines: Sequence[str], code: int, job: str = "") -> str:
    """The job on GitHub's summary page, in Markdown; `job` is its name in a job file."""
    planned = history.planned
    name = job or " ".join(planned.words[:2] if planned.words[:1] == ["-m"] else planned.words[:1])
    text = "\n".join(lines)
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    parts = [f"### launchpad: {_plain(name)}: " + (f"exit code {code}" if code else "passed")]
    if lines:
        parts.append(f"{fence}text\n{text}\n{fence}")
    ranks = sorted(history.ranks)
    rows = [[str(history.own_rank(rank)), *_cells(history, verdict, rank)] for rank in ranks]
    table = [["rank", "host", "ended", "", "seconds", "memory"], ["---:", "---", "---", "---", "---:", "---:"], *rows]
    if roles := [history.role(rank) for rank in ranks if history.role(rank)]:
        table = [[role, *row] for role, row in zip(["role", "---", *map(_plain, roles)], table, strict=True)]
    parts.append("\n".join(f"| {' | '.join(row)} |" for row in table))
    return "\n\n".join(parts) + "\n\n"


def write_page(path: str, text: str) -> str:
    """Add to GitHub's summary page. Returns an error message, or ""."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        return f"GITHUB_STEP_SUMMARY {path}: {error.strerror}; the summary was not written"
    return ""


def _cells(history: History, verdict: Verdict, rank: int) -> list[str]:
    one = history.of(rank)
    end = one.exited.time if one.exited else 0
    seconds = f"{(end - one.started) / 1e9:.1f}" if end and one.started else ""
    memory = f"{one.exited.memory / 2**20:.0f} MiB" if one.exited and one.exited.memory else ""
    return [*map(_plain, (history.host(one.node), _ended(history, rank), _role(verdict, rank))), seconds, memory]


def _ended(history: History, rank: int) -> str:
    one = history.of(rank)
    if rank in history.never_started:
        return "not started"
    if one.exited is not None:
        return exit_in_words(one.exited.code)
    if one.not_started is not None or not one.started:
        return "not started"
    return "lost" if one.node in history.lost else "running"


def _role(verdict: Verdict, rank: int) -> str:
    if verdict.cause is not None and verdict.cause.rank == rank:
        return "failed first" if verdict.kind == "failure" else "the cause"
    if rank in verdict.early:
        return "left early"
    if rank in (*verdict.close, *verdict.alike, *verdict.failed_too):
        return "failed too"
    if rank in verdict.stopped:
        return "stopped by launchpad"
    return next((f"victim: {one.why}" for one in verdict.victims if one.rank == rank), "")


def _harmless(line: str) -> str:
    return printable(_COLOUR.sub("", line).expandtabs())


def _plain(text: str) -> str:
    """A text that Markdown shows as it is."""
    return re.sub(r"[\\`*_\[\]<>|~&]", r"\\\g<0>", printable(text))
