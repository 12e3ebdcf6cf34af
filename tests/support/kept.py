"""What is kept of images, asked of their keeper: `launchpad warm --status --json` would take a process each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launchpad.image import Cold
from launchpad.image.keeper_link import connect_at
from tests.support.command import Launchpad


def kept_at(folder: Path) -> dict[str, Any] | None:
    """What the keeper tells whose socket is in this folder, whichever installation it is of."""
    for path in folder.glob("warm-*"):
        if keeper := connect_at(str(path)):
            try:
                keeper.ask({"status": True})
                return keeper.answer()
            except Cold:  # it has just ended
                continue
            finally:
                keeper.close()
    return None


def kept(launchpad: Launchpad) -> dict[str, Any] | None:
    """What is kept for runs of this command."""
    return kept_at(Path(launchpad.environ["XDG_RUNTIME_DIR"], "launchpad"))


def uses(launchpad: Launchpad) -> int:
    """How many jobs have come from images."""
    found = kept(launchpad)
    return sum(image["uses"] for image in found["images"]) if found else 0
