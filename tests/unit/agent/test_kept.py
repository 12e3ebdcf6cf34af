"""agent/host/kept: what is left of --sync and --sync-env, listed and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchpad.agent.host.environments import MARK
from launchpad.agent.host.kept import list_kept, remove
from launchpad.agent.host.synced_folder import hold


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy, an environment, one that is not whole, and an agent. A file is in two of them."""
    for name in ("copy-x", "env-y", "env-z", "agent-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own").write_bytes(bytes(100))
        (tmp_path / f"{name}.json").write_text("[]")
        os.utime(tmp_path / f"{name}.json", (5, 5))
    (tmp_path / "env-y" / "shared").write_bytes(bytes(1000))
    os.link(tmp_path / "env-y" / "shared", tmp_path / "env-z" / "shared")
    (tmp_path / "env-y" / MARK).write_text('{"origin": "here:/venv"}')
    os.utime(tmp_path / "env-y" / MARK, (7, 7))
    return tmp_path


def test_copies_and_environments_are_listed(base: Path) -> None:
    mark = (base / "env-y" / MARK).stat().st_size
    assert list_kept(str(base)).folders == [
        ("copy-x", 100, 100, 5.0, ""),
        ("env-y", 1100 + mark, 100 + mark, 7.0, "here:/venv"),
        ("env-z", 1100, 100, 5.0, ""),
    ]


def test_what_is_named_is_removed(base: Path) -> None:
    answer = remove(str(base), ["env-y", "copy-x", "env-gone"])
    assert (answer.names, answer.problem) == (["env-y", "copy-x"], "")
    assert sorted(os.listdir(base)) == ["agent-0", "agent-0.json", "env-z", "env-z.json"]
    assert (base / "env-z" / "shared").stat().st_size == 1000


def test_what_a_process_holds_stays(base: Path) -> None:
    held = hold(str(base / "env-y"))
    answer = remove(str(base), ["env-y", "env-z"])
    assert (answer.names, answer.problem) == (["env-z"], "env-y is in use by a job")
    os.close(held)
    assert remove(str(base), ["env-y"]).names == ["env-y"]


@pytest.mark.parametrize("name", ["agent-0", "../env-y", "env-y/own", ""])
def test_nothing_else_is_removed(base: Path, name: str) -> None:
    with pytest.raises(ValueError, match="none of the folders that are kept"):
        remove(str(base), [name])
    assert (base / "env-y" / "own").exists()
