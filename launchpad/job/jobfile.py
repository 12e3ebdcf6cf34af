"""Job files: the options of `launchpad run` as TOML, for one job or several named ones. Pure: text in, settings out.

    timeout = "2m"              # before the tables: applies to every job

    [jobs.hello]                # a job: its target, and any options by their long names
    target = ["examples/hello.py", "--flag"]
    nproc = 4
    env = { LR = "0.1" }

Without [jobs.…] tables the whole file is one job.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from launchpad.errors import UsageError

# A job's settings, by option name: command-line values, or a bool for a flag.
Settings = dict[str, str | bool | list[str]]


def parse_jobs(text: str, path: str, known: Collection[str]) -> dict[str, Settings]:
    """The file's jobs by name, in file order ("" is the only job of a file without tables).

    `known` holds the option names. Raises UsageError that names the file and the key.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}; see https://toml.io for the syntax") from None
    tables = content.pop("jobs", None)
    shared = _settings(content, path, "", known)
    if tables is None:
        jobs = {"": shared}
    elif isinstance(tables, dict) and tables and all(isinstance(table, dict) for table in tables.values()):
        jobs = {name: shared | _settings(table, path, f"jobs.{name}, ", known) for name, table in tables.items()}
    else:
        raise UsageError(f"{path}: jobs: write a table for each job, like [jobs.hello]")
    for name, settings in jobs.items():
        if name and "target" not in settings:
            raise UsageError(f'{path}: jobs.{name} has no target; add target = "script.py"')
    return jobs


def choose(jobs: Mapping[str, Settings], name: str, path: str) -> Settings:
    """The job of that name. Raises UsageError that suggests the closest name."""
    if name in jobs:
        return jobs[name]
    raise UsageError(f"{path} has no job {name!r}{_suggestion(name, jobs)}")


def _settings(table: Mapping[str, Any], path: str, where: str, known: Collection[str]) -> Settings:
    found: Settings = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name != "target" and name not in known:
            raise UsageError(
                f"{path}: {where}{key}: there is no such option{_suggestion(name, [*known, 'target', 'jobs'])}"
            )
        found[name] = _words(value, f"{path}: {where}{key}")
    return found


def _words(value: Any, where: str) -> str | bool | list[str]:
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


def _suggestion(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; choose from {', '.join(sorted(names))}"
