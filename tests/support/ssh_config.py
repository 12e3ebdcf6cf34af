"""What the tests of ssh config share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launchpad.transport.ssh import config as ssh_config

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed (openssh-client)")


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the system's configuration; no agent; HOME leads nowhere, as ssh does not ask it."""
    folder = tmp_path / "etc"
    folder.mkdir()
    monkeypatch.setattr(ssh_config, "SYSTEM_FOLDER", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "not" / "there"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder
