"""Which files of a folder are sent to hosts.

In a git work tree the tracked files are sent, and the untracked ones that git does not ignore. Elsewhere all files are,
if there are few enough.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from launchpad.errors import UsageError

# Limits for a folder outside a git work tree.
MOST_BYTES = 256 << 20
MOST_FILES = 20_000


class SyncedFile(NamedTuple):
    """A file or link to send; the fields after the first two are as in commands.Sync."""

    path: str  # relative to the folder
    permissions: int
    size: int
    modified: int
    link: str


def list_files(
    folder: str,
    logs: str | None = None,
    *,
    option: str = "--sync",
    instead: str = "choose a smaller folder with --wdir",
) -> list[SyncedFile]:
    """The files to send, without the `logs` folder if it is inside. Raises UsageError if that is too much.

    `option` asked for it; `instead`: what else the user can do. Call this before any node is reached: a large folder
    takes time, and a node that hears nothing gives up.
    """
    tracked = _git_files(folder, option)
    files = []
    total = 0
    for path in _walk(folder) if tracked is None else _expand(folder, tracked):
        if logs and os.path.join(folder, path).startswith(os.path.join(logs, "")):
            continue
        try:
            facts = os.lstat(os.path.join(folder, path))
            link = os.readlink(os.path.join(folder, path)) if stat.S_ISLNK(facts.st_mode) else ""
        except OSError:  # deleted, but still in git's index
            continue
        if not (link or stat.S_ISREG(facts.st_mode)):
            continue
        size = 0 if link else facts.st_size
        files.append(SyncedFile(path, facts.st_mode & 0o777, size, facts.st_mtime_ns, link))
        total += size
        if tracked is None and (total > MOST_BYTES or len(files) > MOST_FILES):
            raise UsageError(
                f"{option}: {folder} has more than {MOST_BYTES >> 20} MiB or {MOST_FILES} files; run git init in it "
                f"and list in .gitignore what the ranks don't need, or {instead}"
            )
    return sorted(files)


def _git_files(folder: str, option: str) -> list[str] | None:
    """git's files in the folder; None outside a work tree, or without git."""
    argv = ["git", "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        if _in_work_tree(folder):
            raise UsageError(
                f"{option}: {folder} needs git, which can't be run: {error.strerror}; install it"
            ) from None
        return None
    if done.returncode != 0:
        if _in_work_tree(folder):  # don't fall back to all files: those that git ignores may be secret
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise UsageError(f"{option}: git can't list the files of {folder} ({said[:300]}); fix that first")
        return None
    return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})


def _in_work_tree(folder: str) -> bool:
    parents = folder.split("/")
    return any(os.path.lexists("/".join([*parents[:depth], ".git"])) for depth in range(len(parents), 0, -1))


def _expand(folder: str, paths: Sequence[str]) -> Iterator[str]:
    """The paths, with nested repositories (listed as folders) replaced by the files in them."""
    for path in paths:
        inner = os.path.join(folder, path)
        if os.path.isdir(inner) and not os.path.islink(inner):
            yield from (os.path.join(path, one) for one in _walk(inner))
        else:
            yield path


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        linked = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = [name for name in folders if name not in (".git", "__pycache__") and name not in linked]
        yield from (os.path.relpath(os.path.join(parent, name), folder) for name in [*names, *linked])


def name_of_copy(folder: str) -> str:
    """What a copy of this folder of this machine is called on hosts."""
    digest = hashlib.sha256(os.fsencode(f"{os.uname().nodename}\0{os.getuid()}\0{folder}")).hexdigest()
    return f"copy-{os.path.basename(folder)}-{digest[:12]}"
