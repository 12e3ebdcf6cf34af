"""head/sync: in a git work tree, the files that git knows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launchpad.head.sync import list_files

DEADLINE = 30.0


def git(folder: Path, *args: str) -> None:
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    words = ["git", "-c", "user.name=x", "-c", "user.email=x", *args]
    subprocess.run(words, cwd=folder, env=environ, check=True, capture_output=True, timeout=DEADLINE)


def paths(folder: Path) -> list[str]:
    return [file.path for file in list_files(str(folder))]


def test_in_git_new_files_are_sent_and_ignored_ones_are_not(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in ("tracked", "deleted", "new", "ignored"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "add", "tracked", "deleted")
    (tmp_path / "deleted").unlink()
    assert paths(tmp_path) == [".gitignore", "new", "tracked"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "inner").touch()
    assert paths(tmp_path / "sub") == ["inner"], "of a folder inside the work tree, that folder"


def test_a_nested_repository_is_sent_too(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    git(tmp_path, "init", "-q")
    git(tmp_path / "inner", "init", "-q")
    (tmp_path / "inner" / "file").touch()
    git(tmp_path / "inner", "add", "file")
    git(tmp_path / "inner", "commit", "-q", "-m", "x")
    git(tmp_path, "-c", "advice.addEmbeddedRepo=false", "add", "inner")
    assert paths(tmp_path) == ["inner/file"]
