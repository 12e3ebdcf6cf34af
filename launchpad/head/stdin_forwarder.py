"""Forwards stdin to a rank on another machine, or keys to `launchpad attach`: only in the foreground, at its pace."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

from launchpad import caller
from launchpad.protocol.events import StdinRead

# The most bytes in flight. Programs that read stdin after us can't have what we have read, even if the rank doesn't,
# unless it is a file.
WINDOW_BYTES = 64 << 10

# How often a launcher in the background checks whether it is in the foreground again.
FOREGROUND_SECONDS = 0.2


class StdinForwarder:
    """A thread that reads stdin and posts what it read to the loop."""

    def __init__(self, post: Callable[[StdinRead], None], *, keys: bool = False, flow_control: bool = True) -> None:
        """`keys`: the rank has a terminal of its own, so it gets each key at once, and that terminal echoes it.

        Without `flow_control`, Ctrl-S and Ctrl-Q are keys like others.
        """
        self._post = post
        self._room = WINDOW_BYTES
        self._ended = False
        self._over = False  # nobody reads any more
        self._size = 0  # bytes that we have read
        self._seeks = _seeks(0)
        self._more_room = threading.Condition()
        self._keys = _KeyMode(flow_control) if keys else None
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def taken(self, size: int) -> None:
        """The rank has read `size` bytes."""
        with self._more_room:
            self._room += size
            self._more_room.notify()

    def reset(self) -> None:
        """Reset for a restart: bytes in flight were lost with the node, and the new rank must see the end of file."""
        with self._more_room:
            self._room = WINDOW_BYTES
            self._more_room.notify()
            ended = self._ended
        if ended:
            self._post(StdinRead(time.monotonic_ns(), b""))

    def give_back(self, unread: int) -> int:
        """The job is over: read no more, and leave what was not used to whoever reads stdin after us.

        `unread`: how much of what the rank was given it has not read. Returns how many bytes are lost, as they can be
        given back to a file only.
        """
        with self._more_room:
            self._over = True
            unused = min(WINDOW_BYTES - self._room + unread, self._size)  # `unread` is what another machine says
            if not self._seeks:
                return unused
            os.lseek(0, -unused, os.SEEK_CUR)
            return 0

    def rest(self) -> None:
        """We are about to be suspended: leave the terminal as it was."""
        if self._keys:
            self._keys.release()

    def go_on(self) -> None:
        """We have been continued, perhaps in the foreground."""
        if self._keys and _in_foreground():
            self._keys.take()

    def close(self) -> None:
        """Leave the terminal as it was, for good."""
        if self._keys:
            self._keys.release(for_good=True)

    def _read(self) -> None:
        data = b"."
        self.go_on()
        while data:
            with self._more_room:
                while self._room <= 0:
                    self._more_room.wait()
                room = self._room
            try:
                select.select([0], [], [])
                if os.isatty(0) and not _in_foreground():
                    time.sleep(FOREGROUND_SECONDS)
                    continue
                self.go_on()
            except OSError:  # the terminal is gone
                pass
            data = self._take(room)
            self._post(StdinRead(time.monotonic_ns(), data))

    def _take(self, size: int) -> bytes:
        # A file doesn't keep us waiting; and while we read it, nothing can be given back to it.
        with self._more_room if self._seeks else contextlib.nullcontext():
            try:
                data = b"" if self._over else os.read(0, size)
            except OSError:  # the terminal is gone
                data = b""
            with self._more_room:
                self._room -= len(data)
                self._size += len(data)
                self._ended = not data
        return data


def _seeks(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True


def _in_foreground() -> bool:
    try:
        return caller.in_foreground(0)
    except OSError:  # the terminal is gone, or not ours
        return False


class _KeyMode:
    """The settings of our terminal: each key is read at once and not echoed. Signals stay ours."""

    def __init__(self, flow_control: bool) -> None:
        self._flow_control = flow_control
        self._lock = threading.Lock()
        self._before: list[Any] | None = None  # the settings to go back to
        self._over = False

    def take(self) -> None:
        """Set the terminal, unless it is set. Call this in its foreground."""
        with self._lock:
            if self._before is not None or self._over:
                return
            try:
                self._before = termios.tcgetattr(0)
                termios.tcsetattr(0, termios.TCSANOW, _for_keys(termios.tcgetattr(0), self._flow_control))
            except termios.error:  # it is gone
                pass

    def release(self, *, for_good: bool = False) -> None:
        """Set it as it was."""
        with self._lock:
            self._over = self._over or for_good
            before, self._before = self._before, None
            if before is not None and _in_foreground():
                try:
                    termios.tcsetattr(0, termios.TCSANOW, before)
                except termios.error:
                    pass


def _for_keys(settings: list[Any], flow_control: bool) -> list[Any]:
    """These settings, changed so that keys are passed on as they are; but Ctrl-C, Ctrl-Z, Ctrl-S … keep their sense."""
    made = list(settings)
    if not flow_control:
        made[0] &= ~termios.IXON
    made[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP)
    made[3] &= ~(termios.ICANON | termios.ECHO | termios.ECHONL | termios.IEXTEN)
    made[6] = list(settings[6])
    made[6][termios.VMIN], made[6][termios.VTIME] = 1, 0
    return made
