"""`launchpad warm`: keep an image of torch in memory, here or on hosts, from which later runs start at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from launchpad.cli import entry, run
from launchpad.cli.options import positive_seconds, take_host_options
from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.runner import warming
from launchpad.runner.connect import read_hosts
from launchpad.runner.options import HostOptions

_EPILOG = """\b
Examples:
  launchpad warm                                keep torch for 30 minutes after the last run
  launchpad warm --for 8h --preload transformers
  launchpad warm -H a,b                         on two hosts, over SSH
  launchpad warm --status
  launchpad warm --stop -H a,b
"""


@click.command(
    "warm",
    short_help="Keep torch in memory: later runs start at once.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--for",
    "seconds",
    type=positive_seconds,
    default="30m",
    metavar="TIME",
    help="End it when it has not been used for this long. Default: 30m.",
)
@click.option("--preload", metavar="MODULE,…", help="Import these too.")
@click.option("--python", metavar="PATH", help="The ranks' interpreter, as for launchpad run.")
@click.option("--status", is_flag=True, help="Show what is kept, and why the last run did not use it.")
@click.option("--stop", is_flag=True, help="End it.")
@click.option("--json", "as_json", is_flag=True, help="With --status: print JSON.")
def command(
    seconds: float,
    preload: str | None,
    python: str | None,
    status: bool,
    stop: bool,
    as_json: bool,
    **named: Any,
) -> int:
    """Import torch once and keep the process: runs on this machine are forked from it, where that is sound.

    With hosts, it is kept there, for runs on them. launchpad run, smoke, bench and launchpad.run use it by themselves,
    and start cold where the result could differ.
    """
    if status and stop:
        raise UsageError("--status shows what is kept and --stop ends it; leave one of them out")
    if as_json and not status:
        raise UsageError("--json only works with --status; add it, or leave --json out")
    request = {"stop": True} if stop else {"status": True} if status else warming.keep(seconds, preload)
    options, head = HostOptions(**named), entry.kept_head()
    if options.given:
        return _show_hosts(
            warming.ask_hosts(request, read_hosts(options, None), options, python, head), as_json=as_json
        )
    answer = warming.ask_here(request, python, head)
    if "off" in answer:
        raise UsageError(f"nothing is kept: {answer['off']}")
    if "failed" in answer:
        raise NodeError(f"nothing is kept: {answer['failed']}")
    if stop:
        click.echo("ended" if answer["stopped"] else "nothing is kept")
        return 0
    if as_json:
        click.echo(json.dumps(answer["found"], indent=1))
        return 0
    for line in _lines(answer["found"]):
        click.echo(line)
    return 0


def _show_hosts(answers: Mapping[str, dict[str, Any]], *, as_json: bool) -> int:
    """Show the answers of hosts, a line for each. Raises NodeError for those that gave none."""
    failed = {name: answer.get("off") or answer["failed"] for name, answer in answers.items() if not _is_good(answer)}
    good = {name: answer for name, answer in answers.items() if name not in failed}
    if as_json:
        click.echo(json.dumps({name: answer["found"] for name, answer in good.items()}, indent=1))
    else:
        for name, answer in good.items():
            click.echo(f"{name}: {_line(answer)}")
    if failed:
        raise NodeError(failed_hosts(failed, len(answers), "", "can't be used"))
    return 0


def _is_good(answer: Mapping[str, Any]) -> bool:
    return "found" in answer or "stopped" in answer


def _line(answer: Mapping[str, Any]) -> str:
    if "stopped" in answer:
        return "ended" if answer["stopped"] else "nothing is kept"
    found = answer["found"]
    if found is None:
        return "nothing is kept"
    images = found["images"]
    uses, running, memory = (sum(image[name] for image in images) for name in ("uses", "jobs", "memory"))
    what = ", ".join(f"{_what(image)} ({image['state']})" for image in images)
    parts = [f"{what}; {memory / 1e6:.0f} MB, used {uses} times, {running} running", f"ends {_end(found)}"]
    if found["last_cold"]:
        parts.append(f"the last run did not use it: {found['last_cold']}")
    return "; ".join(parts)


def _lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["nothing is kept; launchpad warm keeps an image of torch"]
    lines = []
    for image in found["images"]:
        lines.append(f"{_what(image)}: {_facts(image)}")
    if head := found["head"]:
        lines.append(f"launchpad itself: {_facts(head)}")
    elif found["head_failed"]:
        lines.append(f"launchpad itself is not kept: {found['head_failed']}")
    if found["last_cold"]:
        lines.append(f"the last run did not use it: {found['last_cold']}")
    lines.append(f"ends {_end(found)}")
    return lines


def _facts(image: Mapping[str, Any]) -> str:
    return (
        f"{image['state']}, pid {image['pid']}, {image['age']:.0f} s old, {image['memory'] / 1e6:.0f} MB, "
        f"used {image['uses']} times, {image['jobs']} running; {image['python']}"
    )


def _what(image: Mapping[str, Any]) -> str:
    what = ", ".join(name for name in image["preload"] if name != "torch.distributed") or "plain Python"
    return f"{what}, OMP_NUM_THREADS={image['threads']}" if image["preload"] and image["threads"] else what


def _end(found: Mapping[str, Any]) -> str:
    left = found["idle_ends"]
    if left is None:
        return "with --stop, or some time after the last job that uses it"
    return f"in {left / 60:.0f} min without a run" if left >= 120 else f"in {left:.0f} s without a run"


take_host_options(command, run.command, "Keep it on these hosts, over SSH unless it is localhost.")
