"""The options of `launchpad run`: our own, torchrun's, and what people type out of habit with mpirun."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from launchpad.cli.options import GroupedOption, local_ranks, positive_seconds, rank_count, seconds, signal_names

# Options that make no sense where no hosts are named, by their parameters.
ABOUT_HOSTS = ("include", "exclude", "ssh_config", "accept_new_host_keys", "sync")

Declare = Callable[..., Callable[[Any], Any]]


def _group(heading: str, **common: Any) -> Declare:
    return partial(click.option, cls=GroupedOption, group=heading, **common)


_many = _group("How many ranks")
_what = _group("What they run")
_start = _group("How they start")
_env = _group("Their environment")
_output = _group("Their output")
_end = _group("The end")
_file = _group("From a file")
_world = _group("Several nodes, launchpad started once on each", pet=True)
_no_meaning = _group("Taken from torchrun, of no effect here", pet=True)
_habit = _group("Taken from mpirun, of no effect here", is_flag=True, expose_value=False)
_hosts = _group("Several hosts, from this one command")

_OPTIONS = (
    _many(
        *("-n", "-np", "--nproc", "--nproc-per-node", "nproc"),
        type=rank_count,
        metavar="N|auto|cpu|gpu",
        pet=True,
        help="Ranks on this machine, or on each host; auto: one per GPU, else per usable core. Default: 1.",
    ),
    _what("-m", "--module", is_flag=True, pet=True, help="The target is a Python module, as for python -m."),
    _what("--no-python", is_flag=True, pet=True, help="The target is a program, whatever its name."),
    _what("--run-path", is_flag=True, pet=True, help="The target is a Python script, whatever its name."),
    _what("--python", metavar="PATH", help="The ranks' interpreter. Default: the active environment's, else our own."),
    _start(
        "--start-method",
        type=click.Choice(["fork", "exec", "forkserver", "spawn"]),
        default="fork",
        metavar="fork|exec",
        pet=True,
        help="fork: import torch once, if the target does, then fork the ranks. exec, spawn: each by itself.",
    ),
    _start(
        "--preload",
        metavar="MODULE,…",
        help="Import these too before ranks are forked, whatever the target imports. '': import and fork nothing.",
    ),
    _start(
        "--backend",
        type=click.Choice(["gloo", "nccl", "mpi"]),
        metavar="gloo|nccl|mpi",
        help="The process group of a function (file.py:NAME), and of launchpad.collectives where a script names none. "
        "Default: nccl where each rank has a GPU, else gloo. mpi: the ranks of any target are one MPI_COMM_WORLD.",
    ),
    _what("--wdir", "-wdir", metavar="DIR", help="Run there instead of in the current folder."),
    _env("-x", "--env", "env", multiple=True, metavar="VAR[=VALUE]", help="Give the ranks a variable; repeatable."),
    _env("--env-file", multiple=True, metavar="FILE", help="The same from a file, a line each; repeatable."),
    _env("--role", default="default", metavar="NAME", pet=True, help="ROLE_NAME."),
    _env("--virtual-local-rank", is_flag=True, pet=True, help="Each rank sees one GPU, its own, and LOCAL_RANK 0."),
    _output("--log-dir", metavar="DIR", pet=True, help="Keep each rank's output in files here (and show it)."),
    _output(
        *("-r", "--redirects"),
        default="0",
        metavar="MAP",
        pet=True,
        help="To files only: 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2.",
    ),
    _output("-t", "--tee", default="0", metavar="MAP", pet=True, help="To files and the console, in the same words."),
    _output("--local-ranks-filter", type=local_ranks, metavar="R,R,…", pet=True, help="Show only these local ranks."),
    _output(
        "--duplicate-stdout-filters",
        default="",
        metavar="TEXT,…",
        pet=True,
        help="Lines with one of these texts also go to filtered_stdout.log.",
    ),
    _output("--duplicate-stderr-filters", default="", metavar="TEXT,…", pet=True, help="The same for stderr."),
    _output("--junit", metavar="FILE", help="Write a JUnit report, a case for each rank."),
    _output("--events", metavar="FILE|-", help="Write what happens as JSON lines, the ranks' output among them."),
    _output("--add-to-reports", is_flag=True, hidden=True),  # of several jobs, the second and those after it
    _output("-q", "--quiet", is_flag=True, help="No notes of launchpad's own, but for why a job failed."),
    _end(
        *("--grace", "--shutdown-timeout", "grace"),
        type=seconds,
        metavar="SECONDS",
        pet=True,
        help="From the first signal to the next. Default: 5 after a failure, 30 when asked to stop.",
    ),
    _end("--timeout", type=seconds, metavar="SECONDS", help="End the job after this time, with exit code 124."),
    _end(
        "--stall-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="End the job, with 124, when no rank has written, or got on, for this time; show where each one is.",
    ),
    _end(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        pet=True,
        help="Start all ranks again when one has failed, at most so often.",
    ),
    _end(
        "--signals-to-handle",
        type=signal_names,
        default="",
        metavar="SIG,…",
        pet=True,
        help="Pass these on to the ranks beside INT, TERM, HUP, USR1 and USR2.",
    ),
    _file("--config", metavar="FILE", help="Take options, and the target, from a job file (TOML)."),
    _file("--job", metavar="NAME", help="Of a file with several jobs, this one. Default: all, one after the other."),
    _end("--dry-run", is_flag=True, help="Print what would be run, and run nothing."),
    _end("--json", "as_json", is_flag=True, help="With --dry-run: print it as JSON."),
    _hosts(
        *("-H", "--host", "--hosts", "-host", "-hosts", "hosts"),
        metavar="HOST[:N],…",
        help="Run on these, N ranks each; by ssh, but for localhost. [USER@]HOST, [::1]:N.",
    ),
    _hosts(
        *("--hostfile", "-hostfile", "--machinefile", "-machinefile", "hostfile"),
        metavar="FILE",
        help="The same from a file, a line each: HOST slots=N, or HOST:N.",
    ),
    _hosts("--include", default="", metavar="HOST,…", help="Of these hosts, only those; * and ? are patterns."),
    _hosts("--exclude", default="", metavar="HOST,…", help="Of these hosts, not those."),
    _hosts(
        "--sync",
        is_flag=True,
        help="Send the working folder to each host, and run in the copy: what git tracks or doesn't ignore, or all.",
    ),
    _hosts("--ssh-config", metavar="FILE", help="Instead of ~/.ssh/config."),
    _hosts(
        "--accept-new-host-keys",
        is_flag=True,
        help="Trust, and remember, the key of a host that was never met before. A changed key is refused all the same.",
    ),
    _hosts(
        "--heartbeat-timeout",
        type=seconds,
        default="10",
        show_default=True,
        metavar="SECONDS",
        help="A host that gives no sign of life for so long is lost, and ends the job.",
    ),
    _world("--nnodes", default="1", metavar="N", help="How many nodes."),
    _world("--node-rank", type=int, metavar="R", help="Which of them this one is, from 0."),
    _world("--master-addr", metavar="HOST", help="The address of node rank 0."),
    _world(
        "--master-port", type=click.IntRange(0, 65535), metavar="PORT", help="Default: a free one; 29500 for several."
    ),
    _world("--standalone", is_flag=True, help="One node, a free port: the default."),
    _world("--rdzv-backend", default="static", metavar="NAME", help="static and c10d mean the same here."),
    _world(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="Another way to give --master-addr and --master-port."
    ),
    _world("--rdzv-id", default="none", metavar="ID", help="The job's id; who doesn't know it is not let in."),
    _world("--rdzv-conf", default="", metavar="K=V,…", help="join_timeout: seconds to wait for the other nodes (600)."),
    _no_meaning("--local-addr", expose_value=False, metavar="HOST", help="A node's address is seen, not told."),
    _no_meaning("--monitor-interval", expose_value=False, metavar="SECONDS", help="Exits are seen when they happen."),
    _no_meaning(
        "--event-log-handler", expose_value=False, metavar="NAME", help="Names a Python entry point of torch's."
    ),
    _no_meaning("--logs-specs", expose_value=False, metavar="NAME", help="Names a Python entry point of torch's."),
    _no_meaning(
        "--numa-binding",
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        expose_value=False,
        help="Ranks are not bound; use numactl as the target.",
    ),
    _habit("--oversubscribe", "-oversubscribe", help="More ranks than cores are fine."),
    _habit("--allow-run-as-root", help="root is not refused."),
    _habit("--tag-output", "-tag-output", help="Lines are always marked."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the options, in the order of --help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
