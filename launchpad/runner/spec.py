"""Turns the options into the job's spec. Checks them, the target and the interpreter before anything is started."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launchpad import linux
from launchpad.console.prefix import chosen_template
from launchpad.errors import UsageError
from launchpad.job.hosts import Host
from launchpad.job.limits import Limits
from launchpad.job.spec import JobSpec, StreamMap, Target, split_filters
from launchpad.job.user_environment import forwarded, parse_file, parse_option
from launchpad.job.world import WorldSpec, parse_nnodes, resolve_world
from launchpad.protocol.events import STDERR, STDOUT
from launchpad.runner import function_target
from launchpad.runner.allocation_end import allocation_end, stop_time
from launchpad.runner.imports import TORCH, executes_ranks, look_through, what_to_preload
from launchpad.runner.options import HostOptions, ProgramOptions, RunOptions

if TYPE_CHECKING:
    from contextlib import ExitStack

    from launchpad.head.planner import Supplies
    from launchpad.job.faults import Faults
    from launchpad.job.health import HealthCheck

_PYTHON_SUFFIXES = (".py", ".pyz", ".pyc")


def make_spec(options: RunOptions, hosts: Sequence[Host], world: WorldSpec) -> JobSpec:
    """The job that the options describe, on these hosts, or on this machine if there are none. Raises UsageError."""
    check_together(options)
    log_dir, redirects, tee = streams_of(options)
    entered = bool(options.hosts.enter)  # a container has its own files and variables
    # srun's nodes have the same files.
    here = not entered and (not hosts or options.hosts.have_launchpads or any(host.here for host in hosts))
    far = entered or not all(host.here for host in hosts)
    environ = collect_environ(options.env, options.env_file, os.environ, far=far)
    cwd = working_folder(options.wdir, here=here)
    target = _target(options, cwd, here=here)
    look = functools.cache(lambda: look_through(target, cwd, {**os.environ, **environ}))
    preload = what_to_preload(options, target, look, {**os.environ, **environ})
    return JobSpec(
        target=target,
        nproc=options.nproc or 1,
        python=find_python(options.python, os.environ, sys.executable, here=here),
        cwd=cwd,
        environ=environ,
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        shown_local_ranks=options.local_ranks_filter,
        line_prefix=chosen_template(options.log_line_prefix_template, os.environ),
        input_rank=options.input_rank,
        debug=options.debug,
        filters={
            STDOUT: split_filters(options.duplicate_stdout_filters),
            STDERR: split_filters(options.duplicate_stderr_filters),
        },
        limits=limits_of(options),
        sample=options.sample,
        faults=faults_of(options.inject),
        torch=(bool(hosts) or world.meeting is not None) and (TORCH[0] in preload or look().torch),
        preload=preload,
        executes=executes_ranks(options),
        hooks=not options.no_hooks,
        world=world,
        role=options.role,
        health=health_of(options),
        gpus=options.gpus,
        virtual_local_rank=options.virtual_local_rank,
        bind=options.binds,
        report_bindings=options.report_bindings,
        tf_config=options.tf_config,
        timeline=options.reports.report is not None,
        backend=options.backend or "",
        mpi=options.mpi or "",
    )


def with_gpus(options: RunOptions, hosts: Sequence[Host]) -> RunOptions:
    """The options with a rank per GPU, if they choose GPUs (--gpus), and nothing says how many ranks there are."""
    if not options.gpus:
        return options
    from launchpad.job.gpus import parse_gpus

    parse_gpus(options.gpus)
    counted = any(host.slots is not None or host.mentions > 1 for host in hosts)
    return options if options.nproc is not None or counted else options._replace(nproc="gpu")


def limits_of(options: RunOptions) -> Limits:
    """What ends the job or its ranks, and when they start again. Raises UsageError."""
    before = options.stop_before
    return Limits(
        grace=options.grace,
        stop_signal=options.stop_signal,
        timeout=options.timeout,
        stop_at=None if before is None else stop_time(before, os.environ),
        ends_at=allocation_end(os.environ),
        stall_timeout=options.stall_timeout,
        max_restarts=options.max_restarts,
        restart=options.restart,
        progress=options.progress,
        keep_running=options.hosts.keep_running,
    )


def streams_of(options: RunOptions) -> tuple[str | None, StreamMap, StreamMap]:
    """The folder of the log files, and which streams go to files only, and to files and the console."""
    redirects = StreamMap.parse(options.redirects, "--redirects")
    tee = StreamMap.parse(options.tee, "--tee")
    if options.log_dir is None:
        return None, redirects, tee
    return os.path.abspath(options.log_dir), redirects, tee if redirects or tee else StreamMap(everywhere=3)


def _target(options: RunOptions, cwd: str, *, here: bool) -> Target:
    """The program or function that the ranks run."""
    target = target_of(options, here=here)
    if options.hosts.sync and target.kind in ("script", "function") and target.name.startswith(cwd + "/"):
        target = target._replace(name=os.path.relpath(target.name, cwd))  # the hosts' folder differs
    if options.debug is not None and target.kind == "program":
        raise UsageError(
            f"--debug is for Python programs, and {options.target[0]} is not one; debug it with its own tools"
        )
    return target


def check_together(options: RunOptions) -> None:
    """Raise UsageError for options that make no sense together."""
    if options.debug is not None and options.no_hooks:
        raise UsageError("--debug starts the debugger by a hook in the rank; leave it or --no-hooks out")
    if options.bind is not None and options.numa_binding is not None:
        raise UsageError(
            f"--bind {options.bind} and --numa-binding {options.numa_binding} both say how to bind the ranks; "
            "leave one of them out"
        )
    if options.mpi is not None and options.backend != "mpi":
        raise UsageError(f"--mpi {options.mpi} says which MPI makes the ranks' world; add --backend mpi")
    _check_restarts(options)


def _check_restarts(options: RunOptions) -> None:
    given = "--restart always" if options.restart == "always" else "--progress" if options.progress else ""
    if given and not options.max_restarts.most:
        raise UsageError(f"{given} only works with restarts; add --max-restarts N, or leave it out")
    if options.progress and options.restart == "always":
        raise UsageError("--restart always restarts with or without progress; leave it or --progress out")


def faults_of(text: str) -> Faults | None:
    """Those of --inject, if any. Raises UsageError."""
    if not text:
        return None
    from launchpad.job.faults import parse_faults

    return parse_faults(text, seed=int.from_bytes(os.urandom(2), "big"))


def health_of(options: RunOptions) -> HealthCheck | None:
    """The check of --health, if any. Raises UsageError."""
    if not options.health:
        if options.health_timeout is not None:
            raise UsageError("--health-timeout says how long --health may take; give that, too, or leave it out")
        return None
    from launchpad.job.health import HEALTH_SECONDS, parse_health

    return parse_health(options.health, HEALTH_SECONDS if options.health_timeout is None else options.health_timeout)


def make_world_spec(options: RunOptions, hosts: Sequence[Host]) -> WorldSpec:
    """Where the nodes and the ranks meet, by the options. Raises UsageError."""
    nodes = options.nodes
    if hosts:
        wanted = len(hosts) - options.hosts.spares
        if nodes.node_rank is not None:
            raise UsageError("--node-rank is for launchpads started on each node; leave it out with --hosts, --enter")
        if nodes.nnodes != "1" and parse_nnodes(nodes.nnodes)[1] != wanted:
            raise UsageError(
                f"--nnodes {nodes.nnodes}: the job has {wanted} hosts besides spares; write {wanted}, or LEAST:{wanted}"
            )
        nodes = nodes._replace(nnodes="1")
    return resolve_world(**{name: value for name, value in nodes._asdict().items() if name != "rdzv_secret_file"})


def working_folder(requested: str | None, *, here: bool = True) -> str:
    """Change to the ranks' working folder. Returns its absolute path. Raises UsageError if it can't be entered.

    If no rank runs `here`, it need not exist on this machine.
    """
    if requested is not None:
        if not here and not os.path.isdir(requested):
            if not os.path.isabs(requested):
                raise UsageError(f"--wdir {requested}: no such folder on this machine; give an absolute path")
            return os.path.normpath(requested)
        try:
            os.chdir(requested)
        except OSError as error:
            raise UsageError(f"--wdir {requested}: {error.strerror}; give a folder that can be entered") from None
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder is gone ({error.strerror}); cd to one that exists") from None


def supplies_for(options: HostOptions, spec: JobSpec, closing: ExitStack) -> Supplies:
    """What other machines get, with --sync and --sync-env. Raises UsageError if that can't be copied."""
    from launchpad.head.planner import Supplies  # only once the agent has been asked for

    supplies = Supplies()
    if options.sync_env:  # which takes longer, in a process of its own
        from launchpad.head.environment_source import EnvironmentSource

        environment = EnvironmentSource(spec.python, spec.cwd)
        closing.callback(environment.rest)
        supplies = supplies._replace(environment=environment)
    if options.sync:
        from launchpad.head.folder_listing import list_files

        supplies = supplies._replace(files=list_files(spec.cwd, spec.log_dir))
    return supplies


