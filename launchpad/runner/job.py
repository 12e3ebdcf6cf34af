"""Runs one job from options to exit code: brings up the nodes, plans the ranks, and has them supervised."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launchpad.console.message import say_nothing, say_on_stderr
from launchpad.errors import UsageError
from launchpad.head import own_signals
from launchpad.job.hosts import slots_of
from launchpad.job.membership import Membership
from launchpad.job.world import parse_nnodes
from launchpad.runner.kept import asked_of_hosts, look_for_image
from launchpad.runner.links import open_links
from launchpad.runner.options import RunOptions, with_absolute_paths
from launchpad.runner.spec import make_spec, make_world_spec, supplies_for, with_gpus
from launchpad.runner.stoppable import stoppable, told

if TYPE_CHECKING:
    from launchpad.head.arrivals import Reopen
    from launchpad.head.bringup import BringUp
    from launchpad.job.hosts import Host
    from launchpad.job.plan import Plan
    from launchpad.job.spec import JobSpec
    from launchpad.job.world import WorldSpec
    from launchpad.runner.departure import Departure
    from launchpad.runner.links import LocalAgent
    from launchpad.runner.programs import Layout
    from launchpad.runner.supervise import Taker, Tell
    from launchpad.transport import Link


def run_job(
    options: RunOptions,
    local: LocalAgent,
    closing: ExitStack,
    *,
    show: Callable[[Plan], None] | None = None,
    taker: Taker | None = None,
    departure: Departure | None = None,
) -> int:
    """Run the job and return its exit code. Raises LaunchpadError if it can't start.

    `local` is this machine's agent; `closing` closes the links to all others. `show` makes this a dry run: it gets the
    plan, and nothing is started. `taker` makes a sink that gets the ranks' standard output instead of the console.
    `departure`: leave the terminal when everything is ready for the ranks to start.
    """
    _check_outputs(options, departure)
    if options.wdir is not None:
        options = with_absolute_paths(options)
    layout = _layout(options)
    hosts = layout.hosts if layout else _hosts(options)
    options = with_gpus(options, hosts)
    world = make_world_spec(options, hosts)
    membership = membership_of(options, hosts)
    if world.meeting is not None and departure is not None:
        raise UsageError(
            "--detach is for jobs that are started in one place, and the nodes of this one each show their own ranks; "
            "name the nodes with --hosts, or leave --detach out"
        )
    if options.check and options.hosts.by_srun:
        raise UsageError("--check asks hosts over SSH, and srun starts launchpad on those of this job; leave it out")
    if options.check and world.meeting is not None:
        from launchpad.runner.checkup import refuse_unfit

        refuse_unfit((), options, os.getcwd(), torch=True, mpi=options.backend == "mpi")
    if world.meeting is not None and show is None:
        from launchpad.runner.joined import run_joined

        return run_joined(options, world, local, closing, taker)
    spec, options = _spec(options, hosts, world, layout)
    if options.check and world.meeting is None:
        from launchpad.runner.checkup import refuse_unfit

        refuse_unfit(hosts, options, spec.cwd, torch=spec.torch, mpi=spec.backend == "mpi", environ=spec.environ)
    supplies = supplies_for(options.hosts, spec, closing)
    links, reopen, tell, bringup = _nodes(options, hosts, spec, local, closing)
    if options.reports.verbose:
        _say_more(spec, local, hosts)

    from launchpad.runner.nodes import bring_up, members_of

    members = members_of(hosts, links, spec, options.nproc, by_srun=options.hosts.by_srun)
    quiet = options.reports.quiet
    with told(say_nothing if quiet else say_on_stderr):
        planner = bring_up(bringup, spec, members, links, supplies, options.hosts, membership, quiet=quiet)
    if show is not None:
        from launchpad.runner.explained import explained

        show(explained(planner))
        if world.meeting is not None:
            say_on_stderr("RANK and WORLD_SIZE don't count the ranks of other nodes, whose number is not known here")
        return 0

    from launchpad.runner.supervise import supervise

    return supervise(bringup, planner, tell, reopen, options.reports, taker, departure=departure)


def _layout(options: RunOptions) -> Layout | None:
    """Where the programs run, if there are several. Raises UsageError."""
    if not options.programs:
        return None
    from launchpad.runner.programs import lay_out

    return lay_out(options)


def _spec(
    options: RunOptions, hosts: Sequence[Host], world: WorldSpec, layout: Layout | None
) -> tuple[JobSpec, RunOptions]:
    """What is run, and the options for what comes after that. Raises UsageError."""
    if layout is None:
        return make_spec(options, hosts, world), options
    from launchpad.runner.programs import spec_of

    # Hosts have the numbers of all their programs' ranks, and each program has its own interpreter.
    return spec_of(options, layout, world), options._replace(nproc=None, python=None)


def _check_outputs(options: RunOptions, departure: Departure | None) -> None:
    """Raise UsageError for output that would go nowhere."""
    if departure is not None and options.reports.events == "-":
        raise UsageError("--events - has no standard output to write to with --detach; give it a file")
    if options.reports.fold is not None and departure is not None:
        raise UsageError("--fold says how output is shown, and --detach shows none; give it to launchpad attach")
    if options.reports.fold is not None and options.reports.events == "-":
        raise UsageError("--fold says how output is shown, and --events - shows none; leave one of them out")


def _nodes(
    options: RunOptions, hosts: Sequence[Host], spec: JobSpec, local: LocalAgent, closing: ExitStack
) -> tuple[Sequence[Link], Reopen, Tell, BringUp]:
    """The links to the nodes' agents, how to reopen one, how to tell nodes the end, and what brings them up."""
    quiet = options.reports.quiet
    links: Sequence[Link]
    reopen: Reopen
    tell: Tell = say_nothing
    say: Callable[[str], None] = say_nothing if quiet else say_on_stderr
    with stoppable(say):
        if options.hosts.by_srun:
            from launchpad.runner.slurm import SrunNodes

            local.close()
            nodes = closing.enter_context(SrunNodes(hosts, options, say))
            links, reopen, tell = nodes.wait(), nodes.reopen, nodes.tell
        else:
            look_for_image(local, spec, os.environ)
            if not hosts:
                local.begin()
                _import_the_rest()
            links, reopen = open_links(
                hosts,
                local,
                closing,
                options.hosts,
                spec.python,
                exact=options.python is not None and not options.hosts.sync_env,
                quiet=quiet,
                asked=asked_of_hosts(spec, slots_of(hosts, options.nproc)),
            )
        from launchpad.head.bringup import BringUp

        bringup = BringUp()
        own_signals.catch(bringup.post, options.signals_to_handle)
    return links, reopen, tell, bringup


