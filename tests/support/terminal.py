"""A real pseudo-terminal with a command in it, and its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import shlex
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad

COLUMNS = 60

# Python code that draws a bar until there is a file "a", and another one over it until there is a file "b".
WIDE_BAR = """
import os, sys, time
for letter in "ab":
    sys.stderr.write(chr(13) + letter * 200)
    sys.stderr.flush()
    while not os.path.exists(letter): time.sleep(0.01)
"""


class Terminal:
    """A pseudo-terminal with a command in it, as a person would use it."""

    def __init__(
        self, argv: list[str], launchpad: Launchpad, environ: Mapping[str, str], columns: int = COLUMNS
    ) -> None:
        self.fd, other = os.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.seen = ""  # what no `expect` has matched yet
        self.shown = ""  # all that has come
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            argv,
            stdin=other,
            stdout=other,
            stderr=other,
            preexec_fn=take_terminal,
            cwd=launchpad.folder,
            env={**launchpad.environ, "TERM": "xterm", **environ},
        )
        os.close(other)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self.fd, text.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Read until the pattern appears in what is not matched yet; return the match."""
        deadline = time.monotonic() + DEADLINE
        while not (match := re.search(pattern, self.seen)):
            assert self._read(deadline), f"the terminal was closed before {pattern!r} appeared in {self.seen!r}"
        self.seen = self.seen[match.end() :]
        return match

    def rest(self) -> str:
        """All that comes until the command has left the terminal."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        return self.seen

    def _read(self, deadline: float) -> bool:
        left = max(0.0, deadline - time.monotonic())
        assert select.select([self.fd], [], [], left)[0], f"nothing more came after {self.seen!r}"
        try:
            text = self._decoder.decode(os.read(self.fd, 65536))
        except OSError:  # EIO: everybody has left the terminal
            return False
        self.seen += text
        self.shown += text
        return True

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        return not select.select([self.fd], [], [], seconds)[0]

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self.fd)
        self.fd = os.open(os.devnull, os.O_RDONLY)

    def end(self) -> int:
        """Wait for the command; its exit code."""
        try:
            return self.process.wait(timeout=DEADLINE)
        finally:
            self.process.kill()
            os.close(self.fd)


def states_of_wide_bar(one: Terminal, folder: Path) -> list[str]:
    """Have WIDE_BAR draw both bars, in this folder; returns what came, split where the line was begun anew."""
    for letter in "ab":
        one.expect(letter * 5)
        (folder / letter).touch()
    one.rest()
    return one.shown.split("\r\x1b[K")


Start = Callable[..., Terminal]


@pytest.fixture
def terminal(launchpad: Launchpad) -> Iterator[Start]:
    """Starts `launchpad ARGS` on a terminal."""
    opened: list[Terminal] = []

    def start(*args: object, shell: str = "", **environ: str) -> Terminal:
        argv = launchpad.argv(*args)
        if shell:
            argv = ["bash", "-c", shell.format(shlex.join(argv))]
        opened.append(Terminal(argv, launchpad, environ))
        return opened[-1]

    yield start
    for one in opened:
        if one.process.poll() is None:
            one.end()