def target_of(options: RunOptions | ProgramOptions, *, here: bool) -> Target:
    """The target as the options name it; see find_target."""
    return find_target(
        options.target,
        module=options.module,
        no_python=options.no_python and not options.run_path,
        script=options.run_path,
        here=here,
    )


def find_target(
    words: Sequence[str], *, module: bool, no_python: bool, script: bool = False, here: bool = True
) -> Target:
    """The program or function that the command line names. With `script`, it is a Python file, whatever its name.

    Raises UsageError if it can't be run. If no rank runs `here`, it need not exist on this machine.
    """
    if not words:
        raise UsageError("nothing to run; write launchpad run [OPTIONS] script.py [ARGS…]")
    name, args = words[0], tuple(words[1:])
    for word in words:
        if "\0" in word:
            raise UsageError("the command line contains a NUL byte, which can't be passed to a program")
    if module and no_python:
        raise UsageError("-m runs a Python module, --no-python a program; give only one of them")
    function = function_target.split(name)
    if module:
        if function and not function_target.is_file(function[0]):
            function_target.check(name, here=here)
            return Target("function", name, args)
        if function or name.endswith(".py") or "/" in name:
            raise UsageError(f"-m {name}: module names have dots (package.module); for a file, leave -m out")
        return Target("module", name, args)
    if script or (not no_python and (name.endswith(_PYTHON_SUFFIXES) or os.path.isdir(name))):
        return Target("script", _check_script(name) if here else name, args)
    if function and not no_python and not _exists(name):
        if function_target.is_file(function[0]) and here:
            _check_script(function[0])
        function_target.check(name, here=here)
        return Target("function", name, args)
    return Target("program", _check_program(name) if here else name, args)


