"""Runs what is set up and torn down once for all ranks, as pytest does a phase of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.runner import CallInfo

from launchpad.testing.outcome import TestEnd


def run(item: pytest.Item, when: Any, action: Callable[[], None]) -> dict[str, Any] | None:
    """Returns a report on a failure, as pytest serialises it. Raises KeyboardInterrupt, and what pytest.exit raises."""
    manager: Any = item.config.pluginmanager.getplugin("capturemanager")
    with manager.item_capture(when, item) if manager is not None else contextlib.nullcontext():
        call = CallInfo.from_call(action, when, (KeyboardInterrupt, pytest.exit.Exception))
    if call.excinfo is None:
        return None
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    found: dict[str, Any] = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
    return found


def tear_down(item: pytest.Item, following: pytest.Item | None) -> TestEnd:
    """Tear down what this process has set up and the following test doesn't need."""
    state: Any = item.session._setupstate
    item._report_sections.clear()
    try:
        report = run(item, "teardown", lambda: state.teardown_exact(following))
        sections = [(f"Captured {name} {when}", text) for when, name, text in item._report_sections]
        return TestEnd(before=report, sections=sections)
    finally:
        item._report_sections.clear()
