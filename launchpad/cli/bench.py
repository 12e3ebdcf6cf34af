"""`launchpad bench`: time collective operations on each backend, and measure the links between ranks."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import click

import launchpad
from launchpad.bench import plot as plotting
from launchpad.bench.display import Display
from launchpad.bench.messages import BenchRequest, Unavailable, to_line
from launchpad.bench.operations import ALGORITHMS, OPERATIONS
from launchpad.cli import run
from launchpad.cli.options import GroupedCommand, GroupedOption, seconds
from launchpad.console.message import say_on_stderr
from launchpad.errors import LaunchpadError, UsageError
from launchpad.job.outcome import INTERRUPTED
from launchpad.job.spec import Backend
from launchpad.runner.connect import read_hosts
from launchpad.runner.imports import TORCH
from launchpad.runner.job import run_job
from launchpad.runner.links import LocalAgent
from launchpad.runner.options import RunOptions, with_absolute_paths
from launchpad.runner.spec import find_python

BACKENDS = ("gloo", "nccl", "mpi")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")

# Ranks if neither --nproc nor hosts are given.
RANKS = 4

# Options of `launchpad run`, which mean the same here.
_SHARED = {
    *("nproc", "gpus", "python", "wdir", "env", "env_file", "quiet", "grace", "timeout"),
    *("hosts", "hostfile", "include", "exclude", "enter", "ssh", "ssh_config", "accept_new_host_keys"),
    "heartbeat_timeout",
}

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_EPILOG = """\b
Examples:
  launchpad bench                                  4 ranks here, every available backend
  launchpad bench -n 8 --op all_reduce --max 64M
  launchpad bench -H a:4,b:4 --backend gloo,mpi    also measures the links between a and b
  launchpad bench --plot out.png --json > out.json

\b
size: the whole buffer, which each rank has after all_gather, or before
reduce_scatter and all_to_all. time: the median over all calls, where a call
takes as long as its slowest rank. algbw: size / time. busbw: algbw times a
factor that makes it comparable to link bandwidth (nccl-tests, PERFORMANCE.md).

\b
Exit code: 0; 1 a result was wrong; 2 bad input, or a requested backend is not
available; else that of the failed job, as for `launchpad run`.
"""


def size(text: str) -> int:
    """A size in bytes; the number may be followed by k, m or g (powers of 1024), as in 4k, 4kb or 4KiB."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = _UNITS.get(number[-1:] if number[-1:].isalpha() else "")
    digits = number[:-1] if number[-1:].isalpha() else number
    if not unit or not digits.isdecimal() or len(digits) > 18 or not 0 < int(digits) * unit < 1 << 63:
        raise click.BadParameter(f"{text!r} is not a size; give bytes (4096), or 4K, 1M, 1G")
    return int(digits) * unit


def sizes(text: str) -> tuple[int, ...]:
    """Comma-separated sizes, in order, without duplicates."""
    return tuple(dict.fromkeys(size(part) for part in text.split(",")))


def operations(text: str) -> tuple[str, ...]:
    """Comma-separated names of operations."""
    return _names(text, "an operation", OPERATIONS)


def backends(text: str) -> tuple[str, ...]:
    """Comma-separated names of backends."""
    return _names(text, "a backend", BACKENDS)


