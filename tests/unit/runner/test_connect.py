"""The hosts that options name."""

from __future__ import annotations

import pytest

from launchpad.errors import UsageError
from launchpad.job.hosts import parse_hosts
from launchpad.runner.connect import read_hosts
from launchpad.runner.options import HostOptions


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"enter": "docker exec -i box"}, "--enter: in a Slurm allocation srun starts launchpad itself on the nodes"),
        ({"keep_running": 60.0}, "--keep-running is for hosts that are reached over SSH"),
    ],
)
def test_what_srun_can_not_do_is_refused(more: dict[str, object], words: str) -> None:
    options = HostOptions(allocation=parse_hosts("n1:2,n2:2"), by_srun=True)
    assert [host.name for host in read_hosts(options, None)] == ["n1", "n2"]
    with pytest.raises(UsageError, match=words):
        read_hosts(options._replace(**more), None)  # type: ignore[arg-type]
