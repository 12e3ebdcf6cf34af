"""`launchpad run`: start N ranks of a program and see them to their end."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from launchpad.cli.conduct import Reports, Taker, conduct
from launchpad.cli.options import GroupedCommand
from launchpad.cli.preload import what_to_preload
from launchpad.cli.run_options import ABOUT_HOSTS, run_options
from launchpad.errors import NodeError, UsageError
from launchpad.events import STDERR, STDOUT
from launchpad.head import preflight, signals
from launchpad.head.gathering import Gathering
from launchpad.head.preload import TORCH, look_through
from launchpad.job.plan import Elsewhere, Place, make_plan, rank_count
from launchpad.job.spec import JobSpec, StreamMap, split_filters
from launchpad.job.world import resolve_world
from launchpad.report.console import say_on_stderr
from launchpad.transport import Link

if TYPE_CHECKING:
    from launchpad.head.sync import File
    from launchpad.job.hosts import Host

Reopen = Callable[[int], Link]

_EPILOG = """\b
Examples:
  launchpad run --nproc 4 train.py --lr 0.1        a script
  launchpad run -n gpu -m package.train            a module, a rank per GPU
  launchpad run -n 2 -- ./prog --flag              any program
  launchpad run -n 4 --log-dir logs -r 1:3 t.py    rank 1 to files only
  launchpad run -n 4 train.py:run                  a function: run(rank, size)
  launchpad run -H a:4,b:4 train.py                on two hosts, by ssh
  launchpad run -n 4 --dry-run train.py            what would be run

\b
Exit code: 0 when every rank left with 0; a failed job's is the first failed
rank's own, 128+n for signal n; 2 nothing could be started; 3 a host can't be
used; 4 a node was lost; 124 --timeout, --stall-timeout; 130, 143, 129 ended by Ctrl-C, TERM, HUP.
"""


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
@run_options
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="TARGET [ARGS]...")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Start N ranks of TARGET: a script.py, a module (-m), any program on PATH, or a function (file.py:NAME).

    Each rank gets torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR …). When one fails, the others are
    ended, and you are told which one it was and why. Everything after TARGET belongs to TARGET.
    """
    if options["config"] is not None:
        from launchpad.cli import jobs

        found = jobs.read_job_file(options["config"], ctx.command)
        if options["job"] is None and list(found) != [""]:
            _link(ctx).close()  # each job has an agent of its own
            return jobs.run_all(list(found), ctx.meta["args"])
        options = jobs.with_job(ctx, found, options["job"] or "")
    elif options["job"] is not None:
        raise UsageError(f"--job {options['job']} names a job in a file; add --config FILE")
    if options["as_json"] and not options["dry_run"]:
        raise UsageError("--json says how --dry-run prints; add --dry-run, or leave it out")
    if options["dry_run"] and options["sync"]:
        raise UsageError("--dry-run runs nothing, and --sync writes to the hosts; leave one of them out")
    return run_job(ctx, options)


def run_job(ctx: click.Context, options: dict[str, Any], taker: Taker | None = None) -> int:
    """Run the job that the options of `launchpad run` describe; its exit code.

    `taker` makes a sink that has the ranks' standard output to itself: the console doesn't show it.
    """
    hosts = _hosts(options)
    spec = _spec(options, hosts)
    files: Sequence[File] = ()
    if options["sync"]:
        from launchpad.head.sync import list_files

        files = list_files(spec.cwd, spec.log_dir)
    links, reopen = _links(ctx, hosts, options, spec.python)
    gathering = Gathering()
    signals.catch(gathering.post, options["signals_to_handle"])
    world = spec.world
    port = world.master_port if world.node_rank == 0 and len(links) == 1 else 0
    facts = gathering.connect(
        links,
        count_gpus=bool({"auto", "gpu"} & {spec.nproc, *(host.slots for host in hosts)}),
        port=port,
        silence=options["heartbeat_timeout"],
    )
    places: Sequence[Place] = ()
    master = None
    if hosts:
        from launchpad.cli.hosts import make_world

        places, master = make_world(gathering, spec, hosts, links, files, options)
    run_id = world.run_id or os.urandom(4).hex()
    if options["dry_run"]:
        from launchpad.cli.jobs import sources
        from launchpad.report.dry_run import show

        plan = make_plan(spec, facts, run_id, places=places, master=master)
        show(plan, sources(ctx, options["config"]), as_json=options["as_json"])
        if world.nnodes > 1:
            say_on_stderr("how many ranks the other nodes have is not known here: RANK and WORLD_SIZE leave them out")
        return 0
    rendezvous, elsewhere = None, Elsewhere()
    if world.nnodes > 1:
        from launchpad.head.rendezvous import Rendezvous

        rendezvous = Rendezvous(world, run_id)
        say = _say_nothing if options["quiet"] else say_on_stderr
        elsewhere = gathering.join(rendezvous, rank_count(spec.nproc, facts[0], facts[0].hostname), say)
    plan = make_plan(spec, facts, run_id, elsewhere, places, master)
    tell = _say_nothing if rendezvous is None else rendezvous.tell
    reports = Reports(options["junit"], options["events"], taker, options["job"] or "", options["add_to_reports"])
    return conduct(gathering, spec, plan, tell, reopen, reports, here=not links[0].remote, quiet=options["quiet"])


