"""head/folder_listing, head/outside_files: in a git work tree, the files that git knows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launchpad.head.folder_listing import list_files
from launchpad.head.outside_files import look_outside
from launchpad.protocol.commands import CACHE
from tests.support.elf import RUNPATH, write_elf
from tests.support.trees import write

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


def test_what_was_built_in_a_source_tree_comes_along_although_git_ignores_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path / ".gitignore", "*.so*\nbuild\n*.log\n")
    write(tmp_path / "mine" / "__init__.py", "")
    write(tmp_path / "mine" / "train.log", "")
    write(tmp_path / "data" / "other.so", "")
    write_elf(tmp_path / "mine" / "fast.so", (RUNPATH, f"{tmp_path}/build/lib:/opt/other"))
    write(tmp_path / "build" / "lib" / "libfast.so.1", "")
    write(tmp_path / "build" / "lib" / "fast.o", "")
    found = look_outside(str(tmp_path), {str(tmp_path): f"{CACHE}/copy-1"})
    assert [file.path for file in found.files] == [
        ".gitignore", "build/lib/libfast.so.1", "mine/__init__.py", "mine/fast.so",
    ]  # fmt: skip
    assert found.libraries == [f"{CACHE}/copy-1/build/lib"]
