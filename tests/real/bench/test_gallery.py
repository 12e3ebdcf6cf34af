"""The fault gallery: for each broken program the verdict that a person would give, and silence for the healthy ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, Launchpad
from tests.support.gallery import CASES, CULPRIT, MORE, OTHERS, QUICK, SIZE, THIRD, Case, score
from tests.support.needs import needs_torch

pytestmark = [needs_torch, pytest.mark.usefixtures("from_image")]

# What else the verdict says of some, who all fail beside others that wait for them: exit code, kind, how, type, and the
# line of the program that is blamed.
EXACTLY = {
    "after_init": (1, "failure", "exception", "ValueError", 'raise ValueError("the loss'),
    "os_exit": (5, "failure", "exit", None, ""),
    "killed": (137, "failure", "signal", None, ""),
    "segfault": (139, "failure", "signal", None, "ctypes.string_at"),
    "abort": (134, "failure", "signal", None, "os.abort"),
    "exit_code": (3, "failure", "exception", "SystemExit", "sys.exit(3)"),
    "leaves_early": (1, "early", "exception", "RuntimeError", "dist.all_reduce"),
    "worker": (1, "failure", "exception", "IndexError", "raise IndexError"),
    "grouped": (1, "failure", "exception", "ExceptionGroup", "raise ExceptionGroup"),
}

TESTED = [*CASES, *(case for case in [*MORE, *THIRD] if case.name in QUICK)]


@pytest.mark.parametrize("case", TESTED, ids=lambda case: f"{case.name}-{case.backend}")
def test_the_verdict_is_a_persons(case: Case, launchpad: Launchpad, tmp_path: Path) -> None:
    if case.backend == "mpi":
        pytest.importorskip("mpi4py")
    options = ("--nproc", SIZE, "--backend", case.backend, "--env", f"TMPDIR={tmp_path}", *case.options)
    done = launchpad.run("run", *options, case.program, case.name, timeout=2 * DEADLINE)
    found = list(launchpad.state.rglob("verdict.json"))
    if case.healthy:
        assert done.returncode == 0, done.stderr
        assert found == []
        return
    assert done.returncode != 0, done.stderr
    verdict = json.loads(found[0].read_text())
    assert len(verdict["text"]) <= 40
    assert score(case, verdict) == (True, True), "\n".join(verdict["text"])
    if case.backend == "gloo" and case.name in EXACTLY:
        code, kind, how, type_, source = EXACTLY[case.name]
        assert (done.returncode, verdict["exit_code"]) == (code, code), done.stderr
        assert (verdict["kind"], verdict["how"], verdict["rank"], verdict["type"]) == (kind, how, CULPRIT, type_), (
            verdict
        )
        if source:
            assert source in Path(verdict["file"]).read_text().splitlines()[verdict["line"] - 1]
        others = {one["rank"] for one in verdict["victims"]} | set(verdict["stopped"])
        assert others == {*OTHERS} - {verdict.get("first_victim")}
        assert verdict["failed_too"] == verdict["close"] == []
