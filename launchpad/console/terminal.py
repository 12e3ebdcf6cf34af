"""Renders for a terminal with rich. Elsewhere output is plain lines, and rich isn't imported."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launchpad.console.console import wants_colour

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# For a terminal that doesn't report its width.
COLUMNS = 80


def can_draw(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether the descriptor is a terminal that understands escape sequences."""
    return os.isatty(fd) and environ.get("TERM") != "dumb"


def columns(fd: int) -> int:
    """The width of the terminal."""
    try:
        return os.get_terminal_size(fd).columns or COLUMNS
    except OSError:  # the terminal is gone
        return COLUMNS


def drawn(what: RenderableType, fd: int, environ: Mapping[str, str], width: int = 0) -> bytes:
    """The bytes for the terminal at this descriptor. `width`: use fewer than all its columns.

    Tables are made to fit. Long lines of text are left for the terminal to wrap, so that they can be copied whole.
    """
    from rich.console import Console  # takes 40 ms

    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="auto" if wants_colour(fd, environ) else None,
        width=width or columns(fd),
        markup=False,
        emoji=False,
        highlight=False,
        _environ=environ,
    )
    with console.capture() as captured:
        console.print(what, soft_wrap=True)
    return captured.get().encode(errors="replace")


def plain_table() -> Table:
    """A table without edges, whose columns are one blank apart."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def printable(text: str) -> str:
    """The text on one line, with control characters escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode() for letter in text
    )
