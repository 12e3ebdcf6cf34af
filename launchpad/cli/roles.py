"""Roles in a job file: [jobs.NAME.roles.ROLE], a world each.

[jobs.rl.roles.rollout]
target = "serve.py"
service = true            # ends when the other roles have ended
ports = ["http"]          # held for it: LAUNCHPAD_PORT_HTTP, and LAUNCHPAD_ROLLOUT_HTTP for all
ready = "http:http/health"

[jobs.rl.roles.train]
target = ["train.py", "--lr", "0.1"]
nproc = 2
after = "rollout"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from launchpad.errors import UsageError
from launchpad.job.duration import parse_seconds
from launchpad.job.roles import ROLE_NAMES, check_ports, is_role_name, parse_ready
from launchpad.job.spec import READY_SECONDS, Ready
from launchpad.runner.options import RunOptions
from launchpad.runner.roles import RoleOptions

# The options that a role has of its own, by their names in a file.
_OPTIONS = (
    *("target", "nproc", "module", "no-python", "run-path", "python", "wdir", "env", "env-file", "preload"),
    *("max-restarts", "restart", "progress", "stop-signal", "grace", "backend", "mpi"),
)
_ONLY_HERE = ("replicas", "hosts", "gpus", "service", "ports", "ready", "ready-timeout", "after")

Table = Mapping[str, Any]

# More replicas, or GPUs for a rank, than anybody has.
MOST = 9_999


def read_roles(tables: Any, job: RunOptions, command: click.Command, where: str) -> list[RoleOptions]:
    """The roles of a job; `job` has what they share. Raises UsageError that names the file and the key."""
    if not (isinstance(tables, dict) and tables and all(isinstance(table, dict) for table in tables.values())):
        raise UsageError(f"{where}: write a table for each role, like [{where.partition(': ')[2]}.train]")
    if job.target:
        raise UsageError(
            f"{where}: each role has its own target; leave out the one beside the roles or on the command line"
        )
    roles = [_role(name, table, job, command, f"{where}.{name}") for name, table in tables.items()]
    if not any(role.options.backend == "mpi" for role in roles):
        return roles
    return [role if _has_mpi(role, job) else role._replace(options=role.options._replace(mpi=None)) for role in roles]


def _has_mpi(role: RoleOptions, job: RunOptions) -> bool:
    """Whether `mpi` concerns this role: it uses MPI, or names one itself."""
    return role.options.backend == "mpi" or role.options.mpi != job.mpi


def _role(name: str, table: Table, job: RunOptions, command: click.Command, where: str) -> RoleOptions:
    if not is_role_name(name):
        raise UsageError(f"{where}: {ROLE_NAMES}")
    settings = {key.replace("_", "-"): value for key, value in table.items()}
    for key in settings:
        if key not in (*_OPTIONS, *_ONLY_HERE):
            known = ", ".join((*_OPTIONS, *_ONLY_HERE))
            raise UsageError(f"{where}, {key}: it is no setting of a role, which are {known}; others are the job's")
    if "target" not in settings:
        raise UsageError(f'{where} has no target; add target = "script.py"')
    service = _flag(settings, "service", where)
    ports = _names(settings, "ports", where)
    check_ports(ports, f"{where}, ports")
    seconds = _seconds(settings, where)
    ready = Ready("started" if service else "ended", seconds=seconds)
    if "ready" in settings:
        ready = parse_ready(str(settings["ready"]), ports, seconds, f"{where}, ready")
    own = _options(settings, job, command, where)
    after, hosts = _names(settings, "after", where), ",".join(_names(settings, "hosts", where))
    replicas = _number(settings, "replicas", 1, where) or 1
    gpus = _number(settings, "gpus", 0, where)
    return RoleOptions(name, own, service, ports, ready, after, replicas, hosts, gpus)


def _options(settings: Table, job: RunOptions, command: click.Command, where: str) -> RunOptions:
    """The job's options, with those that the role sets."""
    from launchpad.cli.job_file import target_of, value_of, words_of

    by_name = {name[2:]: param for param in command.params for name in param.opts if name.startswith("--")}
    changed: dict[str, Any] = {}
    with click.Context(command, info_name="run") as ctx:
        for key in _OPTIONS:
            if key not in settings:
                continue
            place = f"{where}, {key}"
            value = words_of(settings[key], place)
            if key == "target":
                changed["target"] = target_of(value, place)
                continue
            option = by_name[key]
            assert isinstance(option, click.Option)
            _, changed[str(option.name)] = value_of(option, value, place, ctx)
    for name in ("env", "env_file"):
        changed[name] = (*getattr(job, name), *changed.get(name, ()))
    return job._replace(**changed)


def _number(settings: Table, key: str, least: int, where: str) -> int | None:
    value = settings.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST):
        raise UsageError(f"{where}, {key}: write a number from {least} to {MOST}")
    return value


def _flag(settings: Table, key: str, where: str) -> bool:
    value = settings.get(key, False)
    if not isinstance(value, bool):
        raise UsageError(f"{where}, {key}: write true or false")
    return value


def _names(settings: Table, key: str, where: str) -> tuple[str, ...]:
    value = settings.get(key, [])
    names = [value] if isinstance(value, str) else value
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"{where}, {key}: write a name, or a list of names")
    return tuple(names)


def _seconds(settings: Table, where: str) -> float:
    value = settings.get("ready-timeout", READY_SECONDS)
    try:
        seconds = parse_seconds(str(value))
    except ValueError:
        seconds = 0.0
    if not seconds > 0 or isinstance(value, bool):
        raise UsageError(f"{where}, ready-timeout: {value!r} is not a time above 0; write 30, 5m or 2h")
    return seconds
