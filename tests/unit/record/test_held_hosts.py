"""record/held_hosts: the file that says where ranks go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchpad.record import held_hosts
from launchpad.record.held_hosts import HELD, HeldHost

HOST = HeldHost("h1", "ann", 22, "/venv/bin/python", "", "", False, "/tmp/launchpad-1", "secret")


def test_what_was_noted_is_read_by_its_owner_only(tmp_path: Path) -> None:
    held_hosts.write(str(tmp_path), [HOST])
    assert held_hosts.read(str(tmp_path)) == [HOST]
    assert (tmp_path / HELD).stat().st_mode & 0o777 == 0o600
    held_hosts.remove(str(tmp_path))
    assert held_hosts.read(str(tmp_path)) == []
    held_hosts.remove(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[["h1"]]', "nonsense", '[["h1", "", "22", "", "", "", false, "", ""]]']
)
def test_anything_else_is_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / HELD).write_text(text)
    assert held_hosts.read(str(tmp_path)) == []
