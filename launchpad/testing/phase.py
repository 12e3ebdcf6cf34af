"""Runs what is set up and torn down once for all ranks, as pytest does a phase of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pytest.logging import caplog_handler_key, caplog_records_key
from _pytest.runner import CallInfo

from launchpad.testing.outcome import TestEnd


def run(item: pytest.Item, when: Any, action: Callable[[], None]) -> dict[str, Any] | None:
    """Returns a report on a failure, as pytest serialises it. Raises KeyboardInterrupt, and what pytest.exit raises."""
    with _logs(item, when), _output(item, when):
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


@contextlib.contextmanager
def _logs(item: pytest.Item, when: Any) -> Iterator[None]:
    plugin: Any = item.config.pluginmanager.getplugin("logging-plugin")
    if plugin is None:
        yield
        return
    item.stash[caplog_records_key] = {}
    caught = plugin._runtest_for(item, when)
    if not hasattr(caught, "__enter__"):  # before pytest 9
        caught = contextlib.contextmanager(lambda: caught)()
    try:
        with caught:
            yield
    finally:
        del item.stash[caplog_records_key]
        del item.stash[caplog_handler_key]


def _output(item: pytest.Item, when: Any) -> contextlib.AbstractContextManager[None]:
    manager: Any = item.config.pluginmanager.getplugin("capturemanager")
    return manager.item_capture(when, item) if manager is not None else contextlib.nullcontext()