def _hosts(options: dict[str, Any]) -> tuple[Host, ...]:
    named = options["hosts"] is not None or options["hostfile"] is not None  # an empty name is a mistake
    if not (named or any(options[name] for name in ABOUT_HOSTS)):
        return ()
    from launchpad.cli.hosts import read_hosts

    return read_hosts(options)


def _link(ctx: click.Context) -> Link:
    """The link to this node's agent, which the entry has opened unless the command line looked strange to it."""
    if ctx.obj is None:
        from launchpad.transport.local import LocalLink

        try:
            ctx.obj = LocalLink()
        except (OSError, RuntimeError) as error:
            raise NodeError(f"this node's agent can't be started: {error}") from None
        ctx.call_on_close(ctx.obj.close)
    link: Link = ctx.obj
    return link


def _links(
    ctx: click.Context, hosts: Sequence[Host], options: dict[str, Any], python: str
) -> tuple[list[Link], Reopen | None]:
    """The links to all hosts' agents, to this machine's where no hosts are named; and what makes one of them anew."""
    if not hosts:
        return [_link(ctx)], None
    from launchpad.cli.hosts import is_here, open_links

    if ctx.obj is not None and not any(map(is_here, hosts)):
        ctx.obj.close()
    links, reopen = open_links(
        hosts, lambda: _link(ctx), ctx.call_on_close, options, python, exact=options["python"] is not None
    )

    def reopen_to_be_closed(node: int) -> Link:
        link = reopen(node)
        ctx.call_on_close(link.close)
        return link

    for link in links:
        if link.remote:  # this machine's closes as every job's does
            ctx.call_on_close(link.close)
    return links, reopen_to_be_closed


def _say_nothing(*_: Any) -> None:
    """There is nobody to be told, or --quiet was given."""


def _spec(options: dict[str, Any], hosts: Sequence[Host]) -> JobSpec:
    redirects = StreamMap.parse(options["redirects"], "--redirects")
    tee = StreamMap.parse(options["tee"], "--tee")
    log_dir = options["log_dir"]
    if log_dir is not None:
        log_dir = os.path.abspath(log_dir)
        if not (redirects or tee):
            tee = StreamMap(everywhere=3)
    nnodes = options["nnodes"]
    if hosts:
        if options["node_rank"] is not None or nnodes not in ("1", str(len(hosts))):
            raise UsageError("--nnodes and --node-rank are for launchpads started on each node; hosts need neither")
        nnodes = "1"
    world = resolve_world(
        nnodes=nnodes,
        **{name: options[name] for name in ("node_rank", "master_addr", "master_port", "standalone")},
        **{name: options[name] for name in ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")},
    )
    if world.nnodes > 1 and options["max_restarts"]:
        raise UsageError("--max-restarts: a world of several launchpads can't be restarted; leave it out")
    if world.nnodes > 1 and options["stall_timeout"] is not None:
        raise UsageError("--stall-timeout: one of several launchpads sees its own ranks only; give --hosts to one")
    if world.nnodes > 1 and options["backend"] == "mpi":
        raise UsageError("--backend mpi: launchpads started on each node form no MPI world; give --hosts to one")
    here, far = True, False
    if hosts:
        from launchpad.cli.hosts import is_here

        here, far = any(map(is_here, hosts)), not all(map(is_here, hosts))
    environ = preflight.collect_environ(options["env"], options["env_file"], os.environ, far=far)
    cwd = preflight.working_folder(options["wdir"], here=here)
    target = preflight.find_target(
        options["target"],
        module=options["module"],
        no_python=options["no_python"] and not options["run_path"],
        script=options["run_path"],
        here=here,
    )
    if options["sync"] and target.kind in ("script", "function") and target.name.startswith(cwd + "/"):
        target = dataclasses.replace(target, name=os.path.relpath(target.name, cwd))  # it is elsewhere there
    look = functools.cache(lambda: look_through(target, cwd, {**os.environ, **environ}))
    preload = what_to_preload(options, target, look, {**os.environ, **environ})
    return JobSpec(
        target=target,
        nproc=options["nproc"] or 1,
        python=preflight.find_python(options["python"], os.environ, sys.executable, here=here),
        cwd=cwd,
        environ=environ,
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        shown_local_ranks=options["local_ranks_filter"],
        filters={
            STDOUT: split_filters(options["duplicate_stdout_filters"]),
            STDERR: split_filters(options["duplicate_stderr_filters"]),
        },
        grace=options["grace"],
        timeout=options["timeout"],
        stall_timeout=options["stall_timeout"],
        max_restarts=options["max_restarts"],
        torch=bool(hosts) and (TORCH[0] in preload or look().torch),
        preload=preload,
        world=world,
        role=options["role"],
        virtual_local_rank=options["virtual_local_rank"],
        backend=options["backend"] or "",
    )
