"""Finds out which nodes the batch allocation has that launchpad runs in, and says that they are used."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from launchpad import linux
from launchpad.console.message import say_on_stderr
from launchpad.errors import UsageError
from launchpad.job.allocation import INSTEAD, Source, find_source, parse_nodes
from launchpad.job.hosts import Host, Nproc, choose_hosts, some_of
from launchpad.job.slurm import find_job
from launchpad.runner.options import RunOptions

# flux answers in 100 ms; its broker may hang, or be at the other end of a dead connection.
COMMAND_SECONDS = 20.0


def with_allocation(options: RunOptions, environ: Mapping[str, str]) -> RunOptions:
    """The options with the allocation's nodes as hosts, unless they say themselves where to run. Raises UsageError."""
    if options.programs:
        return _with_programs(options, environ)
    hosts, nodes = options.hosts, options.nodes
    if hosts.hosts is not None or hosts.hostfile is not None:
        return options
    varies = ":" in nodes.nnodes and not (nodes.rdzv_endpoint or nodes.master_addr)  # of those in the allocation
    if (nodes.nnodes != "1" and not varies) or nodes.node_rank is not None or nodes.standalone:
        return options
    source = find_source(environ)
    if source is None:
        return _with_slurm(options, environ) if "SLURM_JOB_ID" in environ else options
    found = parse_nodes(source, _read(source))
    if not options.reports.quiet:
        used = choose_hosts(found, hosts.include, hosts.exclude)
        say_on_stderr(_what_is_used(source.scheduler, used, len(found), options.nproc))
    return options._replace(hosts=hosts._replace(allocation=found))


def _with_programs(options: RunOptions, environ: Mapping[str, str]) -> RunOptions:
    """The same for several programs, unless each says where it runs. Those that do mean nodes of the allocation."""
    own = options.hosts
    named = [(own.hosts, own.hostfile), *((one.hosts, one.hostfile) for one in options.programs)]
    if (None, None) not in named:
        return options
    one = options._replace(programs=(), nproc=None, hosts=own._replace(hosts=None, hostfile=None))
    found = with_allocation(one, environ).hosts
    return options._replace(hosts=found._replace(hosts=own.hosts, hostfile=own.hostfile))


def _with_slurm(options: RunOptions, environ: Mapping[str, str]) -> RunOptions:
    job = find_job(environ, options.nproc, options.target)
    if job is None:
        return options
    if not job.hosts:
        if not options.reports.quiet:
            say_on_stderr("SLURM_JOB_ID is set, but no list of nodes: using this machine alone; --hosts names others")
        return options
    hosts = options.hosts
    used = choose_hosts(job.hosts, hosts.include, hosts.exclude)
    nproc = options.nproc or job.nproc
    if not options.reports.quiet:
        say_on_stderr(_what_is_used("Slurm", used, len(job.hosts), nproc))
    if [host.name for host in used] == [job.here]:
        return options._replace(nproc=nproc or used[0].mentions, hosts=hosts._replace(include="", exclude=""))
    return options._replace(nproc=nproc, hosts=hosts._replace(allocation=job.hosts, by_srun=True))


def _read(source: Source) -> str:
    if source.file:
        try:
            return linux.whole_text(source.file, errors="replace")
        except OSError as error:
            raise UsageError(f"{source.variable} names {source.file}: {error.strerror}; {INSTEAD}") from None
    return run_command(source.command, COMMAND_SECONDS) if source.command else source.text


def run_command(command: Sequence[str], seconds: float, instead: str = f"; {INSTEAD}") -> str:
    """What the command prints. Raises UsageError, with what to do `instead`, if it fails or takes longer than this."""
    shown = " ".join(command)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror}{instead}") from None
    with process:
        try:
            answer, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise UsageError(f"{shown}: no answer after {seconds:g} s{instead}") from None
    if process.returncode:
        last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise UsageError(f"{shown}: {last}{instead}")
    return answer


def _what_is_used(scheduler: str, used: Sequence[Host], count: int, nproc: Nproc | None) -> str:
    """`using the 2 nodes of this PBS allocation: a:8, b:8`; without numbers if each node counts its GPUs or cores."""
    shown = [host.name if isinstance(nproc, str) else f"{host.name}:{nproc or host.mentions}" for host in used]
    nodes = "the node" if count == 1 else f"the {count} nodes"
    if len(used) < count:
        nodes = f"{len(used)} of {nodes}"
    return f"using {nodes} of this {scheduler} allocation: {some_of(shown)}"
