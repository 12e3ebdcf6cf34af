"""`launchpad jobs`: list the recorded jobs, latest first."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from launchpad.console.terminal import can_draw, drawn, plain_table
from launchpad.diagnosis.history import History
from launchpad.diagnosis.verdict import Verdict
from launchpad.diagnosis.verdict_text import summarize
from launchpad.errors import UsageError
from launchpad.image import keeper_control, place
from launchpad.protocol.events import STDOUT
from launchpad.protocol.printable import printable
from launchpad.record import held_hosts, job_store
from launchpad.record.files import Unreadable
from launchpad.record.liveness import is_visible, own_process
from launchpad.record.recorded_verdict import look_at

if TYPE_CHECKING:
    from rich.table import Table

# By kind of verdict; all others are failures.
_STYLES = {"none": "green", "running": "bold yellow", "headless": "bold yellow", "signal": "yellow"}


@click.command(
    "jobs",
    short_help="List running and recent jobs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "-n", "--most", type=click.IntRange(min=1), default=20, metavar="N", help="Show at most N jobs. Default: 20."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(most: int, as_json: bool) -> int:
    """List running and recent jobs: when they started, how long they took, how they ended, what they ran."""
    place = job_store.jobs_folder(os.environ)
    rows = [
        row for name in job_store.jobs(os.environ)[:most] if (row := _row(os.path.join(place, name), name)) is not None
    ]
    if as_json or can_draw(STDOUT, os.environ):
        _add_usage(rows)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return 0
    _say_what_is_kept()
    if not rows:
        click.echo(f"there is no record of any job in {place}", err=True)
    elif can_draw(STDOUT, os.environ):
        click.echo(drawn(_table(rows), STDOUT, os.environ), nl=False)
    else:
        for row in rows:
            job, started, lasted, ranks, how, words = _cells(row)
            counted = f"{ranks:>5} ranks" if ranks else ""
            click.echo(f"{job:<8}  {started:<19}  {lasted:>9}  {counted:<11}  {how:<28}  {words}".rstrip().encode())
    return 0


def _say_what_is_kept() -> None:
    if not place.exists(os.environ):
        return

    kept = keeper_control.ask({"status": True}, os.environ).get("found")
    if kept is not None:
        count = len([image for image in kept["images"] if image["preload"]])
        click.echo(f"{count} kept image{'s' * (count != 1)} (pid {kept['pid']}); see launchpad warm --status", err=True)


def _add_usage(rows: list[dict[str, Any]]) -> None:
    """Add memory (bytes) and processors in use to the jobs that are running here."""
    running = [row for row in rows if row["kind"] == "running" and row["here"]]
    if running:
        from launchpad.record.usage import usage

        for row, found in zip(running, usage([row["pid"] for row in running]), strict=True):
            row["memory"], row["processors"] = found


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        printable(row["job"]),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["started"])) if row["started"] else "",
        "" if row["seconds"] is None else f"{row['seconds']:.1f} s",
        str(row["ranks"] or ""),
        printable(row["how"]),
        printable(_cut(" ".join(row["words"]), 100)),  # the command lines of bench are long
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.text import Text

    table = plain_table()
    for name in ("job", "started"):
        table.add_column(name, no_wrap=True)
    for name in ("lasted", "ranks"):
        table.add_column(name, no_wrap=True, justify="right")
    for name in ("outcome", "command"):
        table.add_column(name, overflow="fold")
    for row in rows:
        job, started, lasted, ranks, how, words = _cells(row)
        if row["memory"]:
            how += f": {row['memory'] / 2**30:.2f} GiB, {row['processors']:.1f} CPUs"
        outcome = Text(how, _STYLES.get(row["kind"], "red"))
        table.add_row(Text(job, "cyan"), started.rpartition(":")[0], lasted, ranks, outcome, Text(words))
    return table


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]} …"


def _row(folder: str, name: str) -> dict[str, Any] | None:
    kind: str
    try:
        history, verdict, _ = look_at(folder)
        kind, how = verdict.kind, _how(history, verdict)
        if kind == "cut off" and (goes_on := held_hosts.headless(folder)):
            kind, how = kind if goes_on.ended else "headless", str(goes_on)
    except Unreadable as error:
        history, kind, how = History(), "unreadable", f"unreadable ({error.why})"
    except UsageError:  # just removed
        return None
    return {
        "job": history.planned.job or name,
        "started": history.planned.wall or None,
        "seconds": round((history.over.time - history.planned.time) / 1e9, 3) if history.over else None,
        "ranks": sum(len(ranks) for _, ranks in history.planned.nodes),
        "kind": kind,
        "exit_code": history.over.code if history.over else None,
        "how": how,
        "host": history.planned.host,
        "here": is_visible(history.planned, own_process()),
        "pid": history.planned.pid,
        "memory": None,
        "processors": None,
        "words": history.planned.words,
        "cwd": history.planned.cwd,
        "logs": os.path.realpath(folder),
    }


def _how(history: History, verdict: Verdict) -> str:
    """How the job has ended, in a few words."""
    match verdict.kind:
        case "none":
            return "succeeded"
        case "unknown":
            return f"unknown, on {history.planned.host}" if history.planned.host else "unknown"
        case "cut off":
            return "its record was cut off"
        case "failure" | "early" | "waited" | "held" | "start" | "lost":
            return _cut(summarize(history, verdict), 60)
        case "console":
            return "output was closed"
        case kind:
            return kind