def _say_more(spec: JobSpec, local: LocalAgent, hosts: Sequence[Host]) -> None:
    """What --verbose adds before the ranks start."""
    if local.why_cold:
        from launchpad.console.notes import no_kept_image

        say_on_stderr(no_kept_image(local.why_cold, f" on {local.link().name}" if len(hosts) > 1 else ""))
    if spec.torch:
        _say_if_untested(spec.python)


def _say_if_untested(python: str) -> None:
    import shutil

    from launchpad.doctor.software import untested_torch
    from launchpad.record.circumstances import packages_of

    version = packages_of(shutil.which(python) or python).get("torch", "")
    if untested := untested_torch(version):
        say_on_stderr(f"torch {version} of {python} is {untested}")


def _import_the_rest() -> None:
    """Import what is needed as soon as there is an agent: one that is forked from a kept image comes up meanwhile."""
    import launchpad.head.bringup
    import launchpad.runner.nodes
    import launchpad.runner.supervise  # noqa: F401


def membership_of(options: RunOptions, hosts: Sequence[Host]) -> Membership | None:
    """The sizes that a job on these hosts may have, if it has a choice or spares. Raises UsageError."""
    spares = options.hosts.spares
    least, most = parse_nnodes(options.nodes.nnodes)
    if spares and not hosts:
        raise UsageError(f"--spares {spares} needs hosts; name them with --hosts or --hostfile, or leave it out")
    if spares >= max(1, len(hosts)) and spares:
        raise UsageError(f"--spares {spares}: of {len(hosts)} hosts none would be left to run ranks; name more hosts")
    if not hosts or (not spares and least == most):
        return None
    taking_part = len(hosts) - spares
    return Membership(taking_part if least == most else least, taking_part, changes=True)


def _hosts(options: RunOptions) -> tuple[Host, ...]:
    named = options.hosts
    if options.nodes.nnodes != "1":
        named = named._replace(sync=False)  # it is also for nodes that join
        if named.keep_running and named.hosts is None and named.hostfile is None and not named.allocation:
            nodes = options.nodes.nnodes
            raise UsageError(f"--keep-running is for a job of one launchpad, not for --nnodes {nodes}; leave it out")
    if not named.given:
        return ()
    from launchpad.runner.connect import read_hosts

    return read_hosts(named, options.nproc)