def _exists(name: str) -> bool:
    """Whether this is a file or a program on PATH whose name only looks like a function's."""
    if os.path.exists(name):
        return True
    from shutil import which

    return "/" not in name and which(name) is not None


def _check_script(path: str) -> str:
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise UsageError(f"{path} is a folder without a __main__.py; name the script in it")
    elif not os.path.exists(path):
        raise UsageError(f"no such script: {path} (looked in {os.getcwd()})")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path} can't be read; check its permissions")
    return path


def _check_program(name: str) -> str:
    if "/" in name:
        if not os.path.exists(name):
            raise UsageError(f"no such program: {name} (looked in {os.getcwd()})")
        if os.path.isdir(name):
            raise UsageError(f"{name} is a folder; name a program")
        if not os.access(name, os.X_OK):
            raise UsageError(f"{name} is not executable; chmod +x it, or give a Python script a name that ends in .py")
        return name
    from shutil import which

    found = which(name)
    if found:
        return found
    if os.path.exists(name):
        hint = f"write ./{name}" if os.access(name, os.X_OK) else f"chmod +x it and write ./{name}"
        raise UsageError(f"{name} is here, but not on PATH; {hint}, or give a Python script a name that ends in .py")
    raise UsageError(f"no such program: {name} (it is neither a .py file nor on PATH)")


def find_python(requested: str | None, environ: Mapping[str, str], own: str, *, here: bool = True) -> str:
    """The ranks' interpreter: --python, PYTHON_EXEC (as torchrun), the active venv's or conda's, else `own`.

    If no rank runs `here`, --python need not exist on this machine.
    """
    if requested and not here:
        return requested
    for source, name in (("--python", requested), ("PYTHON_EXEC", environ.get("PYTHON_EXEC"))):
        if name:
            from shutil import which

            found = which(name)
            if not found:
                raise UsageError(f"{source} {name}: no such interpreter, or not executable; give its path")
            return found if "/" not in name else name
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = os.path.join(environ.get(variable, ""), "bin", "python")
        if environ.get(variable) and os.access(candidate, os.X_OK):
            return candidate
    return own


def collect_environ(
    options: Sequence[str], files: Sequence[str], environ: Mapping[str, str], *, far: bool = False
) -> dict[str, str]:
    """The user's own variables. Options override files. Raises UsageError.

    `far`: some ranks run on other machines, so the variables in job/user_environment.py's FORWARDED are added.
    """
    found: dict[str, str] = forwarded(environ) if far else {}
    for path in files:
        try:
            text = linux.whole_text(path, "utf-8-sig")  # Windows editors begin a file with a mark
        except OSError as error:
            raise UsageError(f"--env-file {path}: {error.strerror}; give a file of VAR=VALUE lines") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--env-file {path}: not UTF-8 text (byte {error.start}); give VAR=VALUE lines") from None
        found.update(parse_file(text, path, environ))
    for option in options:
        found.update(parse_option(option, environ))
    return found
