"""A forkserver that the agent can't ask."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from launchpad.agent.ranks import rank
from launchpad.agent.ranks.forkserver_client import Forkserver


@pytest.fixture
def limited() -> Iterator[None]:
    """No file may get longer than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("limited")
def test_a_forkserver_that_can_not_be_asked_is_ended() -> None:
    """Its exit has the ranks executed. Otherwise they would wait for it."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(near), closing(far), subprocess.Popen(["sleep", "100"], process_group=0) as process:
        Forkserver(rank.Rank(-1, process.pid, None), near, (), {}).prepare(["torch"], "")
        assert process.wait(60) == -signal.SIGKILL
