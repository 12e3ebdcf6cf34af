"""`--sync`: copies the working folder to every remote node. The copy is kept there, and only changes are sent.

In a git work tree the tracked files are sent, and the untracked ones that git does not ignore. Elsewhere all files are,
if there are few enough.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from launchpad.errors import NodeError, UsageError, failed_hosts
from launchpad.head.bringup import BringUp
from launchpad.head.sender import PIECE_BYTES, STUCK_SECONDS, send
from launchpad.head.shared_reader import SharedReader
from launchpad.protocol.commands import Sync
from launchpad.protocol.events import Synced, Wanted
from launchpad.protocol.wire import encoded

# Limits for a folder outside a git work tree.
MOST_BYTES = 256 << 20
MOST_FILES = 20_000


class Taken(NamedTuple):
    """How much of what it wants a host has accepted."""

    size: int
    of_size: int
    files: int
    of_files: int


Progress = Callable[[str, Taken], None]  # is told of a host

Made = TypeVar("Made")


class SyncedFile(NamedTuple):
    """A file or link to send; the fields after the first two are as in commands.Sync."""

    path: str  # relative to the folder
    permissions: int
    size: int
    modified: int
    link: str


def list_files(folder: str, logs: str | None = None) -> list[SyncedFile]:
    """The files to send, without the `logs` folder if it is inside. Raises UsageError if that is too much.

    Call this before any node is reached: a large folder takes time, and a node that hears nothing gives up.
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
        except OSError:  # deleted, but still in git's index
            continue
        if not (link or stat.S_ISREG(facts.st_mode)):
            continue
        size = 0 if link else facts.st_size
        files.append(SyncedFile(path, facts.st_mode & 0o777, size, facts.st_mtime_ns, link))
        total += size
        if tracked is None and (total > MOST_BYTES or len(files) > MOST_FILES):
            raise UsageError(
                f"--sync: {folder} has more than {MOST_BYTES >> 20} MiB or {MOST_FILES} files; run git init in it and "
                "list in .gitignore what the ranks don't need, or choose a smaller folder with --wdir"
            )
    return sorted(files)


def _git_files(folder: str) -> list[str] | None:
    """git's files in the folder; None outside a work tree, or without git."""
    argv = ["git", "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        if _in_work_tree(folder):
            raise UsageError(f"--sync: {folder} needs git, which can't be run: {error.strerror}; install it") from None
        return None
    if done.returncode != 0:
        if _in_work_tree(folder):  # don't fall back to all files: those that git ignores may be secret
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise UsageError(f"--sync: git can't list the files of {folder} ({said[:300]}); fix that first")
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
    digest = hashlib.sha256(os.fsencode(f"{socket.gethostname()}\0{os.getuid()}\0{folder}")).hexdigest()
    return f"copy-{os.path.basename(folder)}-{digest[:12]}"


def sync(
    bringup: BringUp, nodes: Sequence[int], folder: str, files: Sequence[SyncedFile], progress: Progress
) -> dict[int, str]:
    """Bring the nodes' copies of the folder, which has these files, up to date. Returns the path of each copy.

    `progress` is called as hosts accept bytes. Raises NodeError with a line for each node that can't store the copy.
    """
    request = Sync(name_of_copy(folder), [list(file) for file in files], [])
    remedy = "leave it out with .gitignore"
    sources = [SourceFile(os.path.join(folder, file.path), file.size, remedy) for file in files]
    return mirror(bringup, nodes, request, sources, "--sync", progress)


class SourceFile(NamedTuple):
    """Where the bytes of a file to send are."""

    path: str
    size: int
    remedy: str  # if it can't be read


def mirror(
    bringup: BringUp,
    nodes: Sequence[int],
    request: Sync,
    sources: Sequence[SourceFile],
    option: str,
    progress: Progress,
    seconds: float = STUCK_SECONDS,
) -> dict[int, str]:
    """Have the nodes store the files of the request, of which they are sent what they lack. Returns the folders.

    `option` asked for it. `seconds`: how long a node may take to find out what it lacks. Raises NodeError with a line
    for each node that can't store them.
    """
    answers: dict[int, Wanted] = dict(
        zip(nodes, bringup.ask(dict.fromkeys(nodes, encoded(request)), Wanted, seconds), strict=True)
    )
    problems = {bringup.nodes.name(node): one.problem for node, one in answers.items() if one.problem}
    if problems:
        raise _not_stored(problems, bringup, option)
    places = _shared({node: tuple(one.files) for node, one in answers.items()}, tuple)
    ends = _shared(places, lambda files: list(accumulate(sources[place].size for place in files)))
    sent = dict.fromkeys(places, 0)
    reader = SharedReader(places, lambda place: _read(sources[place], option))

    def taken(node: int, size: int) -> None:
        sent[node] += size
        files, all_sizes = bisect_right(ends[node], sent[node]), (ends[node] or [0])[-1]
        progress(bringup.nodes.name(node), Taken(sent[node], all_sizes, files, len(ends[node])))

    for node in places:
        taken(node, 0)
    pieces = {node: reader.chunks(node) for node in places}
    ended: dict[int, Synced] = send(bringup, pieces, "the folder", until=Synced, taken=taken)
    if problems := {bringup.nodes.name(node): one.problem for node, one in ended.items() if one.problem}:
        raise _not_stored(problems, bringup, option)
    return {node: one.folder for node, one in answers.items()}


def _shared(files: Mapping[int, tuple[int, ...]], make: Callable[[tuple[int, ...]], Made]) -> dict[int, Made]:
    """What is made of each node's files: one object for all that want the same ones."""
    made: dict[tuple[int, ...], Made] = {}
    for wanted in files.values():
        if wanted not in made:
            made[wanted] = make(wanted)
    return {node: made[wanted] for node, wanted in files.items()}


def _not_stored(problems: Mapping[str, str], bringup: BringUp, option: str) -> NodeError:
    told = {name: f"the copy can't be stored: {problem}" for name, problem in problems.items()}
    remedy = f"free some space there, let yourself write there, or sync less: see {option}"
    return NodeError(failed_hosts(told, len(bringup.nodes), remedy))


def _read(source: SourceFile, option: str) -> Iterator[bytes]:
    left = source.size
    if left == 0:
        return
    try:
        with open(source.path, "rb", buffering=0, opener=_open_now) as opened:
            while left and (data := opened.read(min(left, PIECE_BYTES))):
                left -= len(data)
                yield data
    except OSError as error:
        raise UsageError(f"{option}: {source.path} can't be read: {error.strerror}; {source.remedy}") from None
    if left:
        raise UsageError(f"{option}: {source.path} shrank while it was being sent; run the command again")


def _open_now(path: str, flags: int) -> int:
    """Open what was a file: it may have become a pipe, and nobody need ever write to that."""
    return os.open(path, flags | os.O_NONBLOCK)
