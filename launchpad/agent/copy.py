"""A node's copy of the folder that a job was started in (`--sync`): what changed is received, what went is removed.

As rsync does, a file counts as unchanged where size and modification time are the same. What the ranks have written
beside the files is left alone: only what was received by an earlier sync is ever removed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any

from ..commands import Piece, Sync
from ..events import Event, Synced, Taken, Wanted

_PERMISSIONS = 0o777


class Copy:
    """Receives one folder. Every step returns what is to be said to the head."""

    def __init__(self, asked: Sync) -> None:
        if "/" in asked.name or "\0" in asked.name:
            raise ValueError(f"{asked.name!r} is no name for a copy")
        self._files = asked.files
        self._folder = os.path.join(os.path.realpath(_base()), f"copy-{asked.name}")
        self._record = self._folder + ".json"  # the paths of the last sync
        # Hosts that share a home may receive the same folder at once, and in containers with the same process id.
        self._unfinished = f"{self._folder}.{os.getpid()}-{os.urandom(6).hex()}.unfinished"
        self._wanted: list[int] = []
        self._open = -1  # the descriptor of the file that is being received
        self._left = 0  # bytes of it
        self._failed = False

    def begin(self) -> list[Event]:
        """Find out what is missing here."""
        try:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            self._remove_gone()
            self._wanted = [place for place, file in enumerate(self._files) if not self._is_same(*file)]
        except (OSError, ValueError) as error:
            return [Wanted(time.monotonic_ns(), "", [], _in_words(error))]
        wanted = [Wanted(time.monotonic_ns(), self._folder, list(self._wanted), "")]
        return [*wanted, *self._skip_empty()]

    def take(self, piece: Piece) -> list[Event]:
        """Write bytes of the file that is due."""
        if not self._wanted or piece.file != self._wanted[0]:
            if self._failed:  # what was under way then
                return []
            raise ValueError(f"a piece of file {piece.file} is not due")
        try:
            if self._open < 0:
                self._left = self._size()
                self._open = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            view = memoryview(piece.data)
            while view:
                view = view[os.write(self._open, view) :]
            self._left -= len(piece.data)
            taken: list[Event] = [Taken(time.monotonic_ns(), len(piece.data))]
            if self._left <= 0:
                os.close(self._open)
                self._open = -1
                self._finish(self._wanted.pop(0))
            return [*taken, *self._skip_empty()]
        except OSError as error:
            self._wanted = []
            self._failed = True
            return [Synced(time.monotonic_ns(), _in_words(error))]

    def close(self) -> None:
        """Give up what is half received."""
        if self._open >= 0:
            os.close(self._open)
            os.unlink(self._unfinished)
            self._open = -1

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
        """Make links and empty files, of which no piece comes, up to the next file that has bytes."""
        try:
            while self._wanted and (self._files[self._wanted[0]][4] or self._size() == 0):
                place = self._wanted.pop(0)
                if not self._files[place][4]:
                    os.close(os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
                self._finish(place)
            if self._wanted:
                return []
            with open(self._record, "w") as file:
                json.dump([file[0] for file in self._files], file)
        except OSError as error:
            return [Synced(time.monotonic_ns(), _in_words(error))]
        return [Synced(time.monotonic_ns(), "")]

    def _finish(self, place: int) -> None:
        """Put a file in its place, whole: who reads the old one reads it to its end."""
        relative, permissions, _, modified, link = self._files[place]
        path = self._path(relative)
        self._make_room(relative)
        if link:
            os.symlink(link, self._unfinished)
        else:
            os.chmod(self._unfinished, permissions)
            os.utime(self._unfinished, ns=(modified, modified))
        os.replace(self._unfinished, path)

    def _make_room(self, relative: str) -> None:
        """Real folders around a file, in the place of links and files; and no folder in its own place."""
        *folders, name = relative.split("/")
        parent = self._folder
        for part in folders:
            parent = os.path.join(parent, part)
            if os.path.lexists(parent) and (os.path.islink(parent) or not os.path.isdir(parent)):
                os.unlink(parent)
            try:
                os.mkdir(parent, 0o700)
            except FileExistsError:  # as a rule; or by another agent, this very moment
                pass
        path = os.path.join(parent, name)
        if os.path.isdir(path) and not os.path.islink(path):
            for folder, _, _ in sorted(os.walk(path), reverse=True):
                os.rmdir(folder)

    def _remove_gone(self) -> None:
        """Remove what an earlier sync brought and the folder has no more."""
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
            if _is_behind_link(path):  # put there since: what it leads to is not ours
                continue
            try:
                os.unlink(path)
                os.removedirs(os.path.dirname(path))
            except OSError:  # gone by now; or a folder that still has something in it
                pass
        os.makedirs(self._folder, 0o700, exist_ok=True)


def _is_behind_link(path: str) -> bool:
    folder = os.path.dirname(path)
    return os.path.realpath(folder) != folder


def _base() -> str:
    """Beside the folder that the agent was unpacked in (transport/ssh/bootstrap.py): private to the user."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not os.path.basename(folder).startswith("agent-"):
        raise ValueError("only an agent that was sent here keeps copies")
    return os.path.dirname(folder)


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
