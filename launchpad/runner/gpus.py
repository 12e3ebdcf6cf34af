"""`launchpad gpus`: looks at the GPUs of hosts, and at who has leased them."""

from __future__ import annotations

from collections.abc import Sequence

from launchpad.errors import failed_hosts
from launchpad.job.hosts import Host
from launchpad.protocol.commands import ListGpus
from launchpad.protocol.events import GpusListed
from launchpad.protocol.gpus import SeenGpu
from launchpad.runner.options import HostOptions
from launchpad.runner.reaching import reached

_SECONDS = 60.0


def look(options: HostOptions, hosts: Sequence[Host]) -> tuple[list[tuple[str, SeenGpu]], str]:
    """All GPUs with their hosts, without hosts those of this machine, and why some are not known. Raises NodeError."""
    with reached(options, hosts) as (bringup, names):
        listed = bringup.ask(dict.fromkeys(range(len(names)), ListGpus()), GpusListed, _SECONDS)
    problems = {name: one.problem for name, one in zip(names, listed, strict=True) if one.problem}
    rows = [(name, gpu) for name, one in zip(names, listed, strict=True) for gpu in one.gpus]
    return rows, failed_hosts(problems, len(names), "", "can't be looked at") if problems else ""
