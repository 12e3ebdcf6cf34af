"""`launchpad jobs`: the jobs on record, the latest first."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from launchpad.cli.why import look_at
from launchpad.errors import UsageError
from launchpad.report import shelf
from launchpad.report.telling import in_short


@click.command("jobs", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "--most", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="So many.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(most: int, as_json: bool) -> int:
    """List the jobs that are running, or were run of late: when, how long, how they ended, what they ran."""
    place = shelf.jobs_folder(os.environ)
    rows = [row for name in shelf.jobs(os.environ)[:most] if (row := _row(os.path.join(place, name), name)) is not None]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return 0
    if not rows:
        click.echo(f"there is no record of any job in {place}", err=True)
    for row in rows:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["started"]))
        lasted = "" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        words = _cut(" ".join(row["words"]), 100)  # those of a bench are long
        line = f"{row['job']:<8}  {started}  {lasted:>9}  {row['ranks']:>5} ranks  {row['how']:<28}  {words}"
        click.echo(line.encode(errors="backslashreplace"))
    return 0


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]} …"


def _row(folder: str, name: str) -> dict[str, Any] | None:
    try:
        story, verdict, _ = look_at(folder)
    except UsageError:  # it was just removed
        return None
    code = story.over.code if story.over else None
    match verdict.kind:
        case "none":
            how = "well"
        case "running":
            how = "running"
        case "cut off":
            how = "launchpad was killed"
        case "failure" | "early" | "waited" | "held" | "start" | "lost":
            how = in_short(story, verdict)
        case kind:
            how = {"console": "output took no more", "peer": "another node failed"}.get(kind, kind)
    return {
        "job": story.planned.job or name,
        "started": story.planned.wall,
        "seconds": round((story.over.time - story.planned.time) / 1e9, 3) if story.over else None,
        "ranks": sum(len(ranks) for _, ranks in story.planned.nodes),
        "kind": verdict.kind,
        "exit_code": code,
        "how": _cut(how, 60),
        "words": story.planned.words,
        "cwd": story.planned.cwd,
        "logs": os.path.realpath(folder),
    }
