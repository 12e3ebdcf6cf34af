"""Job files: TOML whose settings become the defaults of `launchpad run`, for one job or several in a row.

    timeout = "2m"              # before the tables: applies to every job

    [jobs.hello]                # a job: its target, and any options by their long names
    target = ["examples/hello.py", "--flag"]
    nproc = 4
    env = { LR = "0.1" }

Without [jobs.…] tables the whole file is one job.
"""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from launchpad.cli.options import GroupedOption
from launchpad.console.message import say_on_stderr
from launchpad.console.terminal import can_draw, drawn, plain_table
from launchpad.errors import UsageError
from launchpad.job.outcome import INTERRUPTED
from launchpad.protocol.events import STDERR
from launchpad.runner.doors import NOT_IN_FILES

# A job's settings, by option name: command-line values, or a bool for a flag. And "roles", which cli/roles.py reads.
Settings = dict[str, Any]

# No file that people write is larger, and some never end.
MOST_CHARACTERS = 4 << 20

# Python writes out no number with more digits.
_MOST_DIGITS = 4300


class JobResult(NamedTuple):
    """The outcome of one job of a file."""

    name: str
    code: int
    seconds: float


def read_job_file(path: str, command: click.Command) -> dict[str, Settings]:
    """The file's jobs. Raises UsageError."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows editors begin a file with a mark
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--config {path}: {reason}; give a job file (TOML)") from None
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"--config {path}: longer than {MOST_CHARACTERS >> 20} Mi characters; give a job file (TOML)")
    return parse_jobs(text, path, _options(command).keys())


def parse_jobs(text: str, path: str, known: Collection[str]) -> dict[str, Settings]:
    """The file's jobs by name, in file order ("" is the only job of a file without tables).

    `known` holds the option names. Raises UsageError that names the file and the key.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}; see https://toml.io for the syntax") from None
    except RecursionError:
        raise UsageError(f"{path}: its tables and lists are nested too deeply") from None
    except ValueError:
        raise UsageError(f"{path}: it contains a number of more than {_MOST_DIGITS} digits") from None
    tables = content.pop("jobs", None)
    shared = _settings(content, path, "", known)
    if tables is None:
        jobs = {"": shared}
    elif isinstance(tables, dict) and tables and all(isinstance(table, dict) for table in tables.values()):
        jobs = {name: shared | _job(table, path, f"jobs.{name}, ", known) for name, table in tables.items()}
    else:
        raise UsageError(f"{path}: jobs: write a table for each job, like [jobs.hello]")
    for name, settings in jobs.items():
        if name and "target" not in settings and "roles" not in settings:
            raise UsageError(f'{path}: jobs.{name} has no target; add target = "script.py"')
    return jobs


def _job(table: Mapping[str, Any], path: str, where: str, known: Collection[str]) -> Settings:
    """A job's settings, and its roles as they are in the file."""
    roles = {"roles": table["roles"]} if "roles" in table else {}
    return _settings({key: value for key, value in table.items() if key != "roles"}, path, where, known) | roles


def choose(jobs: Mapping[str, Settings], name: str, path: str) -> Settings:
    """The job of that name. Raises UsageError that suggests the closest name."""
    if name in jobs:
        return jobs[name]
    raise UsageError(f"{path} has no job {name!r}{_suggestion(name, jobs)}")


def _settings(table: Mapping[str, Any], path: str, where: str, known: Collection[str]) -> Settings:
    found: Settings = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if why := NOT_IN_FILES.get(name.replace("-", "_")):
            raise UsageError(f"{path}: {where}{key}: it belongs on the command line: {why}")
        if name != "target" and name not in known:
            raise UsageError(
                f"{path}: {where}{key}: there is no such option{_suggestion(name, [*known, 'target', 'jobs'])}"
            )
        found[name] = words_of(value, f"{path}: {where}{key}")
        if any("\0" in word for word in _each(found[name])):
            raise UsageError(f"{path}: {where}{key}: it contains a NUL byte, which no program can be given")
    return found


def words_of(value: Any, where: str) -> str | bool | list[str]:
    """A setting as words of a command line. Raises UsageError."""
    try:
        return _as_words(value, where)
    except ValueError:  # tomllib reads hexadecimal ones of any length
        raise UsageError(f"{where}: it contains a number of more than {_MOST_DIGITS} digits") from None


def _as_words(value: Any, where: str) -> str | bool | list[str]:
    match value:
        case bool():
            return value
        case str() | int() | float():
            return str(value)
        case list() if all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in value):
            return [str(item) for item in value]
        case dict() if all(isinstance(item, str | int | float) for item in value.values()):
            return [f"{name}={item}" for name, item in value.items()]
    raise UsageError(f"{where}: write a string, a number, true, false, or a list of strings (for env, a table of them)")


def _each(value: str | bool | list[str]) -> Sequence[str]:
    return value if isinstance(value, list) else [str(value)]


