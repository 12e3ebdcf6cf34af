"""`--sync-env`: gives hosts this machine's environment. Finds out what each has, sends what it lacks, has it work."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from launchpad.errors import NodeError, failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.head.environment import Environment
from launchpad.head.environment_records import installed_wheels
from launchpad.head.environment_source import Contents, EnvironmentSource
from launchpad.head.sync import Progress, SourceFile, Taken, host_count, mirror, sync
from launchpad.job.wheels import Platform, remedy, why_not
from launchpad.protocol.commands import FindEnvironment, MakeEnvironment, Sync
from launchpad.protocol.events import EnvironmentFound, EnvironmentMade

# It may have to load several Pythons over a network.
_FIND_SECONDS = 60.0

# Tens of thousands of files are looked at and linked, maybe over a network.
_COMPARE_SECONDS = 900.0

# Starts the environment's Python, which may be on a slow disk.
_MAKE_SECONDS = 120.0

# How often to look whether work is done that ended without a word.
_AWAKE_SECONDS = 1.0

_MOST_NAMES = 4

Result = TypeVar("Result")


def sync_environment(
    bringup: BringUp, nodes: Sequence[int], source: EnvironmentSource, progress: Progress, say: Callable[[str], None]
) -> dict[int, str]:
    """Have the nodes have the environment. Returns its interpreter on each.

    `say` is told what was sent to whom. Raises NodeError with a line for each node that can't have it.
    """
    environment = _meanwhile(bringup, source.environment)
    outside = _meanwhile(bringup, source.outside)
    libraries = [library for one in outside for library in one.libraries]
    request = FindEnvironment(environment.name, environment.version, environment.abi, environment.python, libraries)
    answers = bringup.ask(dict.fromkeys(nodes, request), EnvironmentFound, _FIND_SECONDS)
    found: dict[int, EnvironmentFound] = dict(zip(nodes, answers, strict=True))
    pythons = {node: one.python for node, one in found.items() if one.python}
    lacking = [node for node in nodes if node not in pythons]
    if lacking:
        _refuse(bringup, environment, {node: found[node] for node in lacking})
    for one in outside:
        sync(bringup, nodes, one.folder, one.files, progress)
    if lacking:
        contents = _meanwhile(bringup, source.contents)
        size = _send(bringup, lacking, environment.name, contents, progress)
        bases = {node: environment.python or found[node].base for node in lacking}
        pythons |= _make(bringup, environment, contents.libraries, bases)
        say(f"sent {size} of {environment.prefix} to {_names(bringup, lacking)}")
    else:
        say(f"{_names(bringup, nodes)} had {environment.prefix} already; nothing was sent")
    return pythons


def _meanwhile(bringup: BringUp, work: Callable[[], Result]) -> Result:
    """Do work that takes long in a thread, and keep in touch with the nodes, which else would give us up."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        bringup.post(done)

    threading.Thread(target=run, name="sync-env", daemon=True).start()
    others = []
    while not done.done():
        heard = bringup.hear(bringup.clock() + _AWAKE_SECONDS)
        if heard is not None and heard[1] is not done:
            others.append(heard)
    for one in others:
        bringup.inbox.put(one)
    return done.result()


def _names(bringup: BringUp, nodes: Sequence[int]) -> str:
    """The nodes, for a sentence."""
    names = [bringup.nodes.name(node) for node in nodes]
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} hosts"


def _refuse(bringup: BringUp, environment: Environment, found: Mapping[int, EnvironmentFound]) -> None:
    """Raise NodeError if some of these nodes can't have it."""
    installed = installed_wheels(environment.installed)
    here = os.uname().machine
    problems = {}
    for node, one in found.items():
        place = Platform(one.machine, one.glibc, bool(one.base or environment.python))
        if text := one.problem or why_not(installed, environment.version, here, place):
            problems[bringup.nodes.name(node)] = text
    if problems:
        todo = remedy(environment.version, list(problems.values()))
        raise NodeError(failed_hosts(problems, host_count(bringup), todo))


def _send(bringup: BringUp, nodes: Sequence[int], name: str, contents: Contents, progress: Progress) -> str:
    """Send the nodes the files that they lack. Returns how much the one that lacked most was sent, for people."""
    most = 0

    def note(host: str, taken: Taken) -> None:
        nonlocal most
        most = max(most, taken.size)
        progress(host, taken)

    rows = [list(file[:5]) for file in contents.files]
    advice = "repair the environment, and run the command again"
    sources = [SourceFile(file.source, file.size, advice) for file in contents.files]
    request = Sync(name, rows, contents.digests)
    mirror(bringup, nodes, request, sources, "--sync-env", note, _COMPARE_SECONDS)
    return f"{most / 1e6:.0f} MB"


def _make(
    bringup: BringUp, environment: Environment, libraries: list[str], pythons: Mapping[int, str]
) -> dict[int, str]:
    """Have the environment work on these nodes, with this interpreter on each. Returns the environment's."""
    origin = f"{socket.gethostname()}:{environment.prefix}"
    commands = {
        node: MakeEnvironment(
            *(environment.name, origin, environment.version, python, environment.venv, environment.texts, libraries)
        )
        for node, python in pythons.items()
    }
    made = dict(zip(commands, bringup.ask(commands, EnvironmentMade, _MAKE_SECONDS), strict=True))
    if problems := {bringup.nodes.name(node): one.problem for node, one in made.items() if one.problem}:
        raise NodeError(failed_hosts(problems, host_count(bringup), ""))
    return {node: one.python for node, one in made.items()}
