"""Files that tests make."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    """Write a file, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path
