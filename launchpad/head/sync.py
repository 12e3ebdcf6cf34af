"""`--sync`: sends the working folder to every remote node, to a copy that is kept there; only what changed goes.

What is sent: where the folder is in a git work tree, git's tracked files and the untracked ones that it does not
ignore; else every file, if they are few enough.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from launchpad.commands import Piece, Sync
from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.events import Synced, Taken, Wanted
from launchpad.head.gathering import Gathering

# What a folder that is in no git work tree may hold.
MOST_BYTES = 256 << 20
MOST_FILES = 20_000

# So much may be under way to a node.
WINDOW_BYTES = 4 << 20
PIECE_BYTES = 256 << 10

# A node that takes nothing for so long is stuck.
STUCK_SECONDS = 60.0


class File(NamedTuple):
    """One file or link to be sent; the fields after the first two are as in commands.Sync."""

    path: str  # relative to the folder
    permissions: int
    size: int
    modified: int
    link: str


def list_files(folder: str, logs: str | None = None) -> list[File]:
    """What is to be sent; not the `logs`, if they are kept in the folder. Raises UsageError where that is too much.

    To be done before any node is reached: a large folder takes its time, and a node that hears nothing gives up.
    """
    tracked = _git_files(folder)
    files = []
    total = 0
    for path in _walk(folder) if tracked is None else _expand(folder, tracked):
        if logs and os.path.join(folder, path).startswith(os.path.join(logs, "")):
            continue
        try:
            facts = os.lstat(os.path.join(folder, path))
            link = os.readlink(os.path.join(folder, path)) if stat.S_ISLNK(facts.st_mode) else ""
        except OSError:  # deleted, but git's index still has it
            continue
        if not (link or stat.S_ISREG(facts.st_mode)):
            continue
        size = 0 if link else facts.st_size
        files.append(File(path, facts.st_mode & 0o777, size, facts.st_mtime_ns, link))
        total += size
        if tracked is None and (total > MOST_BYTES or len(files) > MOST_FILES):
            raise UsageError(
                f"--sync: {folder} has more than {MOST_BYTES >> 20} MiB or {MOST_FILES} files; run git init in it and "
                "list in .gitignore what the ranks don't need, or name a smaller folder with --wdir"
            )
    return sorted(files)


def _git_files(folder: str) -> list[str] | None:
    """What git has there; None where it is in no work tree, or there is no git."""
    import subprocess

    argv = ["git", "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        if _in_work_tree(folder):
            raise UsageError(f"--sync: {folder} is git's, and git can't be run: {error.strerror}; install it") from None
        return None
    if done.returncode != 0:
        if _in_work_tree(folder):  # what it ignores, secrets perhaps, is not to be sent because it can't tell
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise UsageError(f"--sync: git can't list the files of {folder} ({said[:300]}); mend that first")
        return None
    return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})


def _in_work_tree(folder: str) -> bool:
    parents = folder.split("/")
    return any(os.path.lexists("/".join([*parents[:depth], ".git"])) for depth in range(len(parents), 0, -1))


def _expand(folder: str, paths: Sequence[str]) -> Iterator[str]:
    """The paths; for a folder among them, which is a repository of its own, the files in it."""
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


class _Sender:
    """One node's share: reads the files that it wants, and sends as much as may be under way."""

    def __init__(
        self, folder: str, files: Sequence[File], wanted: Sequence[int], send: Callable[[Piece], None]
    ) -> None:
        self._send = send
        self._pieces = self._read(folder, files, wanted)
        self._next: Piece | None = next(self._pieces, None)
        self.under_way = 0

    def pump(self) -> None:
        while self._next is not None and self.under_way < WINDOW_BYTES:
            self._send(self._next)
            self.under_way += len(self._next.data)
            self._next = next(self._pieces, None)

    def _read(self, folder: str, files: Sequence[File], wanted: Sequence[int]) -> Iterator[Piece]:
        for place in wanted:
            path, _, size, _, link = files[place]
            if link or size == 0:
                continue
            try:
                with open(os.path.join(folder, path), "rb") as file:
                    while size and (data := file.read(min(size, PIECE_BYTES))):
                        size -= len(data)
                        yield Piece(place, data)
            except OSError as error:
                raise UsageError(
                    f"--sync: {path} can't be read: {error.strerror}; leave it out with .gitignore"
                ) from None
            if size:
                raise UsageError(f"--sync: {path} has become shorter while it was sent; start again")


def sync(
    gathering: Gathering, nodes: Sequence[int], folder: str, files: Sequence[File], progress: Callable[[int, int], None]
) -> dict[int, str]:
    """Bring the nodes' copies of the folder up to date, which has these files; where each is.

    `progress` is told (bytes taken, bytes wanted in all). Raises NodeError with a line for each node that takes none.
    """
    digest = hashlib.sha256(os.fsencode(f"{socket.gethostname()}\0{os.getuid()}\0{folder}")).hexdigest()
    asked = Sync(f"{os.path.basename(folder)}-{digest[:12]}", [list(file) for file in files])
    answers: dict[int, Wanted] = dict(
        zip(nodes, gathering.ask(dict.fromkeys(nodes, asked), Wanted, STUCK_SECONDS), strict=True)
    )
    problems = {gathering.nodes.name(node): f"no room: {one.problem}" for node, one in answers.items() if one.problem}
    senders = {
        node: _Sender(folder, files, one.files, functools.partial(gathering.nodes.send, node))
        for node, one in answers.items()
        if not one.problem
    }
    total = sum(files[place].size for one in answers.values() for place in one.files)
    taken = 0
    left = set(senders)
    for sender in senders.values():
        sender.pump()
    deadline = gathering.clock() + STUCK_SECONDS  # whatever else is heard meanwhile
    while left:
        heard = gathering.hear(deadline)
        if heard is None:
            raise NodeError(f"{', '.join(map(gathering.nodes.name, left))}: nothing was taken for {STUCK_SECONDS:g} s")
        node, event = heard
        if isinstance(event, (Taken, Synced)):
            deadline = gathering.clock() + STUCK_SECONDS
        if isinstance(event, Taken):
            taken += event.size
            progress(taken, total)
            senders[node].under_way -= event.size
            senders[node].pump()
        elif isinstance(event, Synced):
            left.discard(node)
            if event.problem:
                problems[gathering.nodes.name(node)] = f"no room: {event.problem}"
    if problems:
        raise NodeError(failed_hosts(problems, len(gathering.nodes), "make room there, or sync less: see --sync"))
    return {node: one.folder for node, one in answers.items()}
