"""The launcher's own messages: how they look, and on stderr where there is no console."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from launchpad.console import live
from launchpad.protocol.events import STDERR


def say_on_stderr(text: str, *, bad: bool = False) -> None:
    """Show a message of the launcher's own before there is a console, or without one, if stderr takes it."""
    with live.aside, suppress(OSError):
        os.write(STDERR, (message_line(text, wants_colour(STDERR, os.environ), bad) + "\n").encode(errors="replace"))


def message_line(line: str, colour: bool, bad: bool) -> str:
    """A line of the launcher's own, as it appears on stderr."""
    if not colour:
        return f"launchpad: {line}"
    return f"\x1b[0;{'1;31' if bad else '1;36'}mlaunchpad:\x1b[0m {line}"


def wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether to use colour: only on a terminal that is not dumb, and unless NO_COLOR is set (https://no-color.org)."""
    return os.isatty(fd) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
