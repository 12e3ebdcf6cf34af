"""The agent's parts: what an agent loads at its start."""

from __future__ import annotations

import subprocess
import sys

from launchpad.agent.parts import FEATURES


def test_an_agent_starts_without_its_features() -> None:
    code = "import sys, launchpad.agent.guard, launchpad.agent.loop; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert not {f"launchpad.agent{feature.module}" for feature in FEATURES} & set(loaded.split())
