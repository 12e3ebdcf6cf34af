"""launchpad/transport/ssh/bootstrap.py: which folders are safe to run code from; which Python runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launchpad.transport.ssh import bootstrap
from launchpad.transport.ssh.bootstrap import _is_private, _newer

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


def test_a_newer_python_is_looked_for_by_its_names_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "PLACES", (str(tmp_path / "opt" / "*" / "bin"),))
    monkeypatch.setenv("PATH", f"/nowhere:{tmp_path}")
    own = f"3.{sys.version_info[1]}"
    (tmp_path / "opt" / "x" / "bin").mkdir(parents=True)
    in_opt = tmp_path / "opt" / "x" / "bin" / f"python{own}"
    for path in (in_opt, tmp_path / "python3.99"):
        path.symlink_to(sys.executable)
    broken = tmp_path / "python3.98"  # as pyenv's, if that version is not chosen
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    assert list(_newer(["3.97", "3.98", own, "3.99"])) == [str(in_opt), str(tmp_path / "python3.99")]
