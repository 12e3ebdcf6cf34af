"""launchpad/transport/ssh/bootstrap.py: which folders are safe to run code from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchpad.transport.ssh.bootstrap import _is_private

SOMEBODY = 12345


def test_a_folder_that_only_the_user_can_enter(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(0o700)
    (tmp_path / "open").mkdir(0o755)
    (tmp_path / "file").touch(0o600)
    for name in ("own", "open", "file", "gone"):
        (tmp_path / f"to-{name}").symlink_to(name)
    assert {path.name for path in tmp_path.iterdir() if _is_private(str(path))} == {"own", "to-own"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_somebody_else_has_planted_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(0o700)
    (tmp_path / "link").symlink_to("own")
    os.chown(tmp_path / "link", SOMEBODY, SOMEBODY, follow_symlinks=False)
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", SOMEBODY, SOMEBODY)
    (tmp_path / "to-theirs").symlink_to("theirs")
    assert not any(_is_private(str(tmp_path / name)) for name in ("link", "theirs", "to-theirs"))
