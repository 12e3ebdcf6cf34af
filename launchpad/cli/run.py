"""`launchpad run`: start N ranks of a program and see them to their end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from launchpad.cli.options import GroupedCommand, GroupedOption, local_ranks, rank_count, seconds
from launchpad.errors import UsageError
from launchpad.head import preflight
from launchpad.head.supervisor import Sink, Supervisor
from launchpad.job.plan import Plan, make_plan
from launchpad.job.spec import JobSpec, StreamMap
from launchpad.report.console import Console, terminal_size
from launchpad.report.summary import Summary
from launchpad.transport import Link

_EPILOG = """\b
Examples:
  launchpad run --nproc 4 train.py --lr 0.1        a script
  launchpad run -n gpu -m package.train            a module, a rank per GPU
  launchpad run -n 2 -- ./prog --flag              any program
  launchpad run -n 4 --log-dir logs -r 1:3 t.py    rank 1 to files only
  launchpad run -n 4 --dry-run train.py            what would be run

\b
Exit code: 0 when every rank left with 0; a failed job's is the first failed
rank's own, 128+n for signal n; 2 nothing could be started; 4 a node was lost;
124 --timeout; 130, 143, 129 ended by Ctrl-C, TERM, HUP.
"""


def _grouped(group: str) -> Callable[..., Callable[[Any], Any]]:
    return partial(click.option, cls=GroupedOption, group=group)


_how_many = _grouped("How many ranks")
_what = _grouped("What they run")
_variables = _grouped("Their environment")
_output = _grouped("Their output")
_end = _grouped("The end")


@click.command(
    "run",
    cls=GroupedCommand,
    epilog=_EPILOG,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    options_metavar="[OPTIONS]",
)
@_how_many(
    "-n",
    "-np",
    "--nproc",
    "--nproc-per-node",
    "nproc",
    type=rank_count,
    metavar="N|auto|cpu|gpu",
    default="1",
    show_default=True,
    help="Ranks on this machine; auto: one per GPU, else per usable core.",
)
@_what("-m", "--module", is_flag=True, help="The target is a Python module, as for python -m.")
@_what("--no-python", is_flag=True, help="The target is a program, whatever its name.")
@_what("--python", metavar="PATH", help="The ranks' interpreter. Default: the active environment's, else launchpad's.")
@_variables("-x", "--env", "env", multiple=True, metavar="VAR[=VALUE]", help="Give the ranks a variable; repeatable.")
@_variables("--env-file", multiple=True, metavar="FILE", help="The same from a file, a line each; repeatable.")
@_output("--log-dir", metavar="DIR", help="Keep each rank's output in files here (and show it, unless -r says else).")
@_output(
    "-r",
    "--redirects",
    default="0",
    metavar="MAP",
    help="To files only: 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2.",
)
@_output("-t", "--tee", default="0", metavar="MAP", help="To files and the console, in the same words.")
@_output("--local-ranks-filter", type=local_ranks, metavar="R,R,…", help="Show only these local ranks.")
@_output("-q", "--quiet", is_flag=True, help="No notes of launchpad's own, but for why a job failed.")
@_end(
    "--grace",
    type=seconds,
    metavar="SECONDS",
    help="From the first signal to the next. Default: 5 after a failure, 30 when asked to stop.",
)
@_end("--timeout", type=seconds, metavar="SECONDS", help="End the job after this time, with exit code 124.")
@_end("--dry-run", is_flag=True, help="Print what would be run, and run nothing.")
@_end("--json", "as_json", is_flag=True, help="With --dry-run: print it as JSON.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="TARGET [ARGS]...")
@click.pass_obj
def command(link: Link, /, **options: Any) -> int:
    """Start N ranks of TARGET: a script.py, a module (-m), or any program on PATH.

    Each rank gets torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR …). When one fails, the others are
    ended, and you are told which one it was and why. Everything after TARGET belongs to TARGET.
    """
    if options["as_json"] and not options["dry_run"]:
        raise UsageError("--json says how --dry-run prints; add --dry-run, or leave it out")
    spec = _spec(options)
    supervisor = Supervisor()
    supervisor.handle_signals()
    facts = supervisor.connect([link], count_gpus=spec.nproc in ("auto", "gpu"))
    plan = make_plan(spec, facts, run_id=os.urandom(4).hex())
    if options["dry_run"]:
        from launchpad.report.dry_run import show

        show(plan, as_json=options["as_json"])
        return 0
    return _run(supervisor, spec, plan, quiet=options["quiet"], ready=facts[0])


def _spec(options: dict[str, Any]) -> JobSpec:
    redirects = StreamMap.parse(options["redirects"], "--redirects")
    tee = StreamMap.parse(options["tee"], "--tee")
    log_dir = options["log_dir"]
    if log_dir is not None and not (redirects or tee):
        tee = StreamMap(everywhere=3)
    return JobSpec(
        target=preflight.find_target(options["target"], module=options["module"], no_python=options["no_python"]),
        nproc=options["nproc"],
        python=preflight.find_python(options["python"], os.environ, sys.executable),
        cwd=preflight.working_folder(),
        environ=preflight.collect_environ(options["env"], options["env_file"], os.environ),
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        shown_local_ranks=options["local_ranks_filter"],
        grace=options["grace"],
        timeout=options["timeout"],
    )


def _run(supervisor: Supervisor, spec: JobSpec, plan: Plan, *, quiet: bool, ready: Any) -> int:
    folder = None
    sinks: list[Sink] = []
    if spec.log_dir is not None or spec.redirects or spec.tee:
        from launchpad.report.files import Files, temporary_folder

        files = Files(spec, plan, spec.log_dir or temporary_folder(), supervisor.post)
        folder = files.folder
        sinks.append(files)
    console = Console(spec, plan, os.environ, supervisor.post)
    summary = Summary(console.say, quiet)
    summary.on(ready)
    sinks += [console, summary]
    prefix_columns = len(str(len(plan.ranks) - 1)) + 3
    code, cause = supervisor.run(
        plan, sinks, grace=spec.grace, timeout=spec.timeout, terminal=terminal_size(os.environ, prefix_columns)
    )
    if supervisor.leaving:  # output that nobody takes is all that is left
        os._exit(code)
    console.flush()
    if cause is not None:
        console.say(summary.report(cause, folder, spec.timeout), bad=True)
    # From here on nobody is left but a slow reader: Ctrl-C ends the wait for him.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    for sink in sinks:
        sink.close()
    return code
