"""`launchpad top`: what each rank of a running job does and uses, on a screen that follows it."""

from __future__ import annotations

import json
import os
import sys
import time

import click

from launchpad.cli.looks import first_look, next_look
from launchpad.console.terminal import can_draw, columns
from launchpad.diagnosis.activity import as_json, child_rows, host_rows, rows
from launchpad.errors import UsageError
from launchpad.protocol.events import STDOUT

# How long to look for what is shown per second.
SECONDS = 1.0


@click.command(
    "top",
    short_help="Watch what each rank of a running job does and uses.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("job", default="", required=False)
@click.option("--once", is_flag=True, help="Print it once, as text. Default where there is no terminal.")
@click.option("--json", "as_json_", is_flag=True, help="Print it once, as JSON.")
def command(job: str, once: bool, as_json_: bool) -> int:
    """Watch what each rank of a running job does and uses: state, CPU, memory, threads, bytes read and written, GPU,
    lines a second, last line.

    JOB is an id that `launchpad jobs` lists, or a prefix of one; the default is the latest running one. The job goes
    on when you leave.
    """
    look = first_look(job)
    if not (once or as_json_) and can_draw(0, os.environ) and can_draw(STDOUT, os.environ):
        from launchpad.cli.top_loop import TopLoop

        return TopLoop(look).run()
    time.sleep(SECONDS)
    after = next_look(look.job)
    if after is None:
        raise UsageError("the job ended before it could answer")
    if as_json_:
        click.echo(json.dumps(as_json(look, after), indent=1))
        return 0
    from launchpad.console.top_screen import PLAIN_COLUMNS
    from launchpad.console.top_screen import once as as_text

    width = columns(STDOUT) if can_draw(STDOUT, os.environ) else PLAIN_COLUMNS
    every = rows(look, after)
    children = child_rows(look, after)
    lines = as_text(after, host_rows(after, every), every, children, width, plain=not can_draw(STDOUT, os.environ))
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
    return 0
