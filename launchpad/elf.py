"""Reads what an ELF file, a program or a shared library, says about the libraries that it needs (elf(5))."""

import os
import struct
from collections.abc import Sequence

from .named import NamedTuple


class Elf(NamedTuple):
    """The dynamic section, as far as the dynamic linker looks for libraries by it."""

    needed: list[str]
    rpath: list[str]  # for the libraries that its own ones need too; $ORIGIN is its folder
    runpath: list[str]
    names: bytes  # of its symbols


def read_elf(path: str) -> Elf | None:
    """The dynamic section of a 64-bit file in this byte order; None for any other file."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return None
            start, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
            file.seek(start)
            table = file.read(size * count)
            loads, dynamic = [], (0, 0)
            for at in range(0, size * count, size):
                kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", table, at)
                if kind == 1:
                    loads.append((address, offset, length))
                elif kind == 2:
                    dynamic = (offset, length)
            file.seek(dynamic[0])
            entries = list(struct.iter_unpack("<qQ", file.read(dynamic[1] // 16 * 16)))
            values = dict(entries)
            strings = values.get(5, 0)
            offset = next(
                (offset + strings - address for address, offset, length in loads if 0 <= strings - address < length), -1
            )
            if offset < 0:
                return None
            file.seek(offset)
            names = file.read(values.get(10, 0))
    except (OSError, ValueError, OverflowError, MemoryError, struct.error):  # damaged offsets or lengths
        return None

    def text(at: int) -> str:
        return os.fsdecode(names[at : names.find(b"\0", at)])

    def folders(tag: int) -> list[str]:
        return [one for one in text(values[tag]).split(":") if one] if tag in values else []

    return Elf([text(value) for tag, value in entries if tag == 1], folders(15), folders(29), names)


def expanded(folders: Sequence[str], path: str) -> list[str]:
    """The folders of an RPATH or RUNPATH of the file at this path."""
    origin = os.path.dirname(os.path.realpath(path))
    return [one.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for one in folders]
