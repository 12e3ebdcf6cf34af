"""What marked tests and their fixtures warn of, in words that pytest's own process understands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from _pytest.warnings import catch_warnings_for_item

_known: frozenset[str] = frozenset()  # the modules that pytest's own process has loaded


class WarningSeen(NamedTuple):
    """A warning that a test issued."""

    category: type[Warning]
    text: str
    file: str
    line: int


def in_forked_process() -> None:
    """Note, right after this process was forked from pytest's, which modules both have."""
    global _known
    _known = frozenset(sys.modules)


def seen(message: Any) -> WarningSeen:
    """A recorded `warnings.WarningMessage`, with the nearest category that pytest's own process can unpickle."""
    issued: type[Warning] = message.category
    category = next(one for one in issued.__mro__ if _is_known(one))
    text = str(message.message) if category is issued else f"{issued.__name__}: {message.message}"
    return WarningSeen(category, text, message.filename, message.lineno)


def _is_known(one: type) -> bool:
    return one.__module__ in _known and getattr(sys.modules[one.__module__], one.__qualname__, None) is one


@contextlib.contextmanager
def caught(item: pytest.Item, found: list[WarningSeen]) -> Iterator[None]:
    """In this block, warnings are filtered as pytest filters those of the test, and added to `found`."""
    if not item.config.pluginmanager.hasplugin("warnings"):  # -p no:warnings
        yield
        return

    def record(kwargs: dict[str, Any]) -> None:
        found.append(seen(kwargs["warning_message"]))

    hooks = SimpleNamespace(pytest_warning_recorded=SimpleNamespace(call_historic=record))
    with catch_warnings_for_item(item.config, hooks, "runtest", item):
        yield
