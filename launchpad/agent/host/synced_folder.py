"""Keeps a node's copy of the folder that a job was started in (`--sync`): receives new files, removes deleted ones.

As in rsync, a file counts as unchanged if its size and modification time match. Files that the ranks wrote into the
copy stay: only files that an earlier sync brought are ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import stat
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from ... import linux
from ...protocol.commands import FileChunk, Sync
from ...protocol.events import ChunksTaken, Event, Synced, Wanted
from .. import PACKAGE
from ..part import AgentHub, AgentPart

_PERMISSIONS = 0o777


class FolderSync(AgentPart):
    """Carries out the head's Sync."""

    def __init__(self, hub: AgentHub) -> None:
        super().__init__(hub)
        self._folder: SyncedFolder | None = None

    def on(self, command: Sync | FileChunk) -> None:
        """Begin, or take the next bytes."""
        events: list[Event] = []
        if isinstance(command, Sync):
            self._folder = SyncedFolder(command)
            events = self._folder.begin()
        elif self._folder is not None:
            events = self._folder.take(command)
        for event in events:
            if isinstance(event, Wanted) and event.folder:
                hold(event.folder)  # for as long as this process lives
            self._hub.outbox.say(event)

    def close(self) -> None:
        """Leave no file that is not whole."""
        if self._folder is not None:
            self._folder.close()