def _names(text: str, what: str, known: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not {what}; choose from {', '.join(known)}")
    if not found:
        raise click.BadParameter(f"no name given; choose from {', '.join(known)}")
    return found


_what = partial(click.option, cls=GroupedOption, group="What to measure")
_shown = partial(click.option, cls=GroupedOption, group="How to show it")


@click.command(
    "bench",
    cls=GroupedCommand,
    short_help="Time collectives, and the links between hosts.",
    epilog=_EPILOG,
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@_what(
    "--op",
    "operations",
    type=operations,
    metavar="NAME,…",
    help=f"Default: all but {', '.join(name for name, one in OPERATIONS.items() if not one.usual)}. "
    f"All: {', '.join(OPERATIONS)}.",
)
@_what(
    "--backend",
    "backends",
    type=backends,
    metavar="gloo,nccl,mpi",
    help="Default: all that are available.",
)
@_what("--sizes", type=sizes, metavar="BYTES,…", help="Sizes, like 4,64K,1M; replaces --min, --max and --factor.")
@_what("-b", "--min", "least", type=size, metavar="BYTES", help="Smallest size. Default: 4.")
@_what("-e", "--max", "most", type=size, metavar="BYTES", help="Largest size. Default: 8M.")
@_what("-f", "--factor", type=click.IntRange(min=2), metavar="N", help="Factor between sizes. Default: 8.")
@_what("-d", "--dtype", type=click.Choice(DTYPES), default="float32", help="Type of the elements. Default: float32.")
@_what(
    *("--seconds", "-s"),
    type=seconds,
    default="40",
    metavar="SECONDS",
    help="Time for all measurements together; each gets at least a few calls, however long they take. Default: 40.",
)
@_shown("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@_shown("--plot", metavar="FILE.png", help="Plot time over size with a fitted line; needs matplotlib.")
def command(**options: Any) -> int:
    """Time collective operations, check their results, and measure the links between the nodes.

    Each backend is one job, which runs as `launchpad run` would run it: on this machine (4 ranks by default) or on
    other hosts over SSH.
    """
    run_options = run.on_allocation(run.typed({name: options[name] for name in _SHARED}))
    hosts = read_hosts(run_options.hosts, run_options.nproc)
    entered = bool(run_options.hosts.enter)
    far = entered or not all(host.here for host in hosts)
    plot = options["plot"]
    if plot is not None:
        plotting.check()
        plot = os.path.abspath(plot)
        if not os.path.isdir(os.path.dirname(plot)):
            raise UsageError(f"--plot {options['plot']}: there is no folder {os.path.dirname(plot)}; create it first")
    request = BenchRequest(
        backend="",
        operations=_operations(options["operations"]),
        sizes=_sizes(options),
        dtype=options["dtype"],
        seconds=options["seconds"],
        hosts=tuple(host.name for host in hosts),
    )
    run_options = _absolute(run_options)
    run_options = run_options._replace(reports=run_options.reports._replace(no_advice=True))  # the tables tell more
    if far and run_options.wdir is None:
        run_options = run_options._replace(wdir="/")  # the ranks read nothing there, and every host has this folder
    if run_options.nproc is None and run_options.hosts.hosts is None and run_options.hosts.hostfile is None:
        run_options = run_options._replace(nproc=RANKS)
    display = Display(as_json=options["as_json"], quiet=options["quiet"])
    with tempfile.TemporaryDirectory(prefix="launchpad-bench-") as folder:
        if not entered and (not hosts or any(host.here for host in hosts)) and not _is_installed(run_options):
            run_options = _with_launchpad(run_options, folder)
        code = _run_all(display, request, options["backends"], run_options)
    display.finish()
    rows = display.rows
    if plot is not None and rows:
        plotting.draw(rows, plot)
    if any(row.wrong for row in rows):
        say_on_stderr("some results are wrong: see the column 'correct'")
        return code or 1
    return code


def _operations(requested: tuple[str, ...] | None) -> tuple[str, ...]:
    """The requested operations, else the usual ones; the textbook algorithms only if they are installed."""
    if requested:
        return requested
    has_algorithms = importlib.util.find_spec(f"launchpad.collectives.{ALGORITHMS}") is not None
    return tuple(name for name, one in OPERATIONS.items() if one.usual and (has_algorithms or not one.is_algorithm))


def _sizes(options: dict[str, Any]) -> tuple[int, ...]:
    span = {"--min": options["least"], "--max": options["most"], "--factor": options["factor"]}
    if options["sizes"]:
        if given := [name for name, value in span.items() if value is not None]:
            raise UsageError(f"--sizes lists all sizes; leave out {' and '.join(given)}, or --sizes")
        found: tuple[int, ...] = options["sizes"]
        return found
    least, most, factor = options["least"] or 4, options["most"] or 8 << 20, options["factor"] or 8
    if most < least:
        raise UsageError(f"--max {most} is less than --min {least}; give a larger --max")
    steps = []
    while least <= most:
        steps.append(least)
        least *= factor
    return tuple(steps)


def _absolute(options: RunOptions) -> RunOptions:
    """The options with absolute paths, because the first job changes the working folder."""
    python = os.path.abspath(options.python) if options.python and "/" in options.python else options.python
    return with_absolute_paths(options)._replace(python=python)


def _is_installed(options: RunOptions) -> bool:
    """Whether the ranks on this machine find this launchpad anyway: their interpreter is ours, and it is installed.

    A PYTHONPATH that differs from run to run would keep them from being forked from an image (`launchpad warm`).
    """
    if options.env_file or any(text.startswith("PYTHON") for text in options.env):
        return False
    python = find_python(options.python, os.environ, sys.executable)
    in_the_folder = Path(launchpad.__file__).parent.parent == Path(sys.path[0]).absolute()
    return os.path.abspath(python) == os.path.abspath(sys.executable) and not in_the_folder


def _with_launchpad(options: RunOptions, folder: str) -> RunOptions:
    """The options, with this launchpad, and nothing else of ours, on the PYTHONPATH of the ranks on this machine.

    Their interpreter may be another one without launchpad. Other hosts are sent a copy (transport/ssh/bundle.py).
    """
    os.symlink(Path(launchpad.__file__).parent, Path(folder, "launchpad"))
    given = [text.partition("=")[2] for text in options.env if text.startswith("PYTHONPATH=")]
    theirs = given[-1] if given else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [folder, theirs]))
    return options._replace(env=(*options.env, f"PYTHONPATH={path}"))


def _run_all(display: Display, request: BenchRequest, requested: tuple[str, ...] | None, options: RunOptions) -> int:
    """Run one job per backend. Returns the first failure's exit code, or 2 if a requested backend is missing."""
    code, left = 0, request.seconds
    backlog = list(requested or BACKENDS)
    while backlog:
        backend = backlog.pop(0)
        if why := display.missing.get(backend):
            if requested:
                display.unavailable(Unavailable(backend, why))
            continue
        # The first job reports which other backends are available.
        likely = len([one for one in backlog if one not in display.missing]) if requested or display.missing else 1
        share = left / (1 + likely)
        left -= share
        try:
            ended = _run_one(display, replace(request, backend=backend, seconds=share), options)
        except LaunchpadError as error:  # a lost host, say; show what was measured before
            if not display.found:
                raise
            say_on_stderr(f"error: {error}")
            return code or error.exit_code
        if ended in INTERRUPTED:
            return ended
        if not display.is_unavailable(backend):
            code = code or ended
        if not requested and display.is_unavailable(backend) and not display.rows:
            return 2  # no torch, or a single rank: the others won't work either
    if requested and any(map(display.is_unavailable, requested)):
        code = code or 2
    return code if display.rows else code or 2


def _run_one(display: Display, request: BenchRequest, options: RunOptions) -> int:
    job = options._replace(
        target=("launchpad.bench", to_line(request)),
        module=True,
        backend=cast("Backend", request.backend),
        preload=",".join(TORCH),
    )
    local = LocalAgent()
    display.begin(request.backend)
    with ExitStack() as closing:
        closing.callback(display.rest)
        closing.callback(local.close)
        return run_job(job, local, closing, taker=display.sink)


for _option in run.command.params:
    if _option.name == "nproc":  # bench has another default
        assert isinstance(_option, GroupedOption)
        _option = copy.copy(_option)
        _option.help = (_option.help or "").replace("Default: 1;", f"Default: {RANKS}; 1 on a host without a number;")
    if _option.name in _SHARED:
        command.params.append(_option)
