"""listeners: who has a port."""

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

import pytest

from launchpad import listeners


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens(family: socket.AddressFamily, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(family) as ours:
        ours.bind((address, 0))
        port = ours.getsockname()[1]
        assert listeners.holder(port) == "", "it doesn't listen yet"
        ours.listen()
        assert listeners.holder(port) == f"pid {os.getpid()}, {Path('/proc/self/comm').read_text().strip()}"
        monkeypatch.setattr(listeners, "_pids", list)  # as of a user whose processes we may not look into
        assert listeners.holder(port) == f"a process of {pwd.getpwuid(os.getuid()).pw_name}"