class SyncedFolder:
    """Receives one folder. Each step returns the events for the head."""

    def __init__(self, command: Sync) -> None:
        if "/" in command.name or "\0" in command.name or not command.name.startswith(("copy-", "env-")):
            raise ValueError(f"{command.name!r} is not a valid name for a copy")
        self._files = command.files
        self._digests = command.digests
        self._name = command.name
        self._wanted: deque[int] = deque()
        self._open = -1  # the descriptor of the file that is being received
        self._left = 0  # its missing bytes
        self._failed = False
        self._unfinished = ""  # where a file is until it is complete
        self._behind_link: dict[str, bool] = {}  # by folder: whether a link leads to it
        self._made: set[str] = {""}  # the folders in it that were seen to be real ones, or made

    def begin(self) -> list[Event]:
        """Remove deleted files, and find out which ones are missing or have changed."""
        try:
            self._base = base_folder()
            self._record = os.path.join(self._base, f"{self._name}.json")  # the paths of the last sync
            self._folder = _own_folder(os.path.join(self._base, self._name))
            # In the folder, which may be on another disk. Hosts that share a home may receive the same folder at once;
            # in containers even the pid may match.
            name = f".launchpad-{os.getpid()}-{os.urandom(6).hex()}.unfinished"
            self._unfinished = os.path.join(self._folder, name)
            self._remove_deleted()
            missing = [index for index, file in enumerate(self._files) if not self._is_same(*file)]
            linked = {index for index in missing if self._link(index)} if self._digests else set()
            self._wanted = deque(index for index in missing if index not in linked)
            self._check_room()
        except (OSError, ValueError) as error:
            return [Wanted(time.monotonic_ns(), "", [], describe(error))]
        wanted = [Wanted(time.monotonic_ns(), self._folder, _runs(self._wanted), "")]
        try:
            self._skip_empty()
            return [*wanted, *self._conclude()]
        except OSError as error:
            return [*wanted, *self._fail(error)]

    def take(self, chunk: FileChunk) -> list[Event]:
        """Write the next bytes of the wanted files."""
        if not self._wanted or chunk.file != self._wanted[0]:
            if self._failed:  # it was still in flight
                return []
            raise ValueError(f"a chunk of file {chunk.file} came out of order")
        data = memoryview(chunk.data)
        try:
            while data:
                if not self._wanted:
                    raise ValueError("there are more bytes than files for them")
                data = self._write(data)
                if self._open < 0:
                    self._skip_empty()
            return [ChunksTaken(time.monotonic_ns(), len(chunk.data)), *self._conclude()]
        except OSError as error:
            return self._fail(error)

    def _write(self, data: memoryview) -> memoryview:
        """Write what belongs to the current file. Returns the rest."""
        if self._open < 0:
            self._left = self._size()
            self._open = self._new_file()
        own = data[: self._left]
        linux.write_all(self._open, own)
        self._left -= len(own)
        if self._left == 0:
            self._finish(self._wanted.popleft())
        return data[len(own) :]

    def close(self) -> None:
        """Discard a file that is only partly received, or could not be put into its place."""
        if self._open >= 0:
            os.close(self._open)
            self._open = -1
        if self._unfinished:
            with contextlib.suppress(OSError):  # there is none
                os.unlink(self._unfinished)

    def _size(self) -> int:
        size: int = self._files[self._wanted[0]][2]
        return size

    def _new_file(self) -> int:
        return os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)

    def _path(self, relative: str) -> str:
        return path_in(self._folder, relative)

    def _is_same(self, relative: str, permissions: int, size: int, modified: int, link: str) -> bool:
        path = self._path(relative)
        try:
            facts = os.lstat(path)
        except OSError:
            return False
        if self._is_behind_link(path):
            return False
        if link:
            return stat.S_ISLNK(facts.st_mode) and os.readlink(path) == link
        same = stat.S_ISREG(facts.st_mode) and (facts.st_size, facts.st_mtime_ns) == (size, modified)
        if same and facts.st_mode & _PERMISSIONS != permissions:
            os.chmod(path, permissions)
        return same

    def _skip_empty(self) -> None:
        """Create links and empty files, for which no chunk comes, up to the next file that has bytes."""
        while self._wanted and (self._files[self._wanted[0]][4] or self._size() == 0):
            index = self._wanted.popleft()
            if not self._files[index][4]:
                self._open = self._new_file()
            self._finish(index)

    def _conclude(self) -> list[Event]:
        """Once everything is there, record what that is."""
        if self._wanted:
            return []
        digests = self._digests or [""] * len(self._files)
        rows = [[path, digest, mode] for (path, mode, *_), digest in zip(self._files, digests, strict=True)]
        with open(self._record, "w") as file:
            file.write(json.dumps(rows))  # several times as fast as json.dump
        return [Synced(time.monotonic_ns(), "")]

    def _fail(self, error: OSError) -> list[Event]:
        self._wanted.clear()
        self._failed = True
        return [Synced(time.monotonic_ns(), describe(error))]

    def _finish(self, index: int) -> None:
        """Put a file into place atomically: a process that has the old one open can read it to its end."""
        relative, permissions, _, modified, link = self._files[index]
        path = os.path.join(self._folder, relative)
        self._make_parent(relative)
        if link:
            os.symlink(link, self._unfinished)
        else:
            os.fchmod(self._open, permissions)
            os.utime(self._open, ns=(modified, modified))
            os.close(self._open)
            self._open = -1
        try:
            os.replace(self._unfinished, path)
        except IsADirectoryError:
            _remove(path)
            os.replace(self._unfinished, path)

    def _make_parent(self, relative: str) -> None:
        """Make the folders that a file is in real ones, replacing links and files."""
        folder = relative.rpartition("/")[0]
        if folder in self._made:
            return
        self._make_parent(folder)
        path = os.path.join(self._folder, folder)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            os.unlink(path)
        with contextlib.suppress(FileExistsError):  # the usual case; or another agent has just made it
            os.mkdir(path, 0o700)
        self._made.add(folder)

    def _link(self, index: int) -> bool:
        """Link the file from another environment that has it, if there is one."""
        relative, permissions, size, modified, _ = self._files[index]
        if not self._digests[index]:
            return False
        folder, there = self._equals.get((self._digests[index], permissions), ("", ""))
        if not there:
            return False
        source, path = os.path.join(folder, there), os.path.join(self._folder, relative)
        try:
            facts = os.lstat(source)
            # A compiled file names the time of its source.
            if facts.st_size != size or (relative.endswith(".py") and facts.st_mtime_ns != modified):
                return False
            self._make_parent(relative)
            try:
                os.link(source, path)
            except FileExistsError:
                _remove(path)
                os.link(source, path)
        except OSError:  # it is gone, or has too many links
            return False
        return True

    @functools.cached_property
    def _equals(self) -> dict[tuple[str, int], tuple[str, str]]:
        """The files of other environments, by digest and permissions: the folder, and the path in it."""
        found = {}
        base = self._base
        for name in os.listdir(base):
            if name.startswith("env-") and name.endswith(".json") and name != os.path.basename(self._record):
                folder = os.path.join(base, name.removesuffix(".json"))
                for path, digest, permissions in self._recorded(os.path.join(base, name)):
                    found[digest, permissions] = folder, path
        return found

    def _check_room(self) -> None:
        needed = sum(self._files[index][2] for index in self._wanted)
        facts = os.statvfs(self._folder)
        free = facts.f_bavail * facts.f_frsize
        if needed > free:
            raise ValueError(f"{self._folder} needs {needed >> 20} MiB more, and {free >> 20} MiB are free")

    def _is_behind_link(self, path: str) -> bool:
        folder = os.path.dirname(path)
        if folder not in self._behind_link:
            self._behind_link[folder] = os.path.realpath(folder) != folder
        return self._behind_link[folder]

    def _recorded(self, record: str) -> list[tuple[str, str, int]]:
        """The path, digest and permissions of each file that a folder had after its last sync."""
        try:
            with open(record) as file:
                rows: list[Any] = json.load(file)
            whole: list[Any] = [
                [row, "", 0] if isinstance(row, str) else row for row in rows
            ]  # an older launchpad has the paths
            return [(str(path), str(digest), int(mode)) for path, digest, mode in whole]
        except (OSError, ValueError):
            return []

    def _remove_deleted(self) -> None:
        """Remove files that an earlier sync brought and that the original folder no longer has."""
        now = {file[0] for file in self._files}
        for relative, *_ in self._recorded(self._record):
            if relative in now:
                continue
            path = self._path(relative)
            if self._is_behind_link(path):  # the link was made since: its target is not ours
                continue
            try:
                os.unlink(path)
                while (path := os.path.dirname(path)) != self._folder:
                    os.rmdir(path)
            except OSError:  # it is gone already, or the folder is not empty
                pass


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as [first, last + 1] of each run."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def _remove(path: str) -> None:
    """Remove a file, or folders without any."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for folder, _, _ in sorted(os.walk(path), reverse=True):
        os.rmdir(folder)


def hold(folder: str) -> int:
    """Let nobody remove the folder (kept.py) while the descriptor that this returns is open. Raises OSError."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks, or somebody is just looking
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def path_in(folder: str, relative: str) -> str:
    """The path of something in the folder. Raises ValueError if it would be outside."""
    if os.path.isabs(relative) or ".." in relative.split("/"):
        raise ValueError(f"{relative} is not inside the folder")
    return os.path.join(folder, relative)


