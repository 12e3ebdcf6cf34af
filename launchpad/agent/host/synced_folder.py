"""Keeps a node's copy of the folder that a job was started in (`--sync`): receives new files, removes deleted ones.

As in rsync, a file counts as unchanged if its size and modification time match. Files that the ranks wrote into the
copy stay: only files that an earlier sync brought are ever removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
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
            self._hub.outbox.say(event)

    def close(self) -> None:
        """Leave no file that is not whole."""
        if self._folder is not None:
            self._folder.close()


class SyncedFolder:
    """Receives one folder. Each step returns the events for the head."""

    def __init__(self, command: Sync) -> None:
        if "/" in command.name or "\0" in command.name:
            raise ValueError(f"{command.name!r} is not a valid name for a copy")
        self._files = command.files
        self._name = command.name
        self._wanted: list[int] = []
        self._open = -1  # the descriptor of the file that is being received
        self._left = 0  # its missing bytes
        self._failed = False
        self._unfinished = ""  # where a file is until it is complete

    def begin(self) -> list[Event]:
        """Remove deleted files, and find out which ones are missing or have changed."""
        try:
            self._folder = os.path.join(os.path.realpath(_base()), f"copy-{self._name}")
            self._record = self._folder + ".json"  # the paths of the last sync
            # Hosts that share a home may receive the same folder at once; in containers even the pid may match.
            self._unfinished = f"{self._folder}.{os.getpid()}-{os.urandom(6).hex()}.unfinished"
            os.makedirs(self._folder, 0o700, exist_ok=True)
            self._remove_deleted()
            self._wanted = [index for index, file in enumerate(self._files) if not self._is_same(*file)]
        except (OSError, ValueError) as error:
            return [Wanted(time.monotonic_ns(), "", [], _describe(error))]
        wanted = [Wanted(time.monotonic_ns(), self._folder, list(self._wanted), "")]
        return [*wanted, *self._skip_empty()]

    def take(self, chunk: FileChunk) -> list[Event]:
        """Write the next bytes of the current file."""
        if not self._wanted or chunk.file != self._wanted[0]:
            if self._failed:  # it was still in flight
                return []
            raise ValueError(f"a chunk of file {chunk.file} came out of order")
        try:
            if self._open < 0:
                self._left = self._size()
                self._open = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            linux.write_all(self._open, chunk.data)
            self._left -= len(chunk.data)
            taken: list[Event] = [ChunksTaken(time.monotonic_ns(), len(chunk.data))]
            if self._left <= 0:
                os.close(self._open)
                self._open = -1
                self._finish(self._wanted.pop(0))
            return [*taken, *self._skip_empty()]
        except OSError as error:
            self._wanted = []
            self._failed = True
            return [Synced(time.monotonic_ns(), _describe(error))]

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

    def _path(self, relative: str) -> str:
        if os.path.isabs(relative) or ".." in relative.split("/"):
            raise ValueError(f"{relative} is not inside the folder")
        return os.path.join(self._folder, relative)

    def _is_same(self, relative: str, permissions: int, size: int, modified: int, link: str) -> bool:
        path = self._path(relative)
        try:
            facts = os.lstat(path)
        except OSError:
            return False
        if _is_behind_link(path):
            return False
        if link:
            return stat.S_ISLNK(facts.st_mode) and os.readlink(path) == link
        same = stat.S_ISREG(facts.st_mode) and (facts.st_size, facts.st_mtime_ns) == (size, modified)
        if same and facts.st_mode & _PERMISSIONS != permissions:
            os.chmod(path, permissions)
        return same

    def _skip_empty(self) -> list[Event]:
        """Create links and empty files, for which no chunk comes, up to the next file that has bytes."""
        try:
            while self._wanted and (self._files[self._wanted[0]][4] or self._size() == 0):
                index = self._wanted.pop(0)
                if not self._files[index][4]:
                    os.close(os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
                self._finish(index)
            if self._wanted:
                return []
            with open(self._record, "w") as file:
                json.dump([file[0] for file in self._files], file)
        except OSError as error:
            return [Synced(time.monotonic_ns(), _describe(error))]
        return [Synced(time.monotonic_ns(), "")]

    def _finish(self, index: int) -> None:
        """Put a file into place atomically: a process that has the old one open can read it to its end."""
        relative, permissions, _, modified, link = self._files[index]
        path = self._path(relative)
        self._make_room(relative)
        if link:
            os.symlink(link, self._unfinished)
        else:
            os.chmod(self._unfinished, permissions)
            os.utime(self._unfinished, ns=(modified, modified))
        os.replace(self._unfinished, path)

    def _make_room(self, relative: str) -> None:
        """Make the parents of a file real folders, replacing links and files, and remove a folder in its own place."""
        *folders, name = relative.split("/")
        parent = self._folder
        for part in folders:
            parent = os.path.join(parent, part)
            if os.path.lexists(parent) and (os.path.islink(parent) or not os.path.isdir(parent)):
                os.unlink(parent)
            try:
                os.mkdir(parent, 0o700)
            except FileExistsError:  # the usual case; or another agent has just made it
                pass
        path = os.path.join(parent, name)
        if os.path.isdir(path) and not os.path.islink(path):
            for folder, _, _ in sorted(os.walk(path), reverse=True):
                os.rmdir(folder)

    def _remove_deleted(self) -> None:
        """Remove files that an earlier sync brought and that the original folder no longer has."""
        try:
            with open(self._record) as file:
                before: list[Any] = json.load(file)
        except (OSError, ValueError):
            return
        now = {file[0] for file in self._files}
        for relative in before:
            if relative in now:
                continue
            path = self._path(str(relative))
            if _is_behind_link(path):  # the link was made since: its target is not ours
                continue
            try:
                os.unlink(path)
                os.removedirs(os.path.dirname(path))
            except OSError:  # it is gone already, or the folder is not empty
                pass
        os.makedirs(self._folder, 0o700, exist_ok=True)


def _is_behind_link(path: str) -> bool:
    folder = os.path.dirname(path)
    return os.path.realpath(folder) != folder


def _base() -> str:
    """A folder that is private to the user: the one that the agent was unpacked in (transport/ssh/bootstrap.py).

    An agent that belongs to an installed launchpad (`launchpad join`) uses the same one. Raises OSError or ValueError.
    """
    folder = os.path.dirname(PACKAGE)
    if os.path.basename(folder).startswith("agent-"):
        return os.path.dirname(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(cache, "launchpad")
    os.makedirs(folder, 0o700, exist_ok=True)
    facts = os.lstat(folder)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o170077 != 0o040000:
        raise ValueError(f"{folder} is not a directory that only you can enter")
    return folder


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
