"""Ends the ranks that go on without launchpad (--keep-running), after it was killed."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from launchpad.job.hosts import Host
from launchpad.protocol.commands import LetGo
from launchpad.protocol.events import HoldEnded
from launchpad.record import held_hosts, keeper
from launchpad.record.held_hosts import HeldHost
from launchpad.record.resume_lock import ResumeLock
from launchpad.runner.connect import reach
from launchpad.runner.connector import Connector
from launchpad.runner.options import HostOptions
from launchpad.transport import Link
from launchpad.transport.ssh.bundle import Startup, held_at


class OrphansEnded(NamedTuple):
    """What came of it, by the hosts' names."""

    ended: list[str]  # their ranks
    gone: list[str]  # nothing was there any more
    failed: dict[str, str]  # why they can't be reached


def end_orphans(folder: str) -> OrphansEnded:
    """End what goes on of the job with this record, and forget about it if that could be done everywhere.

    Raises UsageError if somebody is taking it over.
    """
    with contextlib.suppress(OSError):  # nobody can resume it there, either
        ResumeLock(folder)
    held = held_hosts.read(folder)
    done = OrphansEnded([], [], {})
    for way in dict.fromkeys((one.ssh, one.ssh_config) for one in held):
        _end([one for one in held if (one.ssh, one.ssh_config) == way], done)
    if not done.failed:
        keeper.forget(folder)
    return done


def _end(held: list[HeldHost], done: OrphansEnded) -> None:
    """End them on hosts that are reached the same way."""
    way = held[0]
    options = HostOptions(ssh=way.ssh or None, ssh_config=way.ssh_config or None)  # type: ignore[arg-type]
    far = {place: Host(one.name, one.user, one.port, here=one.here) for place, one in enumerate(held)}
    startups = [Startup(one.python, held=held_at(one.place, one.secret, -1)) for one in held]
    connector = Connector(options)
    try:
        links, failures = reach(connector, far, startups, quiet=False)
        for link in links.values():
            link.send(LetGo())
        for place in sorted(links):
            (done.ended if _awaited(links[place]) else done.gone).append(held[place].name)
        done.failed.update({held[place].name: why for place, why in failures.items()})
    finally:
        connector.abandon()


def _awaited(link: Link) -> bool:
    """Wait until the holder has hung up on its agent. False if there is none."""
    ended = True
    for event in link.messages():
        if isinstance(event, HoldEnded):
            ended = not event.reason
            break
    link.close()
    return ended
