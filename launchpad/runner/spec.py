"""Turns the options into the job's spec, checking them on this machine before anything is started."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

from launchpad.errors import UsageError
from launchpad.job.hosts import Host
from launchpad.job.spec import JobSpec, StreamMap, split_filters
from launchpad.job.world import WorldSpec, resolve_world
from launchpad.protocol.events import STDERR, STDOUT
from launchpad.runner import preflight
from launchpad.runner.imports import TORCH, look_through
from launchpad.runner.options import RunOptions
from launchpad.runner.preload import what_to_preload


def make_spec(options: RunOptions, hosts: Sequence[Host]) -> JobSpec:
    """The job that the options describe, on these hosts, or on this machine if there are none. Raises UsageError."""
    redirects = StreamMap.parse(options.redirects, "--redirects")
    tee = StreamMap.parse(options.tee, "--tee")
    log_dir = options.log_dir
    if log_dir is not None:
        log_dir = os.path.abspath(log_dir)
        if not (redirects or tee):
            tee = StreamMap(everywhere=3)
    world = _world(options, hosts)
    entered = bool(options.hosts.enter)  # a container has its own files and variables
    here = not entered and (not hosts or any(host.here for host in hosts))
    far = entered or not all(host.here for host in hosts)
    environ = preflight.collect_environ(options.env, options.env_file, os.environ, far=far)
    cwd = preflight.working_folder(options.wdir, here=here)
    target = preflight.find_target(
        options.target,
        module=options.module,
        no_python=options.no_python and not options.run_path,
        script=options.run_path,
        here=here,
    )
    if options.hosts.sync and target.kind in ("script", "function") and target.name.startswith(cwd + "/"):
        target = dataclasses.replace(target, name=os.path.relpath(target.name, cwd))  # the hosts' folder differs
    look = functools.cache(lambda: look_through(target, cwd, {**os.environ, **environ}))
    preload = what_to_preload(options, target, look, {**os.environ, **environ})
    return JobSpec(
        target=target,
        nproc=options.nproc or 1,
        python=preflight.find_python(options.python, os.environ, sys.executable, here=here),
        cwd=cwd,
        environ=environ,
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        shown_local_ranks=options.local_ranks_filter,
        filters={
            STDOUT: split_filters(options.duplicate_stdout_filters),
            STDERR: split_filters(options.duplicate_stderr_filters),
        },
        grace=options.grace,
        timeout=options.timeout,
        stall_timeout=options.stall_timeout,
        max_restarts=options.max_restarts,
        torch=bool(hosts) and (TORCH[0] in preload or look().torch),
        preload=preload,
        hooks=not options.no_hooks,
        world=world,
        role=options.role,
        virtual_local_rank=options.virtual_local_rank,
        backend=options.backend or "",
    )


def _world(options: RunOptions, hosts: Sequence[Host]) -> WorldSpec:
    nodes = options.nodes
    if hosts:
        if nodes.node_rank is not None or nodes.nnodes not in ("1", str(len(hosts))):
            raise UsageError(
                "--nnodes and --node-rank are for launchpads started on each node; leave them out with --hosts, --enter"
            )
        nodes = nodes._replace(nnodes="1")
    world = resolve_world(**nodes._asdict())
    if world.nnodes > 1 and options.max_restarts:
        raise UsageError("--max-restarts: a world of several launchpads can't be restarted; leave it out")
    if world.nnodes > 1 and options.stall_timeout is not None:
        raise UsageError(
            "--stall-timeout: each of several launchpads sees only its own ranks; start one launchpad with --hosts"
        )
    if world.nnodes > 1 and options.backend == "mpi":
        raise UsageError(
            "--backend mpi: launchpads started on each node can't form an MPI world; start one with --hosts"
        )
    return world
