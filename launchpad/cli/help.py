"""`launchpad help [TOPIC]`: show a page of the manual (launchpad/manual), or a command's --help."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from importlib import resources

import click

from launchpad.errors import UsageError

# The pages, in reading order for a newcomer.
TOPICS = {
    "quickstart": "install it, run a first job, find your way around",
    "output": "what the ranks print: prefixes, log files, progress bars, input",
    "ending": "how a job ends: signals, exit codes, what is left behind",
    "detached": "jobs without a terminal: --detach, attach, wait, stop, --notify",
    "failures": "the verdict: which rank failed first, and why",
    "top": "what each rank does and uses while the job runs",
    "slow": "which rank the others wait for, and why it is slow",
    "hangs": "where the ranks are, and which of them the others are waiting for",
    "debugging": "a prompt or a debugger in any rank, a profile of all",
    "hosts": "several machines: SSH, hostfiles, --sync, one launchpad per node",
    "gpus": "which GPUs the ranks see, and who has leased which",
    "binding": "which CPUs and memory each rank uses, near its GPU",
    "doctor": "can these hosts run a job together, and if not, what to type",
    "restarts": "after a failure, and when nodes come and go; trying it with injected faults",
    "roles": "several programs in one job: one world (a.py : b.py), or services and clients",
    "mpi": "MPI programs without mpirun",
    "collectives": "torch.distributed over gloo, NCCL and MPI, under any launcher",
    "functions": "functions as targets; launchpad.run and ranks that stay, from Python",
    "pytest": "tests on several ranks, with pytest",
    "warm": "keep torch in memory, so that later runs start at once",
    "bench": "measure collectives and the links between hosts",
    "jobs": "job files, the record of each job, and the files in it",
    "reports": "a page about a job, for colleagues and CI; its timeline for Perfetto",
    "ranks": "the environment of a rank, and what launchpad runs in it",
    "security": "what listens, who is trusted, where secrets go",
    "compatibility": "Python, torch, MPI and operating systems; torchrun's and mpirun's options",
    "troubleshooting": "symptoms, their causes, and what to type",
    "peers": "benchmarks against torchrun and mpirun",
    "architecture": "how launchpad is built",
    "contributing": "how to run the tests, and where to change what",
}

# Other words for them.
_ALIASES = {
    "affinity": "binding",
    "attach": "detached",
    "bind": "binding",
    "detach": "detached",
    "exit": "ending",
    "breakpoint": "debugging",
    "check": "doctor",
    "signals": "ending",
    "ssh": "hosts",
    "nodes": "hosts",
    "numa": "binding",
    "mpmd": "roles",
    "perfetto": "reports",
    "resume": "detached",
    "slurm": "hosts",
    "straggler": "slow",
    "stragglers": "slow",
    "env": "ranks",
    "environment": "ranks",
}

# Longer lines are hard to read.
MOST_COLUMNS = 100

# A link to another page. On a terminal its name is enough, because `launchpad help` takes it.
_LINK = re.compile(r"\[([^\]]+)\]\(\w+\.md(?:#[\w-]+)?\)")


@click.command("help", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("topic", required=False)
@click.pass_context
def command(ctx: click.Context, topic: str | None) -> int:
    """Show a page of the manual, or the options of a command.

    Without TOPIC, list the pages. If a page and a command have the same name, show the page. A page longer than the
    terminal goes through $PAGER (default: less).
    """
    assert ctx.parent is not None
    group = ctx.parent.command
    assert isinstance(group, click.Group)
    topic = _ALIASES.get(topic or "", topic)
    if topic is None:
        click.echo(_list())
    elif topic in TOPICS:
        _show(_page(topic))
    elif (found := group.get_command(ctx.parent, topic)) is not None:
        with found.make_context(topic, [], parent=ctx.parent, resilient_parsing=True) as inner:
            click.echo(found.get_help(inner))
    else:
        raise UsageError(_unknown(topic, group.list_commands(ctx.parent)))
    return 0


def _list() -> str:
    width = max(map(len, TOPICS))
    lines = [f"  {topic:<{width}}  {about}" for topic, about in TOPICS.items()]
    return "\n".join(
        [
            "The manual, by topic:",
            "",
            *lines,
            "",
            "launchpad completion SHELL has the Tab key complete command lines (launchpad help quickstart).",
            "launchpad help TOPIC shows a page; launchpad COMMAND --help shows a command's options.",
        ]
    )


def _page(topic: str) -> str:
    page = resources.files("launchpad") / "manual" / f"{topic}.md"
    try:
        return page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page {topic} can't be read: {error}; reinstall launchpad") from None


def _unknown(topic: str, commands: list[str]) -> str:
    near = difflib.get_close_matches(topic, [*TOPICS, *commands], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`launchpad help` lists the topics"
    return f"there is no topic {topic!r}; {hint}"


def _show(text: str) -> None:
    """Print raw Markdown into a pipe or file; format it on a terminal, in a pager if it is long."""
    if not sys.stdout.isatty():
        click.echo(text.encode(), nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.width = min(console.width, MOST_COLUMNS)
    with console.capture() as capture:
        console.print(Markdown(_LINK.sub(r"**\1**", text), code_theme="ansi_dark", hyperlinks=False))
    shown = capture.get()
    if shown.count("\n") < console.height:
        click.echo(shown, nl=False)
        return
    os.environ.setdefault("LESS", "FRX")  # as git does: keep the text on the screen, and pass colours through
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is for the pager; click waits until it exits
    click.echo_via_pager(shown)
