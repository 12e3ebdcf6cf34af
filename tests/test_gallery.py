"""The fault gallery: for each broken program the verdict that a person would give, and silence for the healthy ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gallery import CASES, SIZE, Case, score

from .conftest import DEADLINE, Launchpad

pytest.importorskip("torch")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.backend}")
def test_the_verdict_is_a_persons(case: Case, launchpad: Launchpad, tmp_path: Path) -> None:
    if case.backend == "mpi":
        pytest.importorskip("mpi4py")
    options = ("--nproc", SIZE, "--backend", case.backend, "--env", f"TMPDIR={tmp_path}", *case.options)
    done = launchpad.run("run", *options, "gallery.py", case.name, timeout=2 * DEADLINE)
    found = list(launchpad.state.rglob("verdict.json"))
    if case.healthy:
        assert done.returncode == 0, done.stderr
        assert found == []
        return
    assert done.returncode != 0, done.stderr
    verdict = json.loads(found[0].read_text())
    assert len(verdict["text"]) <= 40
    assert score(case, verdict) == (True, True), "\n".join(verdict["text"])