def base_folder() -> str:
    """A folder that is private to the user: the one that the agent was unpacked in (transport/ssh/bootstrap.py).

    An agent that belongs to an installed launchpad (`launchpad join`) uses the same one. Raises OSError or ValueError.
    """
    folder = os.path.dirname(PACKAGE)
    if os.path.basename(folder).startswith("agent-"):
        return os.path.realpath(os.path.dirname(folder))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(cache, "launchpad")
    os.makedirs(folder, 0o700, exist_ok=True)
    facts = os.stat(folder)
    if {facts.st_uid, os.lstat(folder).st_uid} != {os.getuid()} or facts.st_mode & 0o170077 != 0o040000:
        raise ValueError(f"{folder} is not a directory that only you can enter")
    return os.path.realpath(folder)


def _own_folder(path: str) -> str:
    """Make the folder, in one that is private to the user. A link that is there is the user's, and leads to the folder.

    That one must be the user's, too, and nobody else's to write to. Raises OSError or ValueError.
    """
    os.makedirs(path, 0o700, exist_ok=True)
    folder = os.path.realpath(path)
    facts = os.stat(folder)
    if folder != path and (facts.st_uid != os.getuid() or facts.st_mode & 0o022):
        raise ValueError(f"{path} leads to {folder}, which others can write to")
    return folder


def describe(error: Exception) -> str:
    """What went wrong, for people."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