def _suggestion(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; choose from {', '.join(sorted(names))}"


def with_job(ctx: click.Context, found: dict[str, Settings], name: str) -> dict[str, Any]:
    """The command's options, parsed again with the job's settings as defaults. Raises UsageError."""
    path = str(ctx.params["config"])
    target = _apply(choose(found, name, path), path, ctx)
    args = list(ctx.meta["args"])
    ctx.params.clear()
    ctx.command.parse_args(ctx, args)
    return {**ctx.params, "target": ctx.params["target"] or target}


def _apply(settings: Settings, path: str, ctx: click.Context) -> tuple[str, ...]:
    """Make the settings the defaults of the options. Returns the words of the target."""
    options = _options(ctx.command)
    defaults: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ("target", "roles"):
            continue
        option = options[name]
        given, _ = value_of(option, value, f"{path}: {name}", ctx)
        if option.name is not None and option.expose_value:
            defaults[option.name] = given
    ctx.default_map = defaults
    return target_of(settings.get("target", []), f"{path}: target")


def value_of(option: click.Option, value: str | bool | list[str], where: str, ctx: click.Context) -> tuple[Any, Any]:
    """A setting as the option's default, and as its value. Raises UsageError."""
    if option.is_flag is not isinstance(value, bool) or (isinstance(value, list) and not option.multiple):
        raise UsageError(f"{where}: {'write true or false' if option.is_flag else 'write a single value'}")
    given = [value] if option.multiple and isinstance(value, str) else value
    try:
        return given, option.type_cast_value(ctx, given)
    except click.BadParameter as error:
        raise UsageError(f"{where}: {error.message}") from None


def target_of(words: str | bool | list[str], where: str) -> tuple[str, ...]:
    """The words of a target. Raises UsageError."""
    if isinstance(words, bool):
        raise UsageError(f"{where}: write the script, or a list of the script and its arguments")
    return (words,) if isinstance(words, str) else tuple(words)


def sources(ctx: click.Context, path: str | None) -> dict[str, tuple[str, str]]:
    """The value of each option that was set (for variables, their names only), and where it came from."""
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


def run_all(path: str, jobs: Mapping[str, Settings], args: list[str]) -> int:
    """Run `launchpad run --job NAME ARGS` for each job of a file; show how they ended.

    Returns the first failure's code, or 0. Raises UsageError if they would write the same report.
    """
    names = list(jobs)
    pages = [settings["report"] for settings in jobs.values() if "report" in settings]
    if len({str(page) for page in pages}) < len(pages):
        raise UsageError(f"{path}: report: several jobs would write the same page; name a page per job")
    if len(names) > 1 and any(word.partition("=")[0] == "--report" for word in args):
        raise UsageError(
            "--report: each job would overwrite the page of the one before; name a page per job in the file"
        )
    begun = time.time() - 0.1  # the times of files lag behind by up to a tick of the kernel's
    results: list[JobResult] = []
    for name in names:
        say_on_stderr(f"job {name}")
        start = time.monotonic()
        adds = [f"--add-to-reports={begun!r}"] if results else []
        code = _run_one([sys.executable, "-m", "launchpad", "run", "--job", name, *adds, *args])
        results.append(JobResult(name, code, time.monotonic() - start))
        if code in INTERRUPTED:
            break
    _show(names, results)
    return next((result.code for result in results if result.code != 0), 0)


def _show(names: Sequence[str], results: Sequence[JobResult]) -> None:
    """Show the closing table; names without a result were not run."""
    lines = [
        (one.name, f"{one.seconds:.1f} s", "passed" if one.code == 0 else f"failed, exit code {one.code}")
        for one in results
    ]
    lines += [(name, "", "not run") for name in names[len(results) :]]
    if can_draw(STDERR, os.environ):
        _draw(lines)
        return
    width = max(map(len, names))
    for name, seconds, outcome in lines:
        say_on_stderr(f"{name:<{width}}  {seconds:>9}  {outcome}")


def _draw(lines: Sequence[tuple[str, str, str]]) -> None:
    from rich.text import Text

    table = plain_table()
    table.add_column("job", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    styles = {"passed": "green", "not run": "yellow"}
    for name, seconds, outcome in lines:
        table.add_row(Text(name), seconds, Text(outcome, styles.get(outcome, "bold red")))
    os.write(STDERR, drawn(table, STDERR, os.environ))


def _run_one(argv: list[str]) -> int:
    # The job is in our process group, so Ctrl-C reaches it directly. Signals sent only to us are forwarded.
    process = subprocess.Popen(argv)
    signal.signal(signal.SIGINT, lambda *_: None)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda number, _: process.send_signal(number))
    while True:
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # lets a signal that came just before the wait be forwarded
            continue
        return code if code >= 0 else 128 - code


def _options(command: click.Command) -> dict[str, click.Option]:
    """By each of their long names: those that a file may set."""
    found: dict[str, click.Option] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names = {name[2:]: parameter for name in parameter.opts if name.startswith("--")}
            if not any(name.replace("-", "_") in NOT_IN_FILES for name in names):
                found |= names
    return found


def _name(parameter: click.Parameter) -> str:
    return next(name[2:] for name in parameter.opts if name.startswith("--"))


def _in_words(value: Any) -> str:
    if type(value) in (frozenset, tuple):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
