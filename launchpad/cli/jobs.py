"""Job files on the command line: a file's settings become defaults; several jobs run one after the other."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from launchpad.cli.options import GroupedOption
from launchpad.errors import UsageError
from launchpad.job.jobfile import Settings, choose, parse_jobs
from launchpad.report.console import say_on_stderr

# What says how launchpad is to go about it belongs to the command line.
_NOT_IN_FILES = {"config", "job", "dry-run", "json", "hosts", "hostfile", "add-to-reports", "help"}

# Who ended a job by these did not mean to see the next one.
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


class Result(NamedTuple):
    """How one of several jobs ended."""

    name: str
    code: int
    seconds: float


def read_job_file(path: str, command: click.Command) -> dict[str, Settings]:
    """The file's jobs. Raises UsageError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--config {path}: {reason}; give a job file (TOML)") from None
    return parse_jobs(text, path, _options(command).keys())


def with_job(ctx: click.Context, found: dict[str, Settings], name: str) -> dict[str, Any]:
    """The command's options, read again with the job's settings for defaults. Raises UsageError."""
    path = str(ctx.params["config"])
    target = _apply(choose(found, name, path), path, ctx)
    args = list(ctx.meta["args"])
    ctx.params.clear()
    ctx.command.parse_args(ctx, args)
    return {**ctx.params, "target": ctx.params["target"] or target}


def _apply(settings: Settings, path: str, ctx: click.Context) -> tuple[str, ...]:
    """Make the settings the options' defaults; return the target's words."""
    options = _options(ctx.command)
    defaults: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "target":
            continue
        option = options[name]
        if option.is_flag is not isinstance(value, bool) or (isinstance(value, list) and not option.multiple):
            raise UsageError(f"{path}: {name}: {'write true or false' if option.is_flag else 'write one value'}")
        if option.multiple and isinstance(value, str):
            value = [value]
        try:
            option.type_cast_value(ctx, value)
        except click.BadParameter as error:
            raise UsageError(f"{path}: {name}: {error.message}") from None
        if option.name is not None and option.expose_value:
            defaults[option.name] = value
    ctx.default_map = defaults
    target = settings.get("target", [])
    if isinstance(target, bool):
        raise UsageError(f"{path}: target: write the script, or a list of the script and its arguments")
    return (target,) if isinstance(target, str) else tuple(target)


def sources(ctx: click.Context, path: str | None) -> dict[str, tuple[str, str]]:
    """Each option that was given: its value in words (variables by name only), and where it came from."""
    found = {}
    for parameter in ctx.command.params:
        if (
            not isinstance(parameter, GroupedOption)
            or parameter.name is None
            or parameter.name in ("dry_run", "as_json", "add_to_reports")
        ):
            continue
        source = {
            ParameterSource.COMMANDLINE: "the command line",
            ParameterSource.ENVIRONMENT: str(parameter.envvar),
            ParameterSource.DEFAULT_MAP: str(path),
        }.get(ctx.get_parameter_source(parameter.name) or ParameterSource.DEFAULT)
        if source is not None:
            value = ctx.params.get(parameter.name)
            if parameter.name == "env":
                value = ", ".join(text.partition("=")[0] for text in value or ())
            found[_name(parameter)] = (_in_words(value), source)
    return found


def run_all(names: list[str], args: list[str]) -> int:
    """Run `launchpad run --job NAME ARGS` for each; say how they ended. The first failure's exit code, or 0."""
    results: list[Result] = []
    for name in names:
        say_on_stderr(f"job {name}")
        start = time.monotonic()
        adds = ["--add-to-reports"] if results else []
        code = _run_one([sys.executable, "-m", "launchpad", "run", "--job", name, *adds, *args])
        results.append(Result(name, code, time.monotonic() - start))
        if code in _INTERRUPTED:
            break
    width = max(len(name) for name in names)
    for result in results:
        outcome = "passed" if result.code == 0 else f"failed, exit code {result.code}"
        say_on_stderr(f"{result.name:<{width}}  {result.seconds:7.1f} s  {outcome}")
    for name in names[len(results) :]:
        say_on_stderr(f"{name:<{width}}  {'':9}  not run")
    return next((result.code for result in results if result.code != 0), 0)


def _run_one(argv: list[str]) -> int:
    # Ctrl-C reaches the job by itself, being in our process group; what is sent to us alone is passed on.
    process = subprocess.Popen(argv)
    signal.signal(signal.SIGINT, lambda *_: None)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, _: process.send_signal(number))
    while True:
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # so that a signal that came just before the wait is passed on
            continue
        return code if code >= 0 else 128 - code


def _options(command: click.Command) -> dict[str, click.Option]:
    found: dict[str, click.Option] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            found |= {name[2:]: parameter for name in parameter.opts if name.startswith("--")}
    return {name: option for name, option in found.items() if name not in _NOT_IN_FILES}


def _name(parameter: click.Parameter) -> str:
    return next(name[2:] for name in parameter.opts if name.startswith("--"))


def _in_words(value: Any) -> str:
    if isinstance(value, frozenset | tuple):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
