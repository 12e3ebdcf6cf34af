"""`launchpad bench`: time collective operations over each backend, and the links between the ranks."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

import launchpad
from launchpad.bench.operations import ALGORITHMS, OPERATIONS
from launchpad.bench.results import Request, Unavailable, to_line
from launchpad.cli import run
from launchpad.cli.hosts import is_here, read_hosts
from launchpad.cli.options import GroupedCommand, GroupedOption, seconds
from launchpad.errors import LaunchpadError, UsageError
from launchpad.head.preload import TORCH
from launchpad.report.bench_display import Display
from launchpad.report.console import say_on_stderr

BACKENDS = ("gloo", "nccl", "mpi")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")

# Ranks where neither --nproc nor hosts are given.
RANKS = 4

# Options that mean here what they mean to `launchpad run`.
_SHARED = {
    *("nproc", "python", "wdir", "env", "env_file", "quiet", "grace", "timeout"),
    *("hosts", "hostfile", "include", "exclude", "ssh_config", "accept_new_host_keys", "heartbeat_timeout"),
}

# Exit codes of jobs that somebody has ended: there is no sense in the next one.
_INTERRUPTED = (129, 130, 141, 143)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_EPILOG = """\b
Examples:
  launchpad bench                                  4 ranks here, every backend that can be had
  launchpad bench -n 8 --op all_reduce --max 64M
  launchpad bench -H a:4,b:4 --backend gloo,mpi    and the links between a and b
  launchpad bench --plot out.png --json > out.json

\b
A size is the whole buffer: what every rank has after all_gather, and before
reduce_scatter and all_to_all. algbw is size / time, busbw that times a factor
which makes it comparable to a link's bandwidth (nccl-tests, PERFORMANCE.md).
time: the median over all calls, each as long as its slowest rank took.

\b
Exit code: 0; 1 where a result was wrong; 2 bad input, or a backend that was
asked for can't be had; else a failed job's, as of `launchpad run`.
"""


def size(text: str) -> int:
    """Bytes; k, m or g (of 1024), with an i or a b behind it or without, may follow the number."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = _UNITS.get(number[-1:] if number[-1:].isalpha() else "")
    digits = number.rstrip("kmg")
    if not unit or not digits.isdecimal() or not int(digits):
        raise click.BadParameter(f"{text!r} is not a size; give bytes (4096), or 4K, 1M, 1G")
    return int(digits) * unit


def sizes(text: str) -> tuple[int, ...]:
    """Sizes separated by commas, in order."""
    return tuple(dict.fromkeys(size(part) for part in text.split(",")))


def operations(text: str) -> tuple[str, ...]:
    """Names of operations separated by commas."""
    return _names(text, "an operation", OPERATIONS)


def backends(text: str) -> tuple[str, ...]:
    """Names of backends separated by commas."""
    return _names(text, "a backend", BACKENDS)


