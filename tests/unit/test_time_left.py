"""time_left and agent/ranks/time_limit: what ranks read of what the agent was told."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from launchpad.agent.ranks import rundir
from launchpad.agent.ranks.time_limit import TimeLimit
from launchpad.protocol.commands import StopBy
from launchpad.time_left import stop_by


def test_ranks_read_what_the_agent_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCHPAD_STOP_BY", raising=False)
    assert stop_by() is None
    monkeypatch.setenv("LAUNCHPAD_STOP_BY", rundir.stop_by_file(str(tmp_path)))
    part = TimeLimit(SimpleNamespace(folder=str(tmp_path)))  # type: ignore[arg-type]
    part.on(StopBy(None))
    assert stop_by() is None
    part.on(StopBy(100.0))
    left = stop_by()
    assert left is not None
    assert 99 < left < 100.1  # written with a precision of milliseconds
    part.on(StopBy(-5.0))
    assert stop_by() == 0.0
    part.on(StopBy(None))
    assert stop_by() is None
    assert os.listdir(tmp_path) == []
