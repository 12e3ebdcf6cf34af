"""elf: what programs and shared libraries say of the libraries that they need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launchpad.elf import Elf, expanded, read_elf
from tests.support.elf import NEEDED, RPATH, RUNPATH, write_elf


def test_the_dynamic_section_is_read(tmp_path: Path) -> None:
    path = write_elf(
        tmp_path / "a.so", (NEEDED, "libb.so.1"), (RUNPATH, "/opt/b:$ORIGIN/../lib"), (NEEDED, "libc.so.6")
    )
    assert read_elf(str(path)) == Elf(
        ["libb.so.1", "libc.so.6"], [], ["/opt/b", "$ORIGIN/../lib"], path.read_bytes()[1024:]
    )
    old = read_elf(str(write_elf(tmp_path / "old.so", (RPATH, "/opt/b:"))))
    assert old is not None
    assert (old.rpath, old.runpath) == (["/opt/b"], [])


def test_this_python_needs_a_c_library() -> None:
    found = read_elf(sys.executable)
    assert found is not None
    assert any(name.startswith("libc.") for name in found.needed)


def test_origin_is_the_folder_of_the_file_itself(tmp_path: Path) -> None:
    real = write_elf(tmp_path / "lib" / "a.so")
    (tmp_path / "link.so").symlink_to(real)
    folders = ["$ORIGIN", "${ORIGIN}/sub", "/opt"]
    assert expanded(folders, str(tmp_path / "link.so")) == [f"{real.parent}", f"{real.parent}/sub", "/opt"]


@pytest.mark.parametrize("size", [0, 10, 63, 100, 170, 200, 1030])
def test_a_damaged_file_is_none(tmp_path: Path, size: int) -> None:
    whole = write_elf(tmp_path / "a.so", (NEEDED, "libb.so"))
    whole.write_bytes(whole.read_bytes()[:size])
    found = read_elf(str(whole))
    assert found is None or "libb.so" not in found.needed


@pytest.mark.parametrize("field", [32, 64 + 56 + 8, 64 + 56 + 32, 64 + 2 * 56 + 2 * 16 + 8])
@pytest.mark.parametrize("number", [1 << 60, (1 << 63) - 1, (1 << 64) - 1])
def test_a_file_with_damaged_offsets_or_lengths_is_none(tmp_path: Path, field: int, number: int) -> None:
    path = write_elf(tmp_path / "a.so", (NEEDED, "libb.so"))
    whole = bytearray(path.read_bytes())
    whole[field : field + 8] = number.to_bytes(8, "little")
    path.write_bytes(whole)
    found = read_elf(str(path))
    assert found is None or found.needed == ["libb.so"]


def test_other_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("#!/bin/sh\n" * 20)
    assert read_elf(str(tmp_path / "text")) is None
    assert read_elf(str(tmp_path / "gone")) is None
