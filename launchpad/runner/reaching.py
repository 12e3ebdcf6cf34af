"""Reaches hosts for a question that is not about a job, as `launchpad clean` and `launchpad gpus` do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from launchpad.head.bringup import BringUp
from launchpad.job.hosts import Host
from launchpad.runner.links import LocalAgent, open_links
from launchpad.runner.options import HostOptions


@contextmanager
def reached(options: HostOptions, hosts: Sequence[Host]) -> Iterator[tuple[BringUp, list[str]]]:
    """Agents on the hosts, or on this machine if there are none, and their names. Raises NodeError."""
    with ExitStack() as closing:
        local = LocalAgent()
        closing.callback(local.close)
        links, _ = open_links(hosts, local, closing, options, sys.executable, exact=False, quiet=False)
        bringup = BringUp()
        ready = bringup.connect(links, count_gpus=False)
        yield bringup, [host.name for host in hosts] or [one.hostname for one in ready]
