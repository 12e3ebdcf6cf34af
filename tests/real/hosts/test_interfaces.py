"""Variables that name an interface which leads to no other host, on hosts that are network namespaces."""

from __future__ import annotations

import re

from tests.support.needs import needs_torch
from tests.support.netns import needs_namespaces
from tests.support.node_faults import Head, Start
from tests.support.node_faults import head as head
from tests.support.node_faults import network as network
from tests.support.node_faults import start as start

pytestmark = [needs_namespaces, needs_torch]

SUMS = """\
import datetime, os, sys, torch, torch.distributed as dist
os.environ.update(pair.split("=") for pair in sys.argv[1:])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
dist.all_reduce(torch.ones(1))
"""
NOWHERE = "GLOO_SOCKET_IFNAME=lo is set, and no other host can be reached over that"


def test_the_loopback_interface_is_told_at_the_start_and_in_the_verdict(head: Head, start: Start) -> None:
    """It may come from an old .bashrc."""
    (head.folder / "sums.py").write_text(SUMS)
    head.environ["GLOO_SOCKET_IFNAME"] = "lo"
    code, err = start(2, "sums.py").end()
    assert "GLOO_SOCKET_IFNAME=lo is set, but from h1, h2 no other host can be reached over that: unset GLOO_S" in err
    assert re.search(rf"rank \d on h\d failed first: {NOWHERE}: ", err), err
    assert code == 1


def test_the_loopback_interface_that_a_program_sets_itself_is_told_in_the_verdict(head: Head, start: Start) -> None:
    (head.folder / "sums.py").write_text(SUMS)
    code, err = start(2, "sums.py", "GLOO_SOCKET_IFNAME=lo").end()
    assert re.search(rf"rank \d on h\d failed first: {NOWHERE}: ", err), err
    assert (code, "is set, but from" in err) == (1, False)


def test_an_interface_that_all_hosts_have_is_fine(head: Head, start: Start) -> None:
    (head.folder / "sums.py").write_text(SUMS)
    head.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    assert start(2, "sums.py").end() == (0, "")
