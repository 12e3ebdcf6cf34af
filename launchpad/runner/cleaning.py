"""`launchpad clean`: lists and removes what --sync and --sync-env have left on hosts."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from launchpad.errors import NodeError, failed_hosts
from launchpad.job.hosts import Host
from launchpad.protocol.commands import ListKept, RemoveKept
from launchpad.protocol.events import KeptListed, KeptRemoved
from launchpad.runner.options import HostOptions
from launchpad.runner.reaching import reached

# A folder of many files on a slow disk.
_SECONDS = 600.0


class KeptFolder(NamedTuple):
    """A copy or an environment on a host."""

    host: str
    name: str
    size: int  # bytes
    own: int  # bytes that no other environment there has, too
    used: float  # when, in seconds since 1970
    origin: str  # HOST:FOLDER that it is an environment of; "" of a copy, and of what is not whole


class Cleaned(NamedTuple):
    """What came of it."""

    removed: list[KeptFolder]
    left: list[KeptFolder]
    problem: str  # why some of it could not be removed; "" if all was


def clean(options: HostOptions, hosts: Sequence[Host], patterns: Sequence[str]) -> Cleaned:
    """Remove what matches a pattern; without hosts, on this machine. Raises NodeError if a host can't be reached."""
    with reached(options, hosts) as (bringup, names):
        listed = bringup.ask(dict.fromkeys(range(len(names)), ListKept()), KeptListed, _SECONDS)
        if problem := _problem(names, [one.problem for one in listed]):
            raise NodeError(problem)
        folders = [KeptFolder(name, *row) for name, one in zip(names, listed, strict=True) for row in one.folders]
        chosen = [one for one in folders if any(fnmatch.fnmatchcase(one.name, pattern) for pattern in patterns)]
        if not chosen:
            return Cleaned([], folders, "")
        requests = {
            node: RemoveKept([one.name for one in chosen if one.host == name]) for node, name in enumerate(names)
        }
        answers = bringup.ask(requests, KeptRemoved, _SECONDS)
        gone = {(name, folder) for name, one in zip(names, answers, strict=True) for folder in one.names}
        return Cleaned(
            [one for one in chosen if one[:2] in gone],
            [one for one in folders if one[:2] not in gone],
            _problem(names, [one.problem for one in answers]),
        )


def _problem(names: Sequence[str], problems: Sequence[str]) -> str:
    found = {name: problem for name, problem in zip(names, problems, strict=True) if problem}
    return failed_hosts(found, len(names), "", "can't be cleaned") if found else ""
