"""What ssh reads where no file is named."""

from __future__ import annotations

import subprocess

from launchpad.transport.ssh.config import SshConfig
from tests.support.command import DEADLINE
from tests.support.ssh_config import needs_ssh
from tests.support.ssh_config import system as system


@needs_ssh
def test_with_no_file_named_ssh_reads_its_own() -> None:
    told = subprocess.run(["ssh", "-G", "n1"], capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
    said = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    found = SshConfig().lookup("n1")
    assert (found.address, found.user, str(found.port)) == (said["hostname"], said["user"], said["port"])
