"""What the tests of rundir share."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchpad.agent.ranks import rundir


@pytest.fixture(autouse=True)
def _own_folder(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "_parents", lambda: iter([str(scratch)]))
