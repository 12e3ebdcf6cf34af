"""`launchpad gpus`: looks at the GPUs of hosts, and at who has leased them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from launchpad.errors import failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.job.hosts import Host
from launchpad.protocol.commands import ListGpus
from launchpad.protocol.events import GpusListed
from launchpad.protocol.gpus import SeenGpu
from launchpad.runner.links import LocalAgent, open_links
from launchpad.runner.options import HostOptions

_SECONDS = 60.0


def look(options: HostOptions, hosts: Sequence[Host]) -> tuple[list[tuple[str, SeenGpu]], str]:
    """All GPUs with their hosts, without hosts those of this machine, and why some are not known. Raises NodeError."""
    with ExitStack() as closing:
        local = LocalAgent()
        closing.callback(local.close)
        links, _ = open_links(hosts, local, closing, options, sys.executable, exact=False, quiet=False)
        bringup = BringUp()
        ready = bringup.connect(links, count_gpus=False)
        names = [host.name for host in hosts] or [one.hostname for one in ready]
        listed = bringup.ask(dict.fromkeys(range(len(links)), ListGpus()), GpusListed, _SECONDS)
    problems = {name: one.problem for name, one in zip(names, listed, strict=True) if one.problem}
    rows = [(name, gpu) for name, one in zip(names, listed, strict=True) for gpu in one.gpus]
    return rows, failed_hosts(problems, len(names), "", "can't be looked at") if problems else ""