def _names(text: str, what: str, known: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in found:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not {what}; there are {', '.join(known)}")
    if not found:
        raise click.BadParameter(f"names nothing; there are {', '.join(known)}")
    return found


_what = partial(click.option, cls=GroupedOption, group="What is measured")
_shown = partial(click.option, cls=GroupedOption, group="How it is shown")


@click.command(
    "bench",
    cls=GroupedCommand,
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
    f"Of: {', '.join(OPERATIONS)}.",
)
@_what(
    "--backend",
    "backends",
    type=backends,
    metavar="gloo,nccl,mpi",
    help="Default: gloo, and the others where they can be had.",
)
@_what("--sizes", type=sizes, metavar="BYTES,…", help="These, like 4,64K,1M; instead of --min, --max and --factor.")
@_what("-b", "--min", "least", type=size, metavar="BYTES", help="The first size. Default: 4.")
@_what("-e", "--max", "most", type=size, metavar="BYTES", help="No size is larger. Default: 8M.")
@_what("-f", "--factor", type=click.IntRange(min=2), metavar="N", help="From one size to the next. Default: 8.")
@_what("-d", "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of the elements.")
@_what(
    *("--seconds", "-s"),
    type=seconds,
    default="40",
    show_default=True,
    metavar="SECONDS",
    help="For measuring, shared by all points; every one has a few calls, however long they take.",
)
@_shown("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@_shown("--plot", metavar="FILE.png", help="Draw time over size, with the line that fits; needs matplotlib.")
def command(**options: Any) -> int:
    """Time collective operations, check their results, and measure the links between the nodes.

    The ranks run as those of `launchpad run` do, here (4, unless --nproc says otherwise) or on hosts by ssh; one job
    for each backend.
    """
    hosts = read_hosts({"sync": False, **options})
    far = not all(map(is_here, hosts))
    plot = options["plot"]
    if plot is not None:
        from launchpad.report import bench_plot

        bench_plot.check()
        plot = os.path.abspath(plot)
        if not os.path.isdir(os.path.dirname(plot)):
            raise UsageError(f"--plot {options['plot']}: there is no folder {os.path.dirname(plot)}; make it first")
    request = Request(
        backend="",
        operations=_operations(options["operations"]),
        sizes=_sizes(options),
        dtype=options["dtype"],
        seconds=options["seconds"],
        hosts=tuple(host.name for host in hosts),
    )
    options |= {name: os.path.abspath(options[name]) for name in ("hostfile", "ssh_config") if options[name]}
    options["env_file"] = tuple(map(os.path.abspath, options["env_file"]))
    if "/" in (options["python"] or ""):
        options["python"] = os.path.abspath(options["python"])
    shared = {name: value for name, value in options.items() if name in _SHARED}
    if far and options["wdir"] is None:
        shared["wdir"] = "/"  # the ranks read nothing there, and every host has it
    if not hosts and options["nproc"] is None:
        shared["nproc"] = RANKS
    display = Display(as_json=options["as_json"], quiet=options["quiet"])
    with tempfile.TemporaryDirectory(prefix="launchpad-bench-") as folder:
        if not hosts or any(map(is_here, hosts)):
            shared = _with_launchpad(shared, folder)
        code = _run_all(display, request, options["backends"], shared)
    display.finish()
    rows = display.rows
    if plot is not None and rows:
        bench_plot.draw(rows, plot)
    if any(row.wrong for row in rows):
        say_on_stderr("wrong results: see the column correct")
        return code or 1
    return code


def _operations(asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those asked for, else the usual ones, of which the textbook's may not be there."""
    if asked:
        return asked
    has_algorithms = importlib.util.find_spec(f"launchpad.collectives.{ALGORITHMS}") is not None
    return tuple(name for name, one in OPERATIONS.items() if one.usual and (has_algorithms or not one.is_algorithm))


def _sizes(options: dict[str, Any]) -> tuple[int, ...]:
    span = {"--min": options["least"], "--max": options["most"], "--factor": options["factor"]}
    if options["sizes"]:
        if given := [name for name, value in span.items() if value is not None]:
            raise UsageError(f"--sizes names every size; leave out {' and '.join(given)}, or --sizes")
        found: tuple[int, ...] = options["sizes"]
        return found
    least, most, factor = options["least"] or 4, options["most"] or 8 << 20, options["factor"] or 8
    if most < least:
        raise UsageError(f"--max {most} is less than --min {least}; give a larger one")
    steps = []
    while least <= most:
        steps.append(least)
        least *= factor
    return tuple(steps)


def _with_launchpad(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """The options, with a PYTHONPATH by which ranks on this machine find this launchpad, and nothing else of ours.

    Their interpreter may be another than ours, without it. To other hosts it is sent (transport/ssh/parcel.py).
    """
    os.symlink(Path(launchpad.__file__).parent, Path(folder, "launchpad"))
    given = [text.partition("=")[2] for text in options["env"] if text.startswith("PYTHONPATH=")]
    theirs = given[-1] if given else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [folder, theirs]))
    return {**options, "env": (*options["env"], f"PYTHONPATH={path}")}


def _run_all(display: Display, request: Request, asked: tuple[str, ...] | None, options: dict[str, Any]) -> int:
    """One job for each backend; the first failure's exit code, or 2 where one that was asked for is missing."""
    code, left = 0, request.seconds
    to_come = list(asked or BACKENDS)
    while to_come:
        backend = to_come.pop(0)
        if why := display.missing.get(backend):
            if asked:
                display.unavailable(Unavailable(backend, why))
            continue
        # Which others can be had is known once the first job has told.
        likely = len([one for one in to_come if one not in display.missing]) if asked or display.missing else 1
        share = left / (1 + likely)
        left -= share
        try:
            ended = _run_one(display, replace(request, backend=backend, seconds=share), options)
        except LaunchpadError as error:  # a host that is gone, for one; what was measured before is still shown
            if not display.found:
                raise
            say_on_stderr(f"error: {error}")
            return code or error.exit_code
        if ended in _INTERRUPTED:
            return ended
        if not display.is_unavailable(backend):
            code = code or ended
        if not asked and display.is_unavailable(backend) and not display.rows:
            return 2  # without torch, or with a single rank, the others can't be had either
    if asked and any(map(display.is_unavailable, asked)):
        code = code or 2
    return code if display.rows else code or 2


def _run_one(display: Display, request: Request, options: dict[str, Any]) -> int:
    arguments = ["--backend", request.backend, "--preload", ",".join(TORCH), "-m"]
    with run.command.make_context("run", [*arguments, "launchpad.bench", to_line(request)]) as ctx:
        return run.run_job(ctx, {**ctx.params, **options}, display.sink)


for _option in run.command.params:
    if _option.name == "nproc":  # the one whose default is another here
        assert isinstance(_option, GroupedOption)
        _option = copy.copy(_option)
        _option.help = (_option.help or "").replace("Default: 1.", f"Default: {RANKS}; 1 on a host without a number.")
    if _option.name in _SHARED:
        command.params.append(_option)
