"""Which options of `launchpad run` launchpad.run and launchpad.ranks take, with their types (why no others: doors.py).

They mean what they mean on the command line, and where one is not given, the same default holds.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, get_args

from launchpad.errors import UsageError
from launchpad.job.spec import MpiLibrary
from launchpad.runner.options import HostOptions, ReportOptions, RunOptions, WayIn


class SharedOptions(TypedDict, total=False):
    """Options of both, besides their own parameters. Times are in seconds."""

    hostfile: str
    include: str
    exclude: str
    ssh: WayIn
    accept_new_host_keys: bool
    sync_env: bool
    heartbeat_timeout: float
    keep_running: float
    env_file: str | Sequence[str]
    role: str
    mpi: MpiLibrary
    gpus: int | str | Sequence[int | str]
    health: str
    health_timeout: float
    virtual_local_rank: bool
    tf_config: bool
    sample: float
    grace: float
    stop_signal: int | str
    log_dir: str
    report: str
    junit: str
    notify: str


class JobOptions(SharedOptions, total=False):
    """Those of launchpad.run alone."""

    stall_timeout: float
    spares: int
    nnodes: str
    inject: str


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def is_count(value: Any) -> bool:
    """Whether this is a number of things, or a rank."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, Sequence) and all(_is_text(one) for one in value))


def _are_gpus(value: Any) -> bool:
    if isinstance(value, int):
        return is_count(value) and value > 0
    if isinstance(value, str):
        return value != ""
    return isinstance(value, Sequence) and len(value) > 0 and all(_is_text(one) or is_count(one) for one in value)


def _one_of(kind: Any) -> tuple[Callable[[Any], bool], str]:
    words = [word for word in get_args(kind) if word]
    return (lambda value: value in words), f"give one of {', '.join(map(repr, words))}"


_TIME = (_is_time, "give a positive number of seconds")
_TEXT = (_is_text, "give a text")
_FLAG = (_is_flag, "give True or False")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("heartbeat_timeout", "keep_running", "grace", "stall_timeout", "health_timeout"), _TIME),
    **dict.fromkeys(("hostfile", "include", "exclude", "role", "log_dir", "report", "junit", "notify"), _TEXT),
    **dict.fromkeys(("nnodes", "inject", "health"), _TEXT),
    **dict.fromkeys(("accept_new_host_keys", "sync_env", "virtual_local_rank", "tf_config"), _FLAG),
    "sample": (lambda value: value == 0 or _is_time(value), "give a number of seconds, or 0 for none"),
    "spares": (is_count, "give a number of hosts"),
    "env_file": (_are_texts, "give a path, or a list of paths"),
    "gpus": (_are_gpus, "give a number of GPUs, 'free', 'free:4', or a list of numbers or UUIDs"),
    "ssh": _one_of(WayIn),
    "mpi": _one_of(MpiLibrary),
    "stop_signal": (lambda value: isinstance(value, int | str), "give a signal's name or number"),
}


def run_options(
    name: str, given: Mapping[str, Any], kind: type[Any], refused: Mapping[str, str], hosts: HostOptions
) -> RunOptions:
    """The options that were `given` to the function `name`, for these `hosts`; `kind` is the class of its options.

    Raises UsageError for others, with the reason in `refused`, and for values that make no sense.
    """
    for option, value in given.items():
        if option not in kind.__annotations__:
            why = f": {refused[option]}" if option in refused else ""
            raise UsageError(f"{name} has no parameter {option}{why}")
        is_right, how = _CHECKS[option]
        if not is_right(value):
            raise UsageError(f"{option}={value!r}: {how}")
    values: dict[str, Any] = dict(given)
    if "stop_signal" in values:
        values["stop_signal"] = _signal(values["stop_signal"])
    if "gpus" in values:
        chosen = values["gpus"]
        values["gpus"] = str(chosen) if isinstance(chosen, str | int) else "".join(f"{one}," for one in chosen)
    if isinstance(files := values.get("env_file"), str):
        values["env_file"] = (files,)
    of_hosts = {option: values.pop(option) for option in HostOptions._fields if option in values}
    of_reports = {option: values.pop(option) for option in ReportOptions._fields if option in values}
    nodes = RunOptions().nodes._replace(**({"nnodes": values.pop("nnodes")} if "nnodes" in values else {}))
    return RunOptions(hosts=hosts._replace(**of_hosts), nodes=nodes, reports=ReportOptions(**of_reports), **values)


def _signal(value: int | str) -> int:
    """A signal that a program can handle. Raises UsageError."""
    try:
        found = signal.Signals(value) if isinstance(value, int) else signal.Signals[f"SIG{value.removeprefix('SIG')}"]
    except (KeyError, ValueError):
        raise UsageError(f"stop_signal={value!r}: there is no such signal; write 'USR1', or a number") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"stop_signal={value!r}: it can't be caught, so no program can save its state on it")
    return found.value
