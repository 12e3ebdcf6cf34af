"""Makes small ELF files for tests: nothing but the dynamic section of a shared library."""

from __future__ import annotations

import struct
from pathlib import Path

_DYNAMIC, _STRINGS = 64 + 2 * 56, 1024
NEEDED, RPATH, RUNPATH = 1, 15, 29


def write_elf(path: Path, *entries: tuple[int, str]) -> Path:
    """Write one whose dynamic section has these entries: NEEDED, RPATH or RUNPATH, and a text."""
    names, rows = b"\0", []
    for tag, text in entries:
        rows.append((tag, len(names)))
        names += text.encode() + b"\0"
    address = 0x4000  # what the file's offset 0 is loaded at
    rows += [(5, address + _STRINGS), (10, len(names)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *row) for row in rows)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    size = _STRINGS + len(names)
    head += struct.pack("<IIQQQQQQ", 1, 4, 0, address, address, size, size, 4096)
    head += struct.pack("<IIQQQQQQ", 2, 4, _DYNAMIC, address + _DYNAMIC, 0, len(dynamic), len(dynamic), 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((head + dynamic).ljust(_STRINGS, b"\0") + names)
    return path
