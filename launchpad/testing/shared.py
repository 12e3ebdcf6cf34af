"""Sets up what the ranks of a test share, once, before they are forked: fixtures of a wider scope, and tmp_path.

A fixture that depends on `rank`, `world_size` or `process_group` is set up in each rank instead, for each test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

RANK_FIXTURES = frozenset(("rank", "world_size", "process_group"))

# Of a test's own fixtures, those that all ranks see the same: one folder for all.
_SAME_FOR_ALL = frozenset(("tmp_path", "tmpdir"))


def set_up(item: pytest.Item) -> None:
    """Set up the item's collectors and shared fixtures. Raises what they raise."""
    state: Any = item.session._setupstate
    state.teardown_exact(item)
    state.setup(item.parent)
    state.stack[item] = ([], None)  # what the ranks need is set up there; this takes the finalizers of tmp_path
    request: Any = getattr(item, "_request", None)
    if request is None:
        return
    info: Any = item._fixtureinfo  # type: ignore[attr-defined]
    for name in item.fixturenames:  # type: ignore[attr-defined]
        if _is_shared(name, info.name2fixturedefs):
            request.getfixturevalue(name)


def _is_shared(name: str, definitions: Mapping[str, Sequence[Any]]) -> bool:
    found = definitions.get(name)
    if not found or (found[-1].scope == "function" and name not in _SAME_FOR_ALL):
        return False
    return not needs_rank(name, lambda one: [arg for each in definitions.get(one, ()) for arg in each.argnames])


def needs_rank(name: str, needed: Callable[[str], Sequence[str]]) -> bool:
    """Whether a fixture, or one that it needs, directly or not, has a value only in a rank. Pure."""
    seen, todo = {name}, [name]
    while todo:
        one = todo.pop()
        if one in RANK_FIXTURES:
            return True
        new = set(needed(one)) - seen
        seen |= new
        todo += new
    return False


def uses(item: pytest.Item, name: str) -> bool:
    """Whether the item uses a fixture, directly or not."""
    return name in getattr(item, "fixturenames", ())


def forget(item: pytest.Item) -> None:
    """In a rank: what was set up before the fork is not this process's to tear down."""
    state: Any = item.session._setupstate
    state.stack.pop(item)
    for node, (_, failure) in state.stack.items():
        state.stack[node] = ([], failure)
